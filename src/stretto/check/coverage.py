"""Every action exactly once."""

from collections.abc import Collection, Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, FORWARDS, Kind
from stretto.program.work import Bools, Ints


def coverage(program: Program) -> Iterator[Violation]:
    count = _Counter(program)
    yield from _forwards(count)
    if program.work.among((*BACKWARDS, Kind.W, Kind.WGRAD)).any():
        yield from _backwards(count)
        yield from _weights(count)


class _Counter:
    """How often each kind of work is done, by [stage, microbatch]."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def tasks(self, kinds: Collection[Kind], *, backward: bool = False) -> tuple[Ints, Ints]:
        """The tasks of these kinds, and the cell of each."""
        work = self.program.work
        task = np.flatnonzero(work.among(kinds))
        stage, microbatch = work.backward if backward else (work.stage, work.microbatch)
        return task, stage[task] * self.program.placement.microbatches + microbatch[task]

    def table(self, kinds: Collection[Kind], *, backward: bool = False) -> Ints:
        cells = self.program.placement.stages * self.program.placement.microbatches
        return np.bincount(self.tasks(kinds, backward=backward)[1], minlength=cells)

    def cells(self, wrong: Bools) -> Iterator[tuple[int, int, int]]:
        for cell in np.flatnonzero(wrong).tolist():
            yield cell, *divmod(cell, self.program.placement.microbatches)

    def repeated(self, cell: int, kinds: Collection[Kind], *, backward: bool = False) -> Violation:
        task, cells = self.tasks(kinds, backward=backward)
        at = tuple(task[cells == cell].tolist())
        doers = [self.program.task(index) for index in at]
        where = ", ".join(f"{task} on device {task.device}" for task in doers)
        stage, microbatch = divmod(cell, self.program.placement.microbatches)
        name = "forward" if not backward else "backward"
        if set(kinds) <= {Kind.W, Kind.WGRAD}:
            name = "weight gradient"
        message = f"the {name} of stage {stage} for microbatch {microbatch} runs {len(at)} times: {where}"
        return Violation("coverage", message, at)


def _forwards(count: _Counter) -> Iterator[Violation]:
    table = count.table(FORWARDS)
    for cell, stage, microbatch in count.cells(table != 1):
        if table[cell]:
            yield count.repeated(cell, FORWARDS)
        else:
            yield Violation("coverage", f"{stage}F{microbatch} never runs")


def _backwards(count: _Counter) -> Iterator[Violation]:
    table = count.table(BACKWARDS, backward=True)
    for cell, stage, microbatch in count.cells(table != 1):
        if table[cell]:
            yield count.repeated(cell, BACKWARDS, backward=True)
        else:
            either = f"neither {stage}B{microbatch} nor {stage}I{microbatch} is there"
            message = f"the backward of stage {stage} for microbatch {microbatch} never runs: {either}"
            yield Violation("coverage", message)


def _weights(count: _Counter) -> Iterator[Violation]:
    whole, split = count.table((Kind.B, Kind.PAIR), backward=True), count.table((Kind.I,))
    rest, weight = count.table((Kind.WGRAD,)), count.table((Kind.W,))
    wrong = (rest + weight != 1) | ((whole > 0) & (weight > 0)) | ((split > 0) & (rest > 0))
    for cell, stage, microbatch in count.cells(wrong & (whole + split <= 1)):
        if rest[cell] + weight[cell] > 1:
            yield count.repeated(cell, (Kind.W, Kind.WGRAD))
        elif split[cell]:
            message = f"{stage}W{microbatch} never runs, so {stage}I{microbatch} yields no weight gradient"
            yield Violation("coverage", message)
        elif whole[cell]:
            yield Violation("coverage", f"the weight part of {stage}B{microbatch} never runs")
