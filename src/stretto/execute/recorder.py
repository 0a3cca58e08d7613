"""Measures a step: when every task of every rank started and ended, on one clock, and what was allocated then."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.program.graph import leaders
from stretto.program.program import Program
from stretto.program.task import RECEIVES
from stretto.program.wgrads import joined_ends
from stretto.timeline import Timeline
from stretto.timeline.memory import Floats

T = TypeVar("T")
_PINGS = 8
Settle = Callable[[dist.Work, Tensor], None]
"""Waits for work that was started with a tensor."""
CountBytes = Callable[[], int]
"""Returns the bytes that are allocated now."""


class Recorder:
    """The times of one rank, in the order of its tasks, and the bytes allocated after each."""

    def __init__(self, tasks: int, count_bytes: CountBytes | None = None) -> None:
        """Without `count_bytes`, on any rank, only times are recorded."""
        self._columns = np.zeros((4, tasks))
        self._start, self._end, self._issued, self._allocated = self._columns
        self._allocated[:] = np.nan
        self._count_bytes = count_bytes
        self._events: dict[int, tuple[Any, Any]] = {}
        self._zero: Any = None
        self._host = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Collect garbage now, and not within the block, where it would take a tenth of a second of the step."""
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()

    def timing(self, at: int, act: Callable[[], T]) -> Callable[[], T]:
        """Return the same function, timed by the host's clock."""

        def timed() -> T:
            self._start[at] = time.perf_counter()
            result = act()
            self._end[at] = time.perf_counter()
            return result

        return timed

    def issuing(self, at: int, issue: Callable[[], object]) -> Callable[[], object]:
        """Return the same function, which also records when it is called, and the bytes that it leaves allocated."""
        count_bytes = self._count_bytes

        def noted() -> object:
            self.note(at)
            result = issue()
            if count_bytes is not None:
                self._allocated[at] = count_bytes()
            return result

        return noted

    def note(self, at: int) -> None:
        """Record that a task is issued now."""
        self._issued[at] = time.perf_counter()

    def take(self, spans: Mapping[int, tuple[float, float]]) -> None:
        """Record when tasks in other threads began and ended."""
        for at, (start, end) in spans.items():
            self._start[at], self._end[at] = start, end

    def events(self, at: int) -> tuple[Any, Any]:
        """Return two events that time a task on a device."""
        if self._zero is None:
            torch.cuda.synchronize()
            self._zero = _event()
            self._zero.record()
            self._zero.synchronize()
            self._host = time.perf_counter()
        self._events[at] = pair = _event(), _event()
        return pair

    def _read_events(self) -> None:
        """Convert the device's times to the host's clock; the device must have finished all tasks."""
        for at, pair in self._events.items():
            self._start[at], self._end[at] = (self._host + self._zero.elapsed_time(event) / 1e3 for event in pair)

    def gathered(self, program: Program, group: dist.ProcessGroup | None, settle: Settle) -> Timeline | None:
        """Return all ranks' records on the first rank, by its clock, and None on the others.

        Without a group, this is the only rank.
        """
        self._read_events()
        if group is None:
            return _timeline(program, self._columns)
        exchange = _Exchange(group, settle)
        mine = torch.from_numpy(self._columns.copy())
        mine[:3] += exchange.offset()
        if group.rank():
            exchange.send(mine, 0)
            return None
        whole = np.zeros((4, len(program)))
        for other in range(group.size()):
            tasks = np.flatnonzero(program.device == other)
            columns = mine
            if other:
                columns = exchange.receive(torch.zeros(4, len(tasks), dtype=torch.float64, device="cpu"), other)
            whole[:, tasks] = columns.numpy()
        return _timeline(program, whole)


