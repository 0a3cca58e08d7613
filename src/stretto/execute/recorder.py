"""Measures a step: when every task of every rank started and ended, on one clock."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.program.program import Program
from stretto.program.sums import reduces
from stretto.program.task import RECEIVES
from stretto.program.wgrads import joined_ends
from stretto.timeline import Timeline
from stretto.timeline.memory import Floats

T = TypeVar("T")
_PINGS = 8
Settle = Callable[[dist.Work, Tensor], None]
"""Waits for what was started with a tensor."""


class Recorder:
    """One rank's times, in the order of its tasks."""

    def __init__(self, tasks: int) -> None:
        self._times = np.zeros((3, tasks))
        self._start, self._end, self._issued = self._times
        self._events: dict[int, tuple[Any, Any]] = {}
        self._zero: Any = None
        self._host = 0.0

    def timing(self, at: int, act: Callable[[], T]) -> Callable[[], T]:
        """The same, timed by the host's clock."""

        def timed() -> T:
            self._start[at] = time.perf_counter()
            found = act()
            self._end[at] = time.perf_counter()
            return found

        return timed

    def issuing(self, at: int, issue: Callable[[], object]) -> Callable[[], object]:
        """The same, noting when it is called."""

        def noted() -> object:
            self.note(at)
            return issue()

        return noted

    def note(self, at: int) -> None:
        """A task is issued now."""
        self._issued[at] = time.perf_counter()

    def take(self, spans: Mapping[int, tuple[float, float]]) -> None:
        """Tasks that began and ended in other threads, when they did."""
        for at, (start, end) in spans.items():
            self._start[at], self._end[at] = start, end

    def events(self, at: int) -> tuple[Any, Any]:
        """Two events to time a task on a device by."""
        if self._zero is None:
            torch.cuda.synchronize()
            self._zero = _event()
            self._zero.record()
            self._zero.synchronize()
            self._host = time.perf_counter()
        self._events[at] = pair = _event(), _event()
        return pair

    def _read_events(self) -> None:
        """Once the device has ended all: its times, by the host's clock."""
        for at, pair in self._events.items():
            self._start[at], self._end[at] = (self._host + self._zero.elapsed_time(event) / 1e3 for event in pair)

    def gathered(self, program: Program, group: dist.ProcessGroup | None, settle: Settle) -> Timeline | None:
        """All ranks' times, on the first rank, by its clock; None on the others. Without a group there is only one."""
        self._read_events()
        if group is None:
            return _timeline(program, self._times)
        talk = _Talk(group, settle)
        mine = torch.from_numpy(self._times + talk.offset())
        if group.rank():
            talk.send(mine, 0)
            return None
        whole = np.zeros((3, len(program)))
        for other in range(group.size()):
            here = np.flatnonzero(program.device == other)
            times = talk.receive(torch.zeros(3, len(here), dtype=torch.float64, device="cpu"), other) if other else mine
            whole[:, here] = times.numpy()
        return _timeline(program, whole)


def _timeline(program: Program, times: Floats) -> Timeline:
    """What was asked for before it was there began when that did: a receive with its send, a sum with its last end."""
    start, end, issued = times - times[0].min()
    receive = np.flatnonzero(program.work.among(RECEIVES) & (program.counterpart >= 0))
    begun = start.copy()
    begun[receive] = np.maximum(start[receive], start[program.counterpart[receive]])
    for task in reduces(program.work).tolist():
        begun[task] = start[program.ends(task)].max()
    _share_out(program, begun, end)
    return Timeline(program, np.minimum(begun, end), end, issued=issued)


def _share_out(program: Program, start: Floats, end: Floats) -> None:
    """Weight gradients that were computed as one each get the same part of the time that it took."""
    count = program.anatomy.wgrad_microbatches
    for device in range(program.devices if count > 1 else 0):
        place = np.flatnonzero(program.device == device)
        joined: dict[int, list[int]] = {}
        for at, last in joined_ends([program.task(task) for task in place.tolist()], count).items():
            joined.setdefault(last, [last]).append(at)
        for last, group in joined.items():
            task = place[sorted(group)]
            took = (end[task] - start[task]).sum()
            borders = end[place[last]] - took * np.linspace(1.0, 0.0, len(task) + 1)
            borders[0] = max(borders[0], start[task[0]])
            start[task], end[task] = borders[:-1], borders[1:]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Talk:
    """Says and hears numbers, one at a time, waiting as a step does."""

    def __init__(self, group: dist.ProcessGroup, settle: Settle) -> None:
        self._group, self._settle = group, settle

    def send(self, numbers: Tensor, rank: int) -> None:
        self._settle(self._group.send([numbers], rank, 0), numbers)

    def receive(self, numbers: Tensor, rank: int) -> Tensor:
        self._settle(self._group.recv([numbers], rank, 0), numbers)
        return numbers

    def offset(self) -> float:
        """What to add to this rank's clock to have the first rank's: by the quickest of a few questions."""
        now = torch.zeros(1, dtype=torch.float64, device="cpu")
        best, offset = float("inf"), 0.0
        for other in range(1, self._group.size()):
            for _ in range(_PINGS):
                if self._group.rank() == 0:
                    self.receive(now, other)
                    self.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu"), other)
                elif self._group.rank() == other:
                    asked = time.perf_counter()
                    self.send(now, 0)
                    told = float(self.receive(now, 0))
                    answered = time.perf_counter()
                    if answered - asked < best:
                        best, offset = answered - asked, told - (asked + answered) / 2
        return offset
