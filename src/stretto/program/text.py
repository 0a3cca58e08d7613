"""Reads programs from PyTorch's CSV, with or without transfers."""

from collections.abc import Iterator

from stretto.ir.action import Action, End, Op, Pair, Reduce, Transfer
from stretto.ir.errors import TextError
from stretto.ir.placement import Placement
from stretto.ir.plan import Plan, infer_placement
from stretto.ir.text import Item, parse_rows
from stretto.program.anatomy import Anatomy
from stretto.program.lower import lowered
from stretto.program.needs import link_tasks
from stretto.program.program import Program
from stretto.program.sums import Sums
from stretto.program.task import Kind, Lane, Task


def parse_program(text: str) -> Program:
    """Read a program from either form of CSV. A compute-only one is lowered. Otherwise the transfers stay where they
    are, and so do the gradient sums of stages that live on several devices.

    >>> print(parse_program("0F0,0SEND_F0\\n1RECV_F0,1F0"))
    0F0,0SEND_F0
    1RECV_F0,1F0
    """
    return lowered(parse_order(text))


def parse_order(text: str) -> Plan | Program:
    """Read a plan from compute-only CSV, or a program from CSV with transfers."""
    rows = parse_rows(text)
    cells = [tuple(item for item in row if not isinstance(item, Transfer | Reduce)) for row in rows]
    placement = infer_placement(cells)
    if not any(isinstance(item, Transfer) for row in rows for item in row):
        return Plan(tuple(cells), placement)
    summed = {*Sums(placement, Anatomy.whole(placement.stages)).stage.tolist()}
    kept = [[item for item in row if not isinstance(item, Reduce) or item.stage in summed] for row in rows]
    return link_tasks((task for device, row in enumerate(kept) for task in _tasks(device, row, placement)), placement)


def _tasks(device: int, row: list[Item], placement: Placement) -> Iterator[Task]:
    wgrad: Task | None = None  # the weight part of the last full backward, still to come
    for item in row:
        if wgrad is not None and not isinstance(item, Transfer):  # only transfers go first; a sum waits for it
            yield wgrad
            wgrad = None
        yield _task(device, item, placement)
        match item:
            case Pair(backward=backward) | (Action(op=Op.B) as backward):
                wgrad = Task(Lane(device), Kind.WGRAD, backward.stage, backward.microbatch)
            case _:
                pass
    if wgrad is not None:
        yield wgrad


def _task(device: int, item: Item, placement: Placement) -> Task:
    match item:
        case Pair(forward, backward):
            return Task(
                Lane(device), Kind.PAIR, forward.stage, forward.microbatch, (backward.stage, backward.microbatch)
            )
        case Reduce(stage):
            return Task(Lane(device, "reduce"), Kind.REDUCE, stage, 0)
        case Action(stage, op, microbatch):
            return Task(Lane(device), Kind[op.name], stage, microbatch)
        case Transfer(stage, end, microbatch):
            neighbour = stage + (1 if end in (End.SEND_F, End.RECV_B) else -1)
            if not 0 <= neighbour < placement.stages or microbatch >= placement.microbatches:
                raise TextError(
                    f"{item} has no other end: there are {placement.stages} stages "
                    f"and {placement.microbatches} microbatches"
                )
            name = "send" if end in (End.SEND_F, End.SEND_B) else "recv"
            lane = Lane(device, name, placement.device(neighbour, microbatch))
            return Task(lane, Kind[end.name], stage, microbatch)
