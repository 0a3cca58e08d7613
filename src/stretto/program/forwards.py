"""The forwards of a program, as a plan."""

from stretto.ir.action import Action, Op
from stretto.ir.placement import Placement
from stretto.ir.plan import Plan
from stretto.program.program import Program
from stretto.program.task import FORWARDS


def forwards_of(program: Program) -> Plan:
    """Return each device's forwards, in the order in which the device starts them.

    >>> from stretto.program.lower import lower
    >>> from stretto.schedules.one_f_one_b import one_f_one_b
    >>> print(forwards_of(lower(one_f_one_b(devices=2, microbatches=2))))
    0F0,0F1
    1F0,1F1
    """
    rows: list[list[Action]] = [[] for _ in range(program.devices)]
    for task in program.tasks():
        if task.kind in FORWARDS and task.part == 0:
            rows[task.device].append(Action(task.stage, Op.F, task.microbatch))
    return Plan(tuple(map(tuple, rows)), program.placement)


def first_forwards(plan: Plan, count: int) -> Plan:
    """Return a plan of forwards for the first `count` microbatches only, of each replica on a mesh.

    If a replica's microbatches take several routes, all of them take the first one, since their number may be odd.

    >>> from stretto.program.lower import lower
    >>> from stretto.schedules.dualpipe import dualpipe
    >>> print(first_forwards(forwards_of(lower(dualpipe(devices=2, microbatches=4))), 3))
    0F0,0F1,0F2
    1F0,1F1,1F2
    """
    placement = plan.placement
    replicas = placement.replicas
    ways, each = len(placement.routes) // replicas, plan.microbatches // replicas
    routes = placement.routes[::ways]
    rows: list[list[Action]] = [[] for _ in plan.rows]
    if ways == 1:
        for row, cells in zip(rows, plan.rows, strict=True):
            for cell in cells:
                if isinstance(cell, Action) and cell.microbatch % each < count:
                    microbatch = cell.microbatch // each * count + cell.microbatch % each
                    row.append(Action(cell.stage, Op.F, microbatch))
    else:
        for replica, route in enumerate(routes):
            for microbatch in range(replica * count, (replica + 1) * count):
                for stage, device in enumerate(route):
                    rows[device].append(Action(stage, Op.F, microbatch))
    return Plan(tuple(map(tuple, rows)), Placement(routes, count * replicas, placement.mesh))
