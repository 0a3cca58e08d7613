"""Looks tasks up by stage, part and microbatch."""

from collections.abc import Collection
from functools import cached_property

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Ints, TaskColumns
from stretto.program.task import BACKWARDS, FORWARDS, WEIGHTS, Kind


class TaskIndex:
    """Tables of task indexes with a column per microbatch; −1 where there is no task, the first if there are several.

    `forward`, `backward`, `weight` and `recompute` have a row for each part of each stage's pass; the parts of
    `recompute` are those of the backward. The other tables have a row per stage and an empty row at the end, so that
    stage −1 and the stage after the last can be looked up: of `starts` and `back_starts`, the first parts of each
    forward and backward, and of `results` and `back_results`, the last parts, which produce what is handed on.
    """

    def __init__(self, work: TaskColumns, anatomy: Anatomy, placement: Placement) -> None:
        self.work, self.anatomy, self.placement = work, anatomy, placement

    @cached_property
    def forward(self) -> Ints:
        return self._table(FORWARDS, self.anatomy.forward_rows, self.work.stage, self.work.microbatch)

    @cached_property
    def backward(self) -> Ints:
        return self._table(BACKWARDS, self.anatomy.backward_rows, *self.work.backward)

    @cached_property
    def weight(self) -> Ints:
        return self._table(WEIGHTS, self.anatomy.weight_rows, self.work.stage, self.work.microbatch)

    @cached_property
    def recompute(self) -> Ints:
        return self._table((Kind.RECOMPUTE,), self.anatomy.backward_rows, self.work.stage, self.work.microbatch)

    @cached_property
    def starts(self) -> Ints:
        return self._with_spare(self.forward[self.anatomy.forward_rows[:-1]])

    @cached_property
    def results(self) -> Ints:
        return self._with_spare(self.forward[self.anatomy.forward_rows[1:] - 1])

    @cached_property
    def back_starts(self) -> Ints:
        return self._with_spare(self.backward[self.anatomy.backward_rows[:-1]])

    @cached_property
    def back_results(self) -> Ints:
        return self._with_spare(self.backward[self.anatomy.backward_rows[1:] - 1])

    def first_compute(self, table: Ints) -> Ints:
        """Return the first part of each stage's backward, or of its recomputation, on the compute lane."""
        return self._with_spare(table[self.anatomy.first_compute_rows])

    def per_part(self, table: Ints) -> Ints:
        """Repeat each stage's row of a table for every part of the stage's backward."""
        return np.repeat(table[: self.placement.stages], np.diff(self.anatomy.backward_rows), axis=0)

    def end(self, kind: Kind) -> Ints:
        """Return the sends, receives or copies of this kind."""
        rows = np.arange(self.placement.stages + 1)
        return self._with_spare(self._table((kind,), rows, self.work.stage, self.work.microbatch))

    def _with_spare(self, table: Ints) -> Ints:
        return np.concatenate((table, np.full((1, self.placement.microbatches), -1, dtype=np.int64)))

    def _table(self, kinds: Collection[Kind], rows: Ints, stage: Ints, microbatch: Ints) -> Ints:
        table = np.full((int(rows[-1]), self.placement.microbatches), -1, dtype=np.int64)
        chosen = np.flatnonzero(self.work.among(kinds))[::-1]
        table[rows[stage[chosen]] + self.work.part[chosen], microbatch[chosen]] = chosen
        return table
