"""A program: tasks on lanes, what each needs, and the order each device issues them in."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.task import COMPUTE, Kind, Lane, Task
from stretto.program.work import Bools, Ints, Work

_KINDS = tuple(Kind)


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
    """The lane of each task, as an index into `lanes`."""
    work: Work
    need_start: Ints
    """Task t needs `need[need_start[t]:need_start[t + 1]]`."""
    need: Ints
    mate: Ints
    """A transfer's other end, else −1; the two take place as one."""

    def __len__(self) -> int:
        return len(self.work)

    @property
    def devices(self) -> int:
        return 1 + max(lane.device for lane in self.lanes)

    @property
    def device(self) -> Ints:
        """The device of each task."""
        return np.array([lane.device for lane in self.lanes])[self.lane]

    @property
    def compute(self) -> Bools:
        """Which tasks are on a compute lane."""
        return self.work.among(COMPUTE)

    @property
    def needing(self) -> Ints:
        """The task of each entry of `need`."""
        return np.repeat(np.arange(len(self)), np.diff(self.need_start))

    def task(self, index: int) -> Task:
        work = self.work
        stage_b = work.stage_b.item(index)
        return Task(
            self.lanes[self.lane.item(index)],
            _KINDS[work.kind.item(index)],
            work.stage.item(index),
            work.microbatch.item(index),
            None if stage_b < 0 else (stage_b, work.microbatch_b.item(index)),
        )

    def tasks(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))

    def needs(self, index: int) -> list[int]:
        needs: list[int] = self.need[self.need_start.item(index) : self.need_start.item(index + 1)].tolist()
        return needs

    def __str__(self) -> str:
        """PyTorch's compute-and-transfers CSV: one line per device, in issue order."""
        rows: list[list[str]] = [[] for _ in range(self.devices)]
        for task in self.tasks():
            if task.item is not None:
                rows[task.device].append(str(task.item))
        return "\n".join(map(",".join, rows))
