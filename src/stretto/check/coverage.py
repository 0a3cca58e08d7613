"""Rule: every action runs exactly once."""

from collections.abc import Collection, Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.columns import Bools, grouped
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, COPIES, FORWARDS, WEIGHTS, Kind


def coverage(program: Program) -> Iterator[Violation]:
    yield from _forwards(program)
    if program.work.among((*BACKWARDS, Kind.W, Kind.WGRAD)).any():
        yield from _backwards(program)
        yield from _weights(program)
    if program.work.among(COPIES).any():
        yield from _copies(program)
    if program.recomputes:
        tally = _Tally(program, "recomputation", (Kind.RECOMPUTE,))
        for cell, stage, _, microbatch in tally.cells(tally.count > 1):
            yield tally.repeated(cell, stage, microbatch)


class _Tally:
    """Counts how often each part of a kind of work runs, in a table with a row per part and a column per microbatch."""

    def __init__(self, program: Program, name: str, kinds: Collection[Kind], *, backward: bool = False) -> None:
        self.program, self.name = program, name
        work, anatomy = program.work, program.anatomy
        rows = anatomy.backward_rows
        if set(kinds) <= {*WEIGHTS}:
            rows = anatomy.weight_rows
        elif set(kinds) <= {*FORWARDS}:
            rows = anatomy.forward_rows
        stage, microbatch = work.backward if backward else (work.stage, work.microbatch)
        self._rows, self._microbatches = rows, program.placement.microbatches
        task = np.flatnonzero(work.among(kinds))
        row = rows[stage[task]] + work.part[task]
        order, self._start = grouped(row * self._microbatches + microbatch[task], int(rows[-1]) * self._microbatches)
        self._task = task[order]
        self.count = np.diff(self._start)

    def cells(self, wrong: Bools) -> Iterator[tuple[int, int, int, int]]:
        """Yield the index, stage, part and microbatch of each wrong cell."""
        for cell in np.flatnonzero(wrong).tolist():
            row, microbatch = divmod(cell, self._microbatches)
            stage = int(np.searchsorted(self._rows, row, side="right")) - 1
            yield cell, stage, row - int(self._rows[stage]), microbatch

    def repeated(self, cell: int, stage: int, microbatch: int) -> Violation:
        at = tuple(self._task[self._start[cell] : self._start[cell + 1]].tolist())
        doers = [self.program.task(index) for index in at[:4]]
        where = ", ".join(f"{task} on device {task.device}" for task in doers) + ", …" * (len(at) > 4)
        message = f"the {self.name} of stage {stage} for microbatch {microbatch} runs {len(at)} times: {where}"
        return Violation("coverage", message, at)


def _forwards(program: Program) -> Iterator[Violation]:
    tally = _Tally(program, "forward", FORWARDS)
    for cell, stage, part, microbatch in tally.cells(tally.count != 1):
        if tally.count[cell]:
            yield tally.repeated(cell, stage, microbatch)
        else:
            name = program.anatomy.name(Kind.F, stage, part)
            yield Violation("coverage", f"{stage}F{microbatch}{'.' * bool(name)}{name} never runs")


def _backwards(program: Program) -> Iterator[Violation]:
    tally = _Tally(program, "backward", BACKWARDS, backward=True)
    for cell, stage, part, microbatch in tally.cells(tally.count != 1):
        if tally.count[cell]:
            yield tally.repeated(cell, stage, microbatch)
            continue
        name = program.anatomy.name(Kind.B, stage, part)
        end = f".{name}" if name else ""
        either = f"neither {stage}B{microbatch}{end} nor {stage}I{microbatch}{end} is there"
        message = f"the backward of stage {stage} for microbatch {microbatch} never runs: {either}"
        yield Violation("coverage", message)


def _weights(program: Program) -> Iterator[Violation]:
    """Require WGRADs for a full backward, Ws for an input part, and never both."""
    tally = _Tally(program, "weight gradient", WEIGHTS)
    steps = program.anatomy.weight_needs  # a weight gradient is judged with its part of the backward
    shape = (-1, program.placement.microbatches)
    whole = _Tally(program, "backward", (Kind.B, Kind.PAIR), backward=True).count.reshape(shape)[steps].ravel()
    split = _Tally(program, "backward", (Kind.I,)).count.reshape(shape)[steps].ravel()
    for cell, stage, part, microbatch in tally.cells((tally.count != 1) & (whole + split <= 1)):
        name = program.anatomy.name(Kind.W, stage, part)
        end = f".{name}" if name else ""
        if tally.count[cell]:
            yield tally.repeated(cell, stage, microbatch)
        elif split[cell]:
            message = f"{stage}W{microbatch}{end} never runs, so {stage}I{microbatch} yields no weight gradient"
            yield Violation("coverage", message)
        elif whole[cell]:
            yield Violation("coverage", f"the weight part of {stage}B{microbatch}{end} never runs")


def _copies(program: Program) -> Iterator[Violation]:
    """Require everything that is offloaded to come back, once."""
    placement, work = program.placement, program.work
    cell = work.stage * placement.microbatches + work.microbatch
    size = placement.stages * placement.microbatches
    out, back = (np.bincount(cell[work.kind == kind], minlength=size) for kind in COPIES)
    for number in np.flatnonzero((out > 1) | (out != back)).tolist():
        stage, microbatch = divmod(number, placement.microbatches)
        what = f"what stage {stage} saved for microbatch {microbatch}"
        message = f"{what} leaves the device {out[number]} times and comes back {back[number]} times"
        yield Violation("coverage", message)
