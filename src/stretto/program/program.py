"""A program: tasks on lanes, what each needs, and the order each device issues them in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.ir.placement import Placement
from stretto.program.task import COMPUTE, Kind, Lane, Task, among

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Columns over tasks, one entry each, in one sequence; a device issues its own tasks in that order.

    `lower` makes the sequence a global order: a transfer's two ends stand together, and running the
    tasks one at a time in sequence is always possible. In a program read from a file the sequence
    says no more than each device's own order.
    """

    placement: Placement
    lanes: tuple[Lane, ...]
    lane: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    stage_b: Ints
    """A pair's backward stage, else −1."""
    microbatch_b: Ints
    need_start: Ints
    """Task t needs `need[need_start[t]:need_start[t + 1]]`."""
    need: Ints
    mate: Ints
    """A transfer's other end, else −1; the two take place as one."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def devices(self) -> int:
        return 1 + max(lane.device for lane in self.lanes)

    @property
    def device(self) -> Ints:
        return np.array([lane.device for lane in self.lanes])[self.lane]

    @property
    def compute(self) -> NDArray[np.bool_]:
        """Which tasks are on a compute lane."""
        return among(self.kind, COMPUTE)

    def task(self, index: int) -> Task:
        stage_b = int(self.stage_b[index])
        return Task(
            lane=self.lanes[self.lane[index]],
            kind=Kind(int(self.kind[index])),
            stage=int(self.stage[index]),
            microbatch=int(self.microbatch[index]),
            backward=None if stage_b < 0 else (stage_b, int(self.microbatch_b[index])),
        )

    def tasks(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))

    def needs(self, index: int) -> list[int]:
        return [int(need) for need in self.need[self.need_start[index] : self.need_start[index + 1]]]

    def __str__(self) -> str:
        """PyTorch's compute-and-transfers CSV: one line per device, in issue order."""
        rows: list[list[str]] = [[] for _ in range(self.devices)]
        for task in self.tasks():
            if task.item is not None:
                rows[task.device].append(str(task.item))
        return "\n".join(map(",".join, rows))


def grouped(keys: Ints, count: int) -> tuple[Ints, Ints]:
    """Indexes sorted by key, stably, and where each key's run of them starts.

    >>> order, start = grouped(np.array([1, 0, 1]), 2)
    >>> order.tolist(), start.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    order = np.argsort(keys, kind="stable")
    return order, np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count))))


def columns(tasks: Iterable[Task]) -> tuple[tuple[Lane, ...], dict[str, Ints]]:
    """The columns of `Program` that say what the tasks are."""
    tasks = list(tasks)
    lanes = tuple(sorted({task.lane for task in tasks}))
    index = {lane: k for k, lane in enumerate(lanes)}
    rows = [(index[task.lane], task.kind, task.stage, task.microbatch, *(task.backward or (-1, -1))) for task in tasks]
    names = ("lane", "kind", "stage", "microbatch", "stage_b", "microbatch_b")
    table = np.array(rows, dtype=np.int64).reshape(-1, len(names))
    return lanes, dict(zip(names, table.T, strict=True))
