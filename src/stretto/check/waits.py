"""Checks that tasks wait for what they need."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.columns import Bools, Ints
from stretto.program.program import Program


class Waits:
    """What a program's tasks wait for: their stated needs, and the tasks before them on their lanes."""

    def __init__(self, program: Program) -> None:
        self._program, self._device = program, program.device
        self._stated = np.sort(program.needing * len(program) + program.need)

    def hold(self, task: Ints, need: Ints) -> Bools:
        """Return whether each task waits for its need: it states it, or comes after it on the same lane."""
        lane = self._program.lane
        holds: Bools = (lane[task] == lane[need]) & (task > need)
        across = np.flatnonzero(~holds)
        holds[across] = _contains(self._stated, task[across] * len(self._program) + need[across])
        return holds

    def missing(self, task: Ints, need: Ints) -> Iterator[Violation]:
        """Yield where a task needs another's result but does not wait for it; −1 where either does not exist."""
        program, device = self._program, self._device
        exist = (task >= 0) & (need >= 0)
        task, need = task[exist], need[exist]
        local = device[task] == device[need]  # the rules for placement and transfers cover the others
        task, need = task[local], need[local]
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
    contained = at < len(ordered)
    contained[contained] = ordered[at[contained]] == keys[contained]
    return contained


def _pairs(task: Ints, need: Ints, chosen: Bools) -> Iterator[tuple[int, int]]:
    return zip(task[chosen].tolist(), need[chosen].tolist(), strict=True)
