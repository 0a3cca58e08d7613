"""Rule: no buffer is refilled before its contents were used for the last time or copied out."""

from collections.abc import Iterator

from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.buffers import refills
from stretto.program.program import Program


def buffers(program: Program, waits: Waits) -> Iterator[Violation]:
    device = program.device
    for fills, filled, empties in refills(program.tables, device):
        wrong = (empties < 0) | ~waits.hold(fills, empties)
        for task, before, reader in zip(*(column[wrong].tolist() for column in (fills, filled, empties)), strict=True):
            buffer = f"buffer {program.work.slot[task]} of device {device[task]}"
            held = f"what {program.task(before)} put there"
            if reader < 0:
                message = f"{program.task(task)} fills {buffer}, but nothing has used {held}"
                yield Violation("buffers", message, (task, before))
            else:
                user = program.task(reader)
                message = f"{program.task(task)} fills {buffer} without waiting until {user} is done with {held}"
                yield Violation("buffers", message, (task, before, reader))
