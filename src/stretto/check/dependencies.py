"""Everything has what it needs before it starts."""

from collections.abc import Iterator
from itertools import pairwise

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
    tables, anatomy = program.tables, program.anatomy
    forward, backward = tables.forward, tables.backward
    starts, results = tables.first(forward)[:-1], tables.last(forward)[:-1]
    back_starts, back_results = tables.first(backward)[:-1], tables.last(backward)[:-1]
    yield starts, tables.end(Kind.RECV_F)[:-1]
    yield starts[1:], results[:-1]
    yield back_starts, tables.end(Kind.RECV_B)[:-1]
    yield back_starts[:-1], back_results[1:]
    yield back_starts, results
    for stage, (a, b) in enumerate(pairwise(anatomy.pass_rows.tolist())):
        yield forward[a + 1 : b], forward[a : b - 1]
        yield backward[a + 1 : b], backward[a : b - 1]
        weights = slice(anatomy.weight_rows[stage], anatomy.weight_rows[stage + 1])
        yield tables.weight[weights], backward[a:b][list(anatomy.weight_steps[stage])]
    yield tables.end(Kind.SEND_F)[:-1], results
    yield tables.end(Kind.SEND_B)[:-1], back_results


def _stated(program: Program) -> Ints:
    return np.sort(program.needing * len(program) + program.need)


def _contains(ordered: Ints, keys: Ints) -> Bools:
    at = np.searchsorted(ordered, keys)
    found = at < len(ordered)
    found[found] = ordered[at[found]] == keys[found]
    return found


def _pairs(task: Ints, need: Ints, chosen: Bools) -> Iterator[tuple[int, int]]:
    return zip(task[chosen].tolist(), need[chosen].tolist(), strict=True)
