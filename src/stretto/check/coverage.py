"""Every action exactly once."""

from collections.abc import Collection, Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, FORWARDS, WEIGHTS, Kind
from stretto.program.work import Bools, grouped


def coverage(program: Program) -> Iterator[Violation]:
    yield from _forwards(program)
    if program.work.among((*BACKWARDS, Kind.W, Kind.WGRAD)).any():
        yield from _backwards(program)
        yield from _weights(program)


class _Tally:
    """Which tasks do a kind of work, by [stage, microbatch]."""

    def __init__(self, program: Program, name: str, kinds: Collection[Kind], *, backward: bool = False) -> None:
        self.program, self.name = program, name
        work, cells = program.work, program.placement.stages * program.placement.microbatches
        stage, microbatch = work.backward if backward else (work.stage, work.microbatch)
        task = np.flatnonzero(work.among(kinds))
        order, self._start = grouped(stage[task] * program.placement.microbatches + microbatch[task], cells)
        self._task = task[order]
        self.count = np.diff(self._start)

    def repeated(self, cell: int) -> Violation:
        at = tuple(self._task[self._start[cell] : self._start[cell + 1]].tolist())
        doers = [self.program.task(index) for index in at[:4]]
        where = ", ".join(f"{task} on device {task.device}" for task in doers) + ", …" * (len(at) > 4)
        stage, microbatch = divmod(cell, self.program.placement.microbatches)
        message = f"the {self.name} of stage {stage} for microbatch {microbatch} runs {len(at)} times: {where}"
        return Violation("coverage", message, at)


def _cells(program: Program, wrong: Bools) -> Iterator[tuple[int, int, int]]:
    for cell in np.flatnonzero(wrong).tolist():
        yield cell, *divmod(cell, program.placement.microbatches)


def _forwards(program: Program) -> Iterator[Violation]:
    tally = _Tally(program, "forward", FORWARDS)
    for cell, stage, microbatch in _cells(program, tally.count != 1):
        if tally.count[cell]:
            yield tally.repeated(cell)
        else:
            yield Violation("coverage", f"{stage}F{microbatch} never runs")


def _backwards(program: Program) -> Iterator[Violation]:
    tally = _Tally(program, "backward", BACKWARDS, backward=True)
    for cell, stage, microbatch in _cells(program, tally.count != 1):
        if tally.count[cell]:
            yield tally.repeated(cell)
        else:
            either = f"neither {stage}B{microbatch} nor {stage}I{microbatch} is there"
            message = f"the backward of stage {stage} for microbatch {microbatch} never runs: {either}"
            yield Violation("coverage", message)


def _weights(program: Program) -> Iterator[Violation]:
    """A full backward has its WGRAD, an input part its W, and nothing has both."""
    tally = _Tally(program, "weight gradient", WEIGHTS)
    whole = _Tally(program, "backward", (Kind.B, Kind.PAIR), backward=True).count
    split = _Tally(program, "backward", (Kind.I,)).count
    for cell, stage, microbatch in _cells(program, (tally.count != 1) & (whole + split <= 1)):
        if tally.count[cell]:
            yield tally.repeated(cell)
        elif split[cell]:
            message = f"{stage}W{microbatch} never runs, so {stage}I{microbatch} yields no weight gradient"
            yield Violation("coverage", message)
        elif whole[cell]:
            yield Violation("coverage", f"the weight part of {stage}B{microbatch} never runs")
