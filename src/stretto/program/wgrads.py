"""Weight gradients of several microbatches together: larger products, and fewer sums to read and write."""

from collections.abc import Sequence

import numpy as np

from stretto.program.task import WEIGHTS, Kind, Task
from stretto.program.work import Ints, Work


def apart(work: Work, action_kind: Ints) -> Ints:
    """The kinds of tasks where weight gradients do not follow their backwards any more: what was a full backward is an
    I and a W. Pairs stay what they are.
    """
    full = action_kind == Kind.B
    kind = np.where(full & (work.kind == Kind.B), Kind.I, work.kind)
    return np.where(full & (work.kind == Kind.WGRAD), Kind.W, kind)


def joined_keys(key: Ints, work: Work, device: Ints, count: int) -> Ints:
    """The keys that tasks are ordered by, where of `count` weight gradients of a stage's part all have that of the last
    one: a device then does them one right after the other.
    """
    task = np.flatnonzero(work.among(WEIGHTS))
    of = np.stack((device[task], work.stage[task], work.part[task]))
    order = np.lexsort((key[task], *of))
    task, of = task[order], of[:, order]
    place = np.arange(len(task))
    begins = (of != np.roll(of, 1, axis=1)).any(axis=0) | (place == 0)
    nth = place - np.maximum.accumulate(np.where(begins, place, 0))  # of its device, stage and part
    first = np.flatnonzero(nth % count == 0)
    last = np.append(first[1:], len(task)) - 1
    joined = key.copy()
    joined[task] = np.repeat(key[task[last]], last - first + 1)
    return joined


def joined_ends(tasks: Sequence[Task], count: int) -> dict[int, int]:
    """For each weight gradient among a device's tasks that is computed together with ones behind it: the last of them,
    by its place. They are at most `count`, of one part of one stage, with nothing else computed between them.
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
