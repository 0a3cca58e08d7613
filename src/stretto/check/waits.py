"""Whether tasks wait for what they should."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.columns import Bools, Ints
from stretto.program.program import Program


class Waits:
    """What a program's tasks are said to wait for, and what lanes make them wait for."""

    def __init__(self, program: Program) -> None:
        self._program, self._device = program, program.device
        self._stated = np.sort(program.needing * len(program) + program.need)

    def hold(self, task: Ints, need: Ints) -> Bools:
        """Whether each task waits for the other: it says so, or stands behind it on the same lane."""
        lane = self._program.lane
        found: Bools = (lane[task] == lane[need]) & (task > need)
        across = np.flatnonzero(~found)
        found[across] = _contains(self._stated, task[across] * len(self._program) + need[across])
        return found

    def missing(self, task: Ints, need: Ints) -> Iterator[Violation]:
        """Where a task needs another's result and does not wait for it; −1 where either is not there."""
        program, device = self._program, self._device
        there = (task >= 0) & (need >= 0)
        task, need = task[there], need[there]
        here = device[task] == device[need]  # on different devices: reported as misplaced, or by transfers
        task, need = task[here], need[here]
        for a, b in _pairs(task, need, task == need):
            pair = program.task(a)
            assert pair.backward is not None
            message = "{0} waits for itself: its backward {1}B{2} needs its forward {1}F{2}"
            yield Violation("deadlock", message.format(pair, *pair.backward), (a, b))
        for a, b in _pairs(task, need, task < need):
            message = f"{program.task(a)} comes before {program.task(b)} on device {device[a]}, but needs its result"
            yield Violation("dependencies", message, (a, b))
        for a, b in _pairs(task, need, (task > need) & ~self.hold(task, need)):
            name, other = program.task(a), program.task(b)
            message = f"{name} does not wait for {other} on device {device[a]}, but needs its result"
            yield Violation("dependencies", message, (a, b))


def _contains(ordered: Ints, keys: Ints) -> Bools:
    at = np.searchsorted(ordered, keys)
    found = at < len(ordered)
    found[found] = ordered[at[found]] == keys[found]
    return found


def _pairs(task: Ints, need: Ints, chosen: Bools) -> Iterator[tuple[int, int]]:
    return zip(task[chosen].tolist(), need[chosen].tolist(), strict=True)
