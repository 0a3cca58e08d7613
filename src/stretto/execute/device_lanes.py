"""Lanes on a device: a stream for each, and events where a task needs another lane's."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stretto.execute.executor import Act, Executor, Issue
from stretto.execute.recorder import Recorder
from stretto.program.task import Lane

_AHEAD = 256  # tasks of several lanes that the host may have queued and the device has not ended


class StreamTicket:
    """Something that a process group has begun on a device. It has `done` when the device has ended it."""

    __slots__ = ("held", "work")

    def __init__(self, work: Any, held: object = None) -> None:
        self.work, self.held = work, held

    error: BaseException | None = None

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


class Begun:
    """What a task has begun on a device: a task that needs it lets its own stream wait."""

    def __init__(self, tickets: Sequence[StreamTicket] = (), landed: Callable[[], None] | None = None) -> None:
        """`landed` is run when all is seen to have ended; what has none is not looked at again."""
        self.tickets, self.landed = list(tickets), landed

    def wait(self) -> None:
        """The current stream waits for all of it."""
        self.follow()

    def follow(self) -> None:
        """The current stream waits for what was begun so far."""
        for ticket in self.tickets:
            ticket.work.wait()


class DeviceLanes:
    """Streams of a device. The host queues, and waits for nothing but word of what is to come. The compute lane has the
    caller's own, so that what the caller does is in order.

    What a task of one lane has read may belong to another, which knows nothing of that: it is kept until the device has
    ended the task.
    """

    spans: Mapping[int, tuple[float, float]] = {}

    def __init__(self, executor: Executor, more: Mapping[int, int], used: list[object] | None) -> None:
        """`more` are needs that the program does not know of, of memory that is used again. What tasks put into `used`
        is kept.
        """
        self._tasks, self._supervisor, self._used = executor.tasks, executor.supervisor, used
        tasks = executor.tasks
        self._needs = [
            [it for it in sorted({*needs, *([more[at]] if at in more else [])}) if tasks[it].lane != tasks[at].lane]
            for at, needs in enumerate(executor.needs)
        ]
        self._events: dict[int, Any] = {need: _event() for needs in self._needs for need in needs}
        lanes = {task.lane for task in tasks if task.lane.name != "compute"}
        self._made: dict[Lane, Any] = {lane: _stream() for lane in sorted(lanes)}
        self._streams = [self._made.get(task.lane) for task in tasks]  # None is the caller's own
        self._main: Any = None
        self._begun: dict[int, Begun] = {}
        self._flying: deque[Begun] = deque()
        self._kept: deque[tuple[Any, object]] = deque()

    def compile(self, at: int, act: Act, recorder: Recorder | None = None) -> Issue:
        own, needs, events, begun = self._streams[at], self._needs[at], self._events, self._begun
        event, check = events.get(at), self._supervisor.check
        if recorder is not None:
            act = _timed(recorder, at, act)

        def issue() -> None:
            check()
            now = self._main if own is None else own
            if own is not None:
                torch.cuda.set_stream(own)
            try:
                for need in needs:
                    if need in begun:
                        begun[need].wait()
                    else:
                        now.wait_event(events[need])
                work = act()
                if isinstance(work, Begun):
                    if event is not None:
                        begun[at] = work
                    if work.landed is not None:
                        self._fly(work)
                elif event is not None:
                    event.record(now)
            finally:
                if own is not None:
                    torch.cuda.set_stream(self._main)
            if self._used is not None:
                self._keep(now)

        return issue

    def begin(self) -> None:
        """All lanes start when the caller's stream gets here."""
        self._main = torch.cuda.current_stream()
        for stream in self._made.values():
            stream.wait_stream(self._main)

    def end(self, ended: Callable[[int], None]) -> None:
        """The caller's stream goes on when all lanes have ended, and all that was sent has left. The host goes on."""
        for stream in self._made.values():
            self._main.wait_stream(stream)
        while self._flying:
            self._land()
        self._kept.clear()
        for at in range(len(self._tasks)):
            ended(at)

    def clear(self) -> None:
        """What a device may still read or write after a failure stays."""
        self._begun.clear()

    def _fly(self, work: Begun) -> None:
        while self._flying and all(ticket.done for ticket in self._flying[0].tickets):
            self._land()
        self._flying.append(work)

    def _land(self) -> None:
        """Let go of what was begun: it has ended, or the caller's stream waits for it."""
        work = self._flying.popleft()
        work.follow()
        if work.landed is not None:
            work.landed()
        work.tickets, work.landed = [], None  # what they kept alive may go

    def _keep(self, stream: Any) -> None:
        """Hold on to what a task has used. A host that is too far ahead waits, checking that there is reason to."""
        assert self._used is not None
        event = _event()
        event.record(stream)
        self._kept.append((event, self._used.copy()))
        self._used.clear()
        while self._kept and (self._kept[0][0].query() or len(self._kept) > _AHEAD):
            if not self._kept[0][0].query():
                self._supervisor.check()
                time.sleep(0.00005)
                continue
            self._kept.popleft()


def _timed(recorder: Recorder, at: int, act: Act) -> Act:
    """Between two events, with all that it has begun; issued only now, when the host has waited for what it must."""

    def timed() -> Any:
        recorder.note(at)
        first, last = recorder.events(at)
        first.record()
        work = act()
        if isinstance(work, Begun):
            work.follow()
        last.record()
        return work

    return timed


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