def bytes_counter(device: torch.device) -> CountBytes | None:
    """Return a function that counts the bytes allocated on a device; None where nothing counts them: on the CPU, and
    with an allocator that is not PyTorch's own.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() == "pluggable":
        return None
    return partial(_allocated, device)


def _allocated(device: torch.device) -> int:
    """Return `torch.cuda.memory_allocated`, which would first flatten and sort all statistics, for 0.1 ms."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])


def _timeline(program: Program, columns: Floats) -> Timeline:
    """Make a timeline in which a receive begins no earlier than its send, and a collective with its last end."""
    start, end, issued = columns[:3] - columns[0].min()
    allocated = columns[3]
    receive = np.flatnonzero(program.work.among(RECEIVES) & (program.counterpart >= 0))
    begin = start.copy()
    begin[receive] = np.maximum(start[receive], start[program.counterpart[receive]])
    joint = np.flatnonzero((program.counterpart >= 0) & (program.on_lane("reduce") | program.on_lane("comm")))
    if len(joint):
        ring, latest = leaders(program)[joint], np.full(len(program), -np.inf)
        np.maximum.at(latest, ring, start[joint])
        begin[joint] = latest[ring]
    _split_joined(program, begin, end)
    known = None if np.isnan(allocated).any() else allocated
    return Timeline(program, np.minimum(begin, end), end, issued=issued, allocated=known)


def _split_joined(program: Program, start: Floats, end: Floats) -> None:
    """Give weight gradients that were computed together equal parts of the time it took."""
    count = program.anatomy.wgrad_microbatches
    for device in range(program.devices if count > 1 else 0):
        place = np.flatnonzero(program.device == device)
        joined: dict[int, list[int]] = {}
        for at, last in joined_ends([program.task(task) for task in place.tolist()], count).items():
            joined.setdefault(last, [last]).append(at)
        for last, group in joined.items():
            task = place[sorted(group)]
            seconds = (end[task] - start[task]).sum()
            borders = end[place[last]] - seconds * np.linspace(1.0, 0.0, len(task) + 1)
            borders[0] = max(borders[0], start[task[0]])
            start[task], end[task] = borders[:-1], borders[1:]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Exchange:
    """Sends and receives numbers, one tensor at a time, waiting as a step does."""

    def __init__(self, group: dist.ProcessGroup, settle: Settle) -> None:
        self._group, self._settle = group, settle

    def send(self, numbers: Tensor, rank: int) -> None:
        self._settle(self._group.send([numbers], rank, 0), numbers)

    def receive(self, numbers: Tensor, rank: int) -> Tensor:
        self._settle(self._group.recv([numbers], rank, 0), numbers)
        return numbers

    def offset(self) -> float:
        """Return what to add to this rank's clock to get the first rank's."""
        now = torch.zeros(1, dtype=torch.float64, device="cpu")
        trips: list[tuple[float, float, float]] = []
        for other in range(1, self._group.size()):
            for _ in range(_PINGS):
                if self._group.rank() == 0:
                    self.receive(now, other)
                    self.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu"), other)
                elif self._group.rank() == other:
                    sent = time.perf_counter()
                    self.send(now, 0)
                    first_clock = float(self.receive(now, 0))
                    trips.append((sent, first_clock, time.perf_counter()))
        return clock_offset(trips)


def clock_offset(trips: Sequence[tuple[float, float, float]]) -> float:
    """Return how far the first rank's clock is ahead, from round trips: when sent, the first's clock, when received.

    The fastest trip is the most exact, to half its time. Ranks on one machine share a clock, so where the fastest trip
    cannot tell an offset from none, there is none.

    >>> clock_offset([(0.0, 107.0, 10.0), (20.0, 121.0, 22.0)]), clock_offset([(0.0, 9.0, 10.0)])
    (100.0, 0.0)
    """
    if not trips:
        return 0.0
    sent, first_clock, received = min(trips, key=lambda trip: trip[2] - trip[0])
    offset = first_clock - (sent + received) / 2
    return 0.0 if abs(offset) <= (received - sent) / 2 else offset
