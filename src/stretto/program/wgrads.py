"""Joins weight gradients of several microbatches: larger products, and fewer sums to read and write."""

from collections.abc import Sequence

import numpy as np

from stretto.program.columns import Ints, TaskColumns
from stretto.program.task import WEIGHTS, Kind, Task


def apart(work: TaskColumns, action_kind: Ints) -> Ints:
    """Return the tasks' kinds once weight gradients no longer directly follow their backwards: a full backward becomes
    an I and a W. Pairs keep their kinds.
    """
    full = action_kind == Kind.B
    kind = np.where(full & (work.kind == Kind.B), Kind.I, work.kind)
    return np.where(full & (work.kind == Kind.WGRAD), Kind.W, kind)


def side_by_side(order: Ints, work: TaskColumns, device: Ints, count: int) -> Ints:
    """Return the order with every `count` weight gradients of a stage's part on a device moved to the place of the
    last of them. `work` and `device` describe the first tasks, which include all weight gradients.
    """
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    task = np.flatnonzero(work.among(WEIGHTS))
    group = np.stack((device[task], work.stage[task], work.part[task]))
    by_part = np.lexsort((place[task], *group))
    task, group = task[by_part], group[:, by_part]
    row = np.arange(len(task))
    begins = (group != np.roll(group, 1, axis=1)).any(axis=0) | (row == 0)
    nth = row - np.maximum.accumulate(np.where(begins, row, 0))  # within its device, stage and part
    first = np.flatnonzero(nth % count == 0)
    last = np.append(first[1:], len(task)) - 1
    moved = place.copy()
    moved[task] = np.repeat(place[task[last]], last - first + 1)
    return np.lexsort((place, moved))


def joined_ends(tasks: Sequence[Task], count: int) -> dict[int, int]:
    """Map each weight gradient that is computed together with later ones to the last of them, by index into a device's
    tasks. A group has at most `count`, of one part of one stage, with nothing else computed between them.
    """
    ends: dict[int, int] = {}
    run: list[int] = []
    for at, task in enumerate(tasks):
        if task.lane.name != "compute":
            continue
        if task.kind not in WEIGHTS:
            run = []
            continue
        before = tasks[run[-1]] if run else None
        if before is None or len(run) == count or (before.stage, before.part) != (task.stage, task.part):
            run = []
        run.append(at)
        ends.update(dict.fromkeys(run[:-1], at))
    return ends
