"""Tasks as columns of numbers."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.ir.errors import ProgramError
from stretto.ir.placement import Placement
from stretto.program.task import Kind, Task

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TaskColumns:
    """One entry per task: its kind, and the stage and microbatch it works on.

    In a weight update, `microbatch` is the bucket and `stage` is the device it comes from.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    stage_b: Ints
    """A pair's backward stage, else −1."""
    microbatch_b: Ints
    part: Ints
    """The task's part of its pass; 0 for a whole pass."""
    slot: Ints
    """The buffer that the task fills, an offload's in host memory; −1 if it fills none, or one that is not reused."""
    woven: Bools
    """Whether the task is a phase of a woven pair. False for a pair that is one task."""

    @staticmethod
    def of_tasks(tasks: Iterable[Task]) -> "TaskColumns":
        rows = [
            (task.kind, task.stage, task.microbatch, *(task.backward or (-1, -1)), task.part, task.slot, task.woven)
            for task in tasks
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 8)
        kind, stage, microbatch, stage_b, microbatch_b, part, slot, woven = np.ascontiguousarray(table.T)
        return TaskColumns(kind, stage, microbatch, stage_b, microbatch_b, part, slot, woven.astype(np.bool_))

    @staticmethod
    def simple(
        kind: Ints, stage: Ints, microbatch: Ints, *, part: Ints | None = None, slot: Ints | None = None
    ) -> "TaskColumns":
        """Return columns of tasks that are not pairs."""
        none = np.full(len(stage), -1)
        part = np.zeros_like(none) if part is None else part
        slot, woven = none if slot is None else slot, np.zeros(len(stage), dtype=np.bool_)
        return TaskColumns(kind, stage, microbatch, none, none, part, slot, woven)

    @staticmethod
    def joined(parts: Iterable["TaskColumns"], order: Ints) -> "TaskColumns":
        """Concatenate the parts, then put the tasks into this order."""
        columns = zip(*(part.columns() for part in parts), strict=True)
        return TaskColumns(*(np.concatenate(column)[order] for column in columns))

    def columns(self) -> tuple[NDArray[Any], ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __len__(self) -> int:
        return len(self.kind)

    def among(self, kinds: Collection[Kind]) -> Bools:
        """Return a mask of the tasks of these kinds."""
        table = np.zeros(len(Kind), dtype=np.bool_)
        table[list(kinds)] = True
        return table[self.kind]

    @property
    def backward(self) -> tuple[Ints, Ints]:
        """The stage and microbatch of each pair's backward; for all other tasks, their own."""
        paired = self.stage_b >= 0
        return np.where(paired, self.stage_b, self.stage), np.where(paired, self.microbatch_b, self.microbatch)

    def validate(self, placement: Placement) -> None:
        """Raise ProgramError if a stage or microbatch does not exist."""
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
    """Return the indexes sorted stably by key, and where each key's run of them starts.

    >>> order, start = grouped(np.array([1, 0, 1]), 2)
    >>> order.tolist(), start.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    return stable_order(keys, count), np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count))))


def stable_order(keys: Ints, count: int) -> Ints:
    """Return the indexes sorted stably by key; keys are at least −1 and below `count`."""
    return np.argsort(keys.astype(np.int16) if count < 2**15 else keys, kind="stable")  # small keys sort by radix


def last_before(chosen: Bools, device: Ints) -> Ints:
    """Return, for each task, the last chosen task on its device up to and including it; −1 if there is none."""
    order = stable_order(device, int(device.max()) + 1)
    last = np.maximum.accumulate(np.where(chosen[order], np.arange(len(order)), -1))
    latest = np.empty_like(order)
    latest[order] = np.where(last >= 0, order[last], -1)
    return np.where((latest >= 0) & (device[latest] == device), latest, -1)


def next_after(chosen: Bools, device: Ints) -> Ints:
    """Return, for each task, the first chosen task on its device from it on; −1 if there is none."""
    last, end = last_before(chosen[::-1], device[::-1])[::-1], len(device) - 1
    return np.where(last >= 0, end - last, -1)


def queue_edges(queue: Ints) -> tuple[Ints, Ints]:
    """Return the edges between neighbours in each queue; `queue` holds each task's queue, −1 for none."""
    order = stable_order(queue, int(queue.max()) + 1)
    before, after = order[:-1], order[1:]
    same = (queue[before] == queue[after]) & (queue[before] >= 0)
    return before[same], after[same]
