"""Measures a step: when every task of every rank started and ended, on one clock."""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from stretto.execute.lanes import Ticket
from stretto.program.program import Program
from stretto.timeline import Timeline

_PINGS = 8


class Recorder:
    """One rank's times, in the order of its tasks."""

    def __init__(self, tasks: int) -> None:
        self._start, self._end = np.zeros(tasks), np.zeros(tasks)
        self._started: list[tuple[int, list[Ticket]]] = []

    def run(self, at: int, run: Callable[[], None], waited: Callable[[], float], started: list[Ticket]) -> None:
        """Run a task. It starts once it no longer waits, and ends when all that it started has."""
        before, begin = waited(), time.perf_counter()
        started.clear()
        run()
        self._end[at] = time.perf_counter()
        self._start[at] = min(self._end[at], begin + waited() - before)
        if started:
            self._started.append((at, started.copy()))

    def gathered(self, program: Program, group: dist.ProcessGroup, rank: int) -> Timeline | None:
        """All ranks' times, on the first rank, by its clock; None on the others."""
        for at, tickets in self._started:
            self._end[at] = max(ticket.end for ticket in tickets)
        mine = torch.from_numpy(np.stack((self._start, self._end)) + _offset(group, rank))
        if rank:
            dist.send(mine, dist.get_global_rank(group, 0), group=group)
            return None
        start, end = np.zeros(len(program)), np.zeros(len(program))
        for other in range(dist.get_world_size(group)):
            here = np.flatnonzero(program.device == other)
            times = mine if other == 0 else torch.zeros(2, len(here), dtype=torch.float64)
            if other:
                dist.recv(times, dist.get_global_rank(group, other), group=group)
            start[here], end[here] = times.numpy()
        begin = start.min()
        return Timeline(program, start - begin, end - begin)


def _offset(group: dist.ProcessGroup, rank: int) -> float:
    """What to add to this rank's clock to have the first rank's: by the quickest of a few questions."""
    first = dist.get_global_rank(group, 0)
    now = torch.zeros(1, dtype=torch.float64)
    best, offset = float("inf"), 0.0
    for other in range(1, dist.get_world_size(group)):
        for _ in range(_PINGS):
            if rank == 0:
                peer = dist.get_global_rank(group, other)
                dist.recv(now, peer, group=group)
                now[0] = time.perf_counter()
                dist.send(now, peer, group=group)
            elif rank == other:
                asked = time.perf_counter()
                dist.send(now, first, group=group)
                dist.recv(now, first, group=group)
                answered = time.perf_counter()
                if answered - asked < best:
                    best, offset = answered - asked, float(now) - (asked + answered) / 2
    return offset
