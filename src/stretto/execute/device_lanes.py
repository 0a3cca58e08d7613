"""Lanes on a device: a stream for each, and events where a task needs a task of another lane."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stretto.execute.executor import Act, Executor, Issue
from stretto.execute.recorder import Recorder
from stretto.execute.release import kept_until
from stretto.program.task import Lane

_FIRST = ("comm", "send", "recv")  # lanes whose kernels the device prefers


class StreamFuture:
    """Work that a process group has begun on a device. It is `done` when the device has finished it."""

    __slots__ = ("held", "work")

    def __init__(self, work: Any, held: object = None) -> None:
        self.work, self.held = work, held

    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, seconds: float) -> bool:
        """Wait at most that long, and return whether the work has ended."""
        until = time.monotonic() + seconds
        while not self.done:
            if time.monotonic() > until:
                return False
            time.sleep(0.00005)
        return True


class Begun:
    """Work that a task has begun on a device: a task that needs it makes its own stream wait."""

    def __init__(self, futures: Sequence[StreamFuture] = (), landed: Callable[[], None] | None = None) -> None:
        """`landed` runs once all futures are seen to have ended; without it, they are not checked again."""
        self.futures, self.landed = list(futures), landed

    def wait(self) -> None:
        """Make the current stream wait for all of the work."""
        self.follow()

    def follow(self) -> None:
        """Make the current stream wait for the work begun so far."""
        for future in self.futures:
            future.work.wait()


class DeviceLanes:
    """Streams of a device. The host queues tasks, and waits only to learn what messages will hold.

    The compute lane is the caller's stream, so that the caller's own work stays in order. A task may read memory of
    another lane, whose stream does not know that: the memory is kept until that stream waits for the task.
    """

    spans: Mapping[int, tuple[float, float]] = {}

    def __init__(self, executor: Executor, more: Mapping[int, Sequence[int]], used: list[object] | None) -> None:
        """`more` are needs that the program does not contain, of memory that is reused. Objects that tasks put into
        `used` are kept alive until their memory may be given to the next task (see `kept_until`).
        """
        self._tasks, self._supervisor, self._used = executor.tasks, executor.supervisor, used
        tasks = executor.tasks
        self._needs = [
            [need for need in sorted({*needs, *more.get(at, ())}) if tasks[need].lane != tasks[at].lane]
            for at, needs in enumerate(executor.needs)
        ]
        self._events: dict[int, Any] = {need: _event() for needs in self._needs for need in needs}
        lanes = {task.lane for task in tasks if task.lane.name != "compute"}
        self._lane_streams: dict[Lane, Any] = {lane: _stream(lane) for lane in sorted(lanes)}
        self._streams = [self._lane_streams.get(task.lane) for task in tasks]  # None is the caller's stream
        self._main: Any = None
        self._begun: dict[int, Begun] = {}
        self._in_flight: deque[Begun] = deque()
        self.kept_until = kept_until(tasks, self._needs)
        """For each task, the number of tasks to issue before what it used and other lanes own is released."""
        self._kept: dict[int, list[object]] = {}  # by the number of tasks to issue before

    def compile(self, at: int, act: Act, recorder: Recorder | None = None) -> Issue:
        own, needs, events, begun = self._streams[at], self._needs[at], self._events, self._begun
        event, check = events.get(at), self._supervisor.check
        used, kept, until = self._used, self._kept, self.kept_until[at]
        if recorder is not None:
            act = _timed(recorder, at, act)

        def issue() -> None:
            check()
            kept.pop(at, None)
            stream = self._main if own is None else own
            if own is not None:
                torch.cuda.set_stream(own)
            try:
                for need in needs:
                    if need in begun:
                        begun[need].wait()
                    else:
                        stream.wait_event(events[need])
                work = act()
                if isinstance(work, Begun):
                    if event is not None:
                        begun[at] = work
                    if work.landed is not None:
                        self._track(work)
                elif event is not None:
                    event.record(stream)
            finally:
                if own is not None:
                    torch.cuda.set_stream(self._main)
            if used:
                kept.setdefault(until, []).extend(used)
                used.clear()

        return issue

    def begin(self) -> None:
        """Start all lanes when the caller's stream gets here."""
        self._main = torch.cuda.current_stream()
        for stream in self._lane_streams.values():
            stream.wait_stream(self._main)

    def end(self, ended: Callable[[int], None]) -> None:
        """Make the caller's stream, but not the host, wait for all lanes and for everything that was sent."""
        for stream in self._lane_streams.values():
            self._main.wait_stream(stream)
        while self._in_flight:
            self._land()
        self._kept.clear()
        for at in range(len(self._tasks)):
            ended(at)

    def clear(self) -> None:
        """Forget begun work, but keep the memory that the device may still use after a failure.

        Copies to and from host memory use memory of the caller's stream, which therefore waits for them.
        """
        self._begun.clear()
        if self._main is not None:
            for stream in (*self.streams_of("d2h"), *self.streams_of("h2d")):
                self._main.wait_stream(stream)

    def streams_of(self, name: str) -> list[Any]:
        """Return the streams of the lanes of this name."""
        return [stream for lane, stream in self._lane_streams.items() if lane.name == name]

    def _track(self, work: Begun) -> None:
        while self._in_flight and all(future.done for future in self._in_flight[0].futures):
            self._land()
        self._in_flight.append(work)

    def _land(self) -> None:
        """Release the oldest work in flight: it has ended, or the caller's stream waits for it."""
        work = self._in_flight.popleft()
        work.follow()
        if work.landed is not None:
            work.landed()
        work.futures, work.landed = [], None  # release what they kept alive


def _timed(recorder: Recorder, at: int, act: Act) -> Act:
    """Time a task between two events, with all the work it begins.

    The task counts as issued here, after the host's waits.
    """

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
    """A point of the current stream, with the interface of a process group's work."""

    def __init__(self) -> None:
        self._event = _event()
        self._event.record()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _stream(lane: Lane) -> Any:
    """Make a lane's stream. Small kernels around messages come first: behind those of compute, which fill the device,
    they would wait for as long as these take.
    """
    return torch.cuda.Stream(priority=-1 if lane.name in _FIRST else 0)  # type: ignore[no-untyped-call]
