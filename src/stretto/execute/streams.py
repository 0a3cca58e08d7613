"""Lanes on a device: a stream for each, and events where a task needs another lane's."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from stretto.program.program import Program
from stretto.program.task import Lane, Task

Run = Callable[[], None]
_AHEAD = 256  # tasks of several lanes that the host may have queued and the device has not ended


class Streams:
    """Runs a rank's tasks on streams. The compute lane's is the caller's own, so that what the caller does is in order.

    What a task of one lane has read may belong to another, which knows nothing of that; `keep` holds on to it until the
    device has ended the task.
    """

    def __init__(self, program: Program, tasks: Sequence[Task], places: Sequence[int], more: dict[int, int]) -> None:
        """`places` are the tasks' in the program; `more` are needs that it does not know of, by their number here."""
        here = {place: at for at, place in enumerate(places)}
        computing = [task.lane.peer is None for task in tasks]
        self._waits: list[list[int]] = []
        for at, place in enumerate(places):
            needs = {here[need] for need in program.needs(place) if need in here}
            needs |= {more[at]} if at in more else set()
            self._waits.append([k for k in sorted(needs) if computing[k] and tasks[k].lane != tasks[at].lane])
        needed = {k for waits in self._waits for k in waits}
        self._events: dict[int, Any] = {at: _event() for at in needed}
        lanes = {task.lane for task in tasks if task.lane.name != "compute"}
        self._made: dict[Lane, Any] = {lane: _stream() for lane in sorted(lanes)}
        self._streams = [self._made.get(task.lane) for task in tasks]  # None is the caller's own
        self._main: Any = None
        self._kept: deque[tuple[Any, object]] = deque()
        self.keeps = any(task.lane.name == "comm" for task in tasks)
        """Whether several lanes compute."""

    def begin(self) -> None:
        """All lanes start when the caller's stream gets here."""
        self._main = torch.cuda.current_stream()
        for stream in self._made.values():
            stream.wait_stream(self._main)

    def end(self) -> None:
        """The caller's stream goes on when all lanes have ended."""
        for stream in self._made.values():
            self._main.wait_stream(stream)
        self._kept.clear()

    def run(self, at: int, run: Run, times: tuple[Any, Any] | None = None, started: list[Any] | None = None) -> None:
        """Queue a task. If it is to be timed, between two events, and with all that it has started in between."""
        own = self._streams[at]
        for k in self._waits[at]:
            (own or self._main).wait_event(self._events[k])
        with nullcontext() if own is None else torch.cuda.stream(own):
            if times is not None and started is not None:
                started.clear()
                times[0].record()
                run()
                for ticket in started:
                    ticket.work.wait()
                times[1].record()
            else:
                run()
            if at in self._events:
                self._events[at].record(own or self._main)

    def keep(self, at: int, what: object, check: Callable[[], None]) -> None:
        """Hold on to what a task has used. A host that is too far ahead waits, checking that there is reason to."""
        event = _event()
        event.record(self._streams[at] or self._main)
        self._kept.append((event, what))
        while self._kept and (self._kept[0][0].query() or len(self._kept) > _AHEAD):
            if not self._kept[0][0].query():
                check()
                time.sleep(0.00005)
                continue
            self._kept.popleft()


class StreamTicket:
    """Something that a process group has begun on a device. It has `done` when the device has ended it."""

    __slots__ = ("held", "work")

    def __init__(self, work: Any, held: object = None) -> None:
        self.work, self.held = work, held

    error: BaseException | None = None
    end = 0.0

    @property
    def done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after that long at most."""
        until = time.monotonic() + seconds
        while not self.done:
            if time.monotonic() > until:
                return False
            time.sleep(0.00005)
        return True


class Reached:
    """A point of the current stream, as the work of a process group would be."""

    def __init__(self) -> None:
        self._event = _event()
        self._event.record()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
