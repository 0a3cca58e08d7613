"""Why lanes stood idle: compute waited for a running task, or a host had not issued a task yet."""

from dataclasses import dataclass

import numpy as np

from stretto.program.columns import Bools, Ints, queue_edges
from stretto.program.graph import leaders
from stretto.program.program import Program
from stretto.timeline.memory import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Intervals of idle time before compute tasks; intervals before the same task do not overlap."""

    task: Ints
    """The compute task that ran next."""
    cause: Ints
    """The task that it waited for, possibly itself."""
    begin: Floats
    end: Floats

    @staticmethod
    def none() -> "Gaps":
        return Gaps(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))

    def total(self, tasks: int) -> Floats:
        """Return the idle time before each task; `tasks` is their number."""
        idle = np.zeros(tasks)
        np.add.at(idle, self.task, self.end - self.begin)
        return idle


def exposed(program: Program, start: Floats, end: Floats, awaited: Bools) -> Gaps:
    """Find where a device sat idle while its next compute task waited for a running task, one of `awaited`: one that it
    needs, or one that such a task needs in turn.
    """
    edge = awaited[program.need] & program.compute[program.needing]
    task, need = program.needing[edge], program.need[edge]
    tasks, needs = [task], [need]
    chain = awaited[program.need] & awaited[program.needing]
    order = np.argsort(program.needing[chain], kind="stable")
    after, before = program.needing[chain][order], program.need[chain][order]
    free = _free(program, start, end)
    while len(task):  # chains are short: a combine and the backward's combine
        matters = end[need] > free[task]
        pairs = np.unique(task[matters] * len(program) + need[matters])
        task, need = np.divmod(pairs, len(program))
        first, last = np.searchsorted(after, need), np.searchsorted(after, need, side="right")
        count = last - first
        task = np.repeat(task, count)
        within = np.arange(len(task)) - np.repeat(np.cumsum(count) - count, count)
        need = before[np.repeat(first, count) + within]
        tasks.append(task)
        needs.append(need)
    task, need = np.concatenate(tasks), np.concatenate(needs)
    return _gaps(program, start, end, task, need, start[need], end[need])


def ready(program: Program, start: Floats, end: Floats) -> Floats:
    """Return when each task could have started: its lane was free and the tasks it needs had ended. Tasks that devices
    run together can start once all of them can.
    """
    earliest = np.full(len(program), start.min())
    before, after = queue_edges(program.lane)
    np.maximum.at(earliest, after, end[before])
    np.maximum.at(earliest, program.needing, end[program.need])
    leader = leaders(program)
    together = earliest.copy()
    np.maximum.at(together, leader, earliest)
    return together[leader]


def late(program: Program, start: Floats, end: Floats, issued: Floats) -> Gaps:
    """Find where a device sat idle because a host had not issued the next compute task or a task that it needs
    directly. The late host is the device's own, or the one at the other end of a transfer.
    """
    until = np.minimum(start, issued)
    leader, order = leaders(program), np.argsort(until, kind="stable")
    last = np.empty(len(program), dtype=np.int64)
    last[leader[order]] = order  # the end of each transfer or sum that was issued last
    task = np.flatnonzero(program.compute)
    edge = program.compute[program.needing]
    task, need = np.append(task, program.needing[edge]), np.append(task, program.need[edge])
    cause = last[leader[need]]
    begin = ready(program, start, end)[need]
    return _gaps(program, start, end, task, cause, begin, np.minimum(until[cause], start[need]))


def _gaps(program: Program, start: Floats, end: Floats, task: Ints, cause: Ints, begin: Floats, stop: Floats) -> Gaps:
    """Clip these intervals to the idle time before their compute tasks; an overlap belongs to the first of them."""
    free = _free(program, start, end)
    begin, stop = np.maximum(begin, free[task]), np.minimum(stop, start[task])
    nonempty = stop > begin
    task, cause, begin, stop = task[nonempty], cause[nonempty], begin[nonempty], stop[nonempty]
    order = np.lexsort((begin, task))
    task, cause, begin, stop = task[order], cause[order], begin[order], stop[order]
    begin = np.maximum(begin, _latest_before(task, stop))
    nonempty = stop > begin
    return Gaps(task[nonempty], cause[nonempty], begin[nonempty], stop[nonempty])


def _free(program: Program, start: Floats, end: Floats) -> Floats:
    """Return when the device became free for each compute task."""
    free = np.full(len(program), start.min())
    before, after = queue_edges(np.where(program.compute, program.device, -1))
    free[after] = end[before]
    return free


def _latest_before(group: Ints, time: Floats) -> Floats:
    """Return the largest earlier time in each entry's group, −∞ for the first entry; groups are contiguous."""
    # Use the ranks of the times: adding an offset per group is exact for ranks, but would round the times.
    times, rank = np.unique(time, return_inverse=True)
    largest = np.maximum.accumulate(group * len(times) + rank) - group * len(times)
    before = np.full(len(time), -np.inf)
    same = np.flatnonzero(group[1:] == group[:-1])
    before[same + 1] = times[largest[same]]
    return before
