"""The forwards of a program, as a plan."""

from stretto.ir.action import Action, Op
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
