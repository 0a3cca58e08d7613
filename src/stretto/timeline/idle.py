"""Why lanes stood idle: compute waited for something under way, or a host had not issued a task yet."""

from dataclasses import dataclass

import numpy as np

from stretto.program.columns import Bools, Ints
from stretto.program.graph import leaders, queue_edges
from stretto.program.program import Program
from stretto.timeline.memory import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Stretches of idle time before compute tasks; those before one task do not overlap."""

    task: Ints
    """The compute task that ran next."""
    cause: Ints
    """The task that it waited for; it may be itself."""
    begin: Floats
    end: Floats

    @staticmethod
    def none() -> "Gaps":
        return Gaps(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))

    def total(self, tasks: int) -> Floats:
        """The idle time before each of so many tasks."""
        found = np.zeros(tasks)
        np.add.at(found, self.task, self.end - self.begin)
        return found


def exposed(program: Program, start: Floats, end: Floats, awaited: Bools) -> Gaps:
    """Where a device sat idle while one of these tasks was under way that its next compute task needs."""
    edge = (awaited & (end > start))[program.need] & program.compute[program.needing]
    if not edge.any():
        return Gaps.none()
    need = program.need[edge]
    return _gaps(program, start, end, program.needing[edge], need, start[need], end[need])


def ready(program: Program, start: Floats, end: Floats) -> Floats:
    """From when on each task could have run: its lane was free, and what it needs was there. What devices do together
    can begin when all of them can.
    """
    found = np.full(len(program), start.min())
    before, after = queue_edges(program.lane)
    np.maximum.at(found, after, end[before])
    np.maximum.at(found, program.needing, end[program.need])
    leader = leaders(program)
    together = found.copy()
    np.maximum.at(together, leader, found)
    return together[leader]


def late(program: Program, start: Floats, end: Floats, issued: Floats) -> Gaps:
    """Where a device sat idle because a host had not issued the next compute task, or something that this needs
    directly: its own host, or the host at the other end of a transfer.
    """
    until = np.minimum(start, issued)
    leader, order = leaders(program), np.argsort(until, kind="stable")
    last = np.empty(len(program), dtype=np.int64)
    last[leader[order]] = order  # of the ends of one thing, the one that was issued last
    task = np.flatnonzero(program.compute)
    edge = program.compute[program.needing]
    task, need = np.append(task, program.needing[edge]), np.append(task, program.need[edge])
    cause = last[leader[need]]
    begin = ready(program, start, end)[need]
    return _gaps(program, start, end, task, cause, begin, np.minimum(until[cause], start[need]))


def _gaps(program: Program, start: Floats, end: Floats, task: Ints, cause: Ints, begin: Floats, stop: Floats) -> Gaps:
    """What of these stretches is idle time before their compute tasks; what several have in common is the first's."""
    free = np.full(len(program), start.min())  # when the device became free for a task
    before, after = queue_edges(np.where(program.compute, program.device, -1))
    free[after] = end[before]
    begin, stop = np.maximum(begin, free[task]), np.minimum(stop, start[task])
    some = stop > begin
    task, cause, begin, stop = task[some], cause[some], begin[some], stop[some]
    order = np.lexsort((begin, task))
    task, cause, begin, stop = task[order], cause[order], begin[order], stop[order]
    begin = np.maximum(begin, _latest_before(task, stop))
    some = stop > begin
    return Gaps(task[some], cause[some], begin[some], stop[some])


def _latest_before(group: Ints, time: Floats) -> Floats:
    """The largest time before each one in its group, −∞ before the first; groups come one after the other."""
    # By the times' ranks: added to a number that grows with the group, they are exact where times would be rounded.
    times, rank = np.unique(time, return_inverse=True)
    largest = np.maximum.accumulate(group * len(times) + rank) - group * len(times)
    before = np.full(len(time), -np.inf)
    same = np.flatnonzero(group[1:] == group[:-1])
    before[same + 1] = times[largest[same]]
    return before
