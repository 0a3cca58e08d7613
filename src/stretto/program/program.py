"""A program: tasks on lanes, what each needs, and the order in which each device issues them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Bools, Ints, TaskColumns, grouped
from stretto.program.experts import joint_passes
from stretto.program.index import TaskIndex
from stretto.program.task import COMPUTE, RECEIVES, SENDS, UPDATES, Kind, Lane, Task

_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Columns with one entry per task, in one sequence; a device issues its own tasks in that order.

    `lower` makes the sequence a global order: a transfer's two ends are adjacent, and the tasks can always be run one
    at a time in sequence. In a program read from a file, the sequence fixes only each device's own order.
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
    """For an end of a transfer or collective, the next end in its ring; else −1. All ends of a ring run as one."""

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
        """Build a program from needs in pairs of columns, tasks and what they need; −1 where either does not exist."""
        edges = [(task[exist], need[exist]) for task, need in needs for exist in [(task >= 0) & (need >= 0)]]
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
        """Return a mask of the tasks on lanes of this name."""
        return np.array([lane.name == name for lane in self.lanes])[self.lane]

    @property
    def exchange(self) -> Bools:
        """Which tasks send tokens to experts and back, or wait for the sizes of that."""
        return self.on_lane("comm") | (self.on_lane("host") & self.work.among(COMPUTE))

    @property
    def moving(self) -> Bools:
        """Which tasks are ends of a transfer."""
        return self.work.among((*SENDS, *RECEIVES))

    @property
    def joint(self) -> Bools:
        """Which tasks of a training step devices do together: ends of a transfer, of a sum over devices, or of what
        expert-parallel ranks exchange.
        """
        return self.work.among((*SENDS, *RECEIVES, Kind.REDUCE)) | self.exchanging

    @property
    def exchanging(self) -> Bools:
        """Which tasks expert-parallel ranks run together."""
        return joint_passes(self.work, self.anatomy, self.placement)

    @property
    def is_update(self) -> bool:
        """Whether this is a weight update rather than a training step."""
        return bool(self.work.among(UPDATES).any())

    @property
    def is_own(self) -> bool:
        """Whether this is a user-defined program (`program_of`)."""
        return bool(self.anatomy.calls)

    @property
    def recomputes(self) -> bool:
        """Whether the program recomputes what forwards discarded."""
        return bool((self.work.kind == Kind.RECOMPUTE).any())

    def host_buffers(self, device: int) -> dict[int, int]:
        """Return the host buffers that this device's offloads fill, and the stage that each is for."""
        work = self.work
        offloads = (work.kind == Kind.OFFLOAD) & (work.slot >= 0) & (self.device == device)
        return dict(sorted(zip(work.slot[offloads].tolist(), work.stage[offloads].tolist(), strict=True)))

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
            work.woven.item(index),
        )

    def tasks(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))

    def needs(self, index: int) -> list[int]:
        needs: list[int] = self.need[self.need_start.item(index) : self.need_start.item(index + 1)].tolist()
        return needs

    @property
    def malformed(self) -> str | None:
        """What is wrong if the columns refer to missing tasks or the ends do not form rings; else None."""
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
        """Return all ends of the task's transfer or collective, the task first; only the task if it is in none."""
        ends = [index]
        while (end := self.counterpart.item(ends[-1])) not in (-1, index):
            ends.append(end)
        return ends

    def __str__(self) -> str:
        """Return a line per device, in issue order: PyTorch's CSV with transfers, if of whole actions without sums of
        ties or experts. CSV has no mesh and no exchanges between expert-parallel ranks, so these do not read back.
        """
        rows: list[list[str]] = [[] for _ in range(self.devices)]
        for task in self.tasks():
            if task.phase or task.kind is not Kind.WGRAD:
                rows[task.device].append(str(task))
        return "\n".join(map(",".join, rows))
