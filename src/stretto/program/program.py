"""A program: tasks on lanes, what each needs, and the order each device issues them in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Bools, Ints, TaskColumns, grouped
from stretto.program.index import TaskIndex
from stretto.program.task import RECEIVES, SENDS, UPDATES, Kind, Lane, Task

_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Columns over tasks, one entry each, in one sequence; a device issues its own tasks in that order.

    `lower` makes the sequence a global order: a transfer's two ends stand together, and running the
    tasks one at a time in sequence is always possible. In a program read from a file the sequence
    says no more than each device's own order.
    """

    placement: Placement
    anatomy: Anatomy
    lanes: tuple[Lane, ...]
    lane: Ints
    """The lane of each task, as an index into `lanes`."""
    work: TaskColumns
    need_start: Ints
    """Task t needs `need[need_start[t]:need_start[t + 1]]`."""
    need: Ints
    counterpart: Ints
    """The next end of the transfer or broadcast that a task is an end of, the first following the last; else −1.
    All ends take place as one."""

    @staticmethod
    def of(
        lanes: tuple[Lane, ...],
        lane: Ints,
        work: TaskColumns,
        needs: Iterable[tuple[Ints, Ints]],
        counterpart: Ints,
        placement: Placement,
        anatomy: Anatomy,
    ) -> "Program":
        """From needs in pairs of columns, tasks and what they need; −1 where either is not there."""
        edges = [(task[there], need[there]) for task, need in needs for there in [(task >= 0) & (need >= 0)]]
        order, need_start = grouped(np.concatenate([task for task, _ in edges]), len(work))
        need = np.concatenate([need for _, need in edges])[order]
        return Program(placement, anatomy, lanes, lane, work, need_start, need, counterpart)

    def __len__(self) -> int:
        return len(self.work)

    @property
    def devices(self) -> int:
        return max(self.placement.devices, 1 + max(lane.device for lane in self.lanes))

    @property
    def device(self) -> Ints:
        """The device of each task."""
        return np.array([lane.device for lane in self.lanes])[self.lane]

    @property
    def compute(self) -> Bools:
        """Which tasks are on a compute lane."""
        return self.on_lane("compute")

    def on_lane(self, name: str) -> Bools:
        """Which tasks are on a lane of this name."""
        return np.array([lane.name == name for lane in self.lanes])[self.lane]

    @property
    def moving(self) -> Bools:
        """Which tasks are an end of a transfer."""
        return self.work.among((*SENDS, *RECEIVES))

    @property
    def joint(self) -> Bools:
        """Which tasks of a training step are an end of something that several devices do together."""
        return self.work.among((*SENDS, *RECEIVES, Kind.REDUCE))

    @property
    def is_update(self) -> bool:
        """Whether this is a weight update, and no training step."""
        return bool(self.work.among(UPDATES).any())

    @property
    def is_own(self) -> bool:
        """Whether this is a program of a user's own."""
        return bool(self.anatomy.calls)

    @property
    def recomputes(self) -> bool:
        """Whether what forwards discarded is computed again."""
        return bool((self.work.kind == Kind.RECOMPUTE).any())

    @property
    def tables(self) -> TaskIndex:
        return TaskIndex(self.work, self.anatomy, self.placement)

    @property
    def needing(self) -> Ints:
        """The task of each entry of `need`."""
        return np.repeat(np.arange(len(self)), np.diff(self.need_start))

    def task(self, index: int) -> Task:
        work = self.work
        kind, stage, stage_b = _KINDS[work.kind.item(index)], work.stage.item(index), work.stage_b.item(index)
        part = work.part.item(index)
        return Task(
            self.lanes[self.lane.item(index)],
            kind,
            stage,
            work.microbatch.item(index),
            None if stage_b < 0 else (stage_b, work.microbatch_b.item(index)),
            part,
            self.anatomy.name(kind, stage, part),
            work.slot.item(index),
        )

    def tasks(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))

    def needs(self, index: int) -> list[int]:
        needs: list[int] = self.need[self.need_start.item(index) : self.need_start.item(index + 1)].tolist()
        return needs

    @property
    def malformed(self) -> str | None:
        """What is wrong if its columns refer to tasks that are not there, or its ends do not form rings."""
        count = len(self)
        ends = np.flatnonzero(self.counterpart != -1)
        counterparts, starts = self.counterpart[ends], np.diff(self.need_start)
        if len(self.need_start) != count + 1 or (starts < 0).any() or self.need_start[-1] != len(self.need):
            return "its needs are not shared out among its tasks"
        if ((self.need < 0) | (self.need >= count)).any():
            return "a task needs one that is not there"
        if not np.array_equal(np.sort(counterparts), ends) or (counterparts == ends).any():
            return "the ends of what devices do together do not form rings"
        return None

    def ends(self, index: int) -> list[int]:
        """All ends of the transfer or broadcast that a task is part of, itself first; only itself if of none."""
        ends = [index]
        while (end := self.counterpart.item(ends[-1])) not in (-1, index):
            ends.append(end)
        return ends

    def __str__(self) -> str:
        """One line per device, in issue order. Of whole actions without ties this is PyTorch's CSV with transfers."""
        rows: list[list[str]] = [[] for _ in range(self.devices)]
        for task in self.tasks():
            if task.phase or task.kind is not Kind.WGRAD:
                rows[task.device].append(str(task))
        return "\n".join(map(",".join, rows))
