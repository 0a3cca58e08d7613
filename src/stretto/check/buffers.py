"""Rule: no buffer is refilled before its contents were used or copied, and each host buffer is for one stage."""

from collections.abc import Iterator

from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.buffers import refills
from stretto.program.columns import Bools, Ints
from stretto.program.program import Program
from stretto.program.task import Kind


def buffers(program: Program, waits: Waits) -> Iterator[Violation]:
    work = program.work
    for fills, filled, empties in refills(program.tables, program.device):
        wrong = (empties < 0) | (empties > fills) | ~waits.hold(fills, empties)
        for task, before, reader in _rows((fills, filled, empties), wrong):
            held = f"what {program.task(before)} put there"
            if reader < 0:
                message = f"{_fills(program, task)}, but nothing has used {held}"
                yield Violation("buffers", message, (task, before))
                continue
            user = program.task(reader)
            if reader > task:
                message = f"{_fills(program, task)} and comes before {user}, which uses {held}"
            else:
                message = f"{_fills(program, task)} without waiting until {user} is done with {held}"
            yield Violation("buffers", message, (task, before, reader))
        mixed = (work.kind[fills] == Kind.OFFLOAD) & (work.stage[fills] != work.stage[filled])
        for task, before in _rows((fills, filled), mixed):
            message = f"{_fills(program, task)}, but {program.task(before)} of another stage fills it, too"
            yield Violation("buffers", message, (task, before))


def _rows(columns: tuple[Ints, ...], wrong: Bools) -> Iterator[tuple[int, ...]]:
    return zip(*(column[wrong].tolist() for column in columns), strict=True)


def _fills(program: Program, index: int) -> str:
    task = program.task(index)
    memory = "host buffer" if task.kind is Kind.OFFLOAD else "buffer"
    return f"{task} fills {memory} {task.slot} of device {task.device}"
