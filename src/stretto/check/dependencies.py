"""Everything has what it needs before it starts."""

from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.program.work import Bools, Ints


def dependencies(program: Program) -> Iterator[Violation]:
    device, stated = program.device, _stated(program)
    for task, need in _required(program):
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
        across = (program.lane[task] != program.lane[need]) & (task > need)  # a lane's own order says the rest
        task, need = task[across], need[across]
        for a, b in _pairs(task, need, ~_contains(stated, task * len(program) + need)):
            message = (
                f"{program.task(a)} does not wait for {program.task(b)} on device {device[a]}, but needs its result"
            )
            yield Violation("dependencies", message, (a, b))


def _required(program: Program) -> Iterator[tuple[Ints, Ints]]:
    """What training demands: (tasks, what they need), −1 where there is none, on the same device."""
    work, placement = program.work, program.placement

    def find(kind: Kind) -> Ints:
        return work.find(kind, placement)[:-1]  # without the spare row

    forward, backward = work.forwards(placement)[:-1], work.backwards(placement)[:-1]
    yield forward, find(Kind.RECV_F)
    yield forward[1:], forward[:-1]
    yield backward, find(Kind.RECV_B)
    yield backward[:-1], backward[1:]
    yield backward, forward
    yield find(Kind.W), backward
    yield find(Kind.WGRAD), backward
    yield find(Kind.SEND_F), forward
    yield find(Kind.SEND_B), backward


def _stated(program: Program) -> Ints:
    return np.sort(program.needing * len(program) + program.need)


def _contains(ordered: Ints, keys: Ints) -> Bools:
    at = np.searchsorted(ordered, keys)
    found = at < len(ordered)
    found[found] = ordered[at[found]] == keys[found]
    return found


def _pairs(task: Ints, need: Ints, chosen: Bools) -> Iterator[tuple[int, int]]:
    return zip(task[chosen].tolist(), need[chosen].tolist(), strict=True)
