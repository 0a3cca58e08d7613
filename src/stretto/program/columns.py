"""What tasks do, as columns of numbers."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.ir.errors import ProgramError
from stretto.ir.placement import Placement
from stretto.program.task import Kind, Task

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TaskColumns:
    """One entry per task: its kind, and the stage and microbatch it is done for.

    In a weight update, the microbatch is the bucket and the stage the device it comes from.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    stage_b: Ints
    """A pair's backward stage, else −1."""
    microbatch_b: Ints
    part: Ints
    """Which part of its pass a task is; 0 for a whole one."""
    slot: Ints
    """Which of its device's buffers a task fills, −1 for none or one of its own."""

    @staticmethod
    def of_tasks(tasks: Iterable[Task]) -> "TaskColumns":
        rows = [
            (task.kind, task.stage, task.microbatch, *(task.backward or (-1, -1)), task.part, task.slot)
            for task in tasks
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 7)
        return TaskColumns(*(np.ascontiguousarray(column) for column in table.T))

    @staticmethod
    def simple(
        kind: Ints, stage: Ints, microbatch: Ints, *, part: Ints | None = None, slot: Ints | None = None
    ) -> "TaskColumns":
        """Work without pairs."""
        none = np.full(len(stage), -1)
        part = np.zeros_like(none) if part is None else part
        return TaskColumns(kind, stage, microbatch, none, none, part, none if slot is None else slot)

    @staticmethod
    def joined(parts: Iterable["TaskColumns"], order: Ints) -> "TaskColumns":
        """The parts one after the other, then put into this order."""
        columns = zip(*(part.columns() for part in parts), strict=True)
        return TaskColumns(*(np.concatenate(column)[order] for column in columns))

    def columns(self) -> tuple[Ints, ...]:
        return self.kind, self.stage, self.microbatch, self.stage_b, self.microbatch_b, self.part, self.slot

    def __len__(self) -> int:
        return len(self.kind)

    def among(self, kinds: Collection[Kind]) -> Bools:
        """Which tasks are of these kinds."""
        table = np.zeros(len(Kind), dtype=np.bool_)
        table[list(kinds)] = True
        return table[self.kind]

    @property
    def backward(self) -> tuple[Ints, Ints]:
        """The stage and microbatch of each task's backward part: a pair's own, else the task's."""
        paired = self.stage_b >= 0
        return np.where(paired, self.stage_b, self.stage), np.where(paired, self.microbatch_b, self.microbatch)

    def demand(self, placement: Placement) -> None:
        """Every stage and microbatch exists."""
        stage_b, microbatch_b = self.backward
        for name, column, limit in (
            ("stage", self.stage, placement.stages),
            ("stage", stage_b, placement.stages),
            ("microbatch", self.microbatch, placement.microbatches),
            ("microbatch", microbatch_b, placement.microbatches),
        ):
            wrong = column[(column < 0) | (column >= limit)]
            if len(wrong):
                raise ProgramError(f"{name} {wrong[0]} does not exist: the placement has {limit} of them")


def grouped(keys: Ints, count: int) -> tuple[Ints, Ints]:
    """Indexes sorted by key, stably, and where each key's run of them starts.

    >>> order, start = grouped(np.array([1, 0, 1]), 2)
    >>> order.tolist(), start.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    return stable_order(keys, count), np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count))))


def stable_order(keys: Ints, count: int) -> Ints:
    """Indexes sorted by key, stably; keys are −1 or below `count`."""
    return np.argsort(keys.astype(np.int16) if count < 2**15 else keys, kind="stable")  # small keys sort by radix


def last_before(chosen: Bools, device: Ints) -> Ints:
    """For each task, the last of the chosen ones on its device up to it, −1 if there is none."""
    order = stable_order(device, int(device.max()) + 1)
    last = np.maximum.accumulate(np.where(chosen[order], np.arange(len(order)), -1))
    found = np.empty_like(order)
    found[order] = np.where(last >= 0, order[last], -1)
    return np.where((found >= 0) & (device[found] == device), found, -1)
