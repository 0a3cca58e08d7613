"""Lanes on the host: threads that run tasks, or wait for started work so that the main thread stays interruptible."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

_POLL = 0.1
_LAST_WAIT = 2.0  # seconds that a process waits for its lanes at exit
_HANDED_ON = object()


class Work(Protocol):
    """Started work, such as a process group returns."""

    def wait(self) -> Any: ...


class Awaited(Protocol):
    """Started work that a supervisor can wait for."""

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def wait(self, seconds: float) -> bool: ...


class LaneFuture:
    """Work on a lane. It is `done` once the lane has seen it end, with `error` if it failed."""

    __slots__ = ("_ended", "begin", "done", "end", "error", "held", "work")

    def __init__(self, work: Work | None, held: object = None) -> None:
        self.work, self.held = work, held
        self.done = False
        self.error: BaseException | None = None
        self.begin = self.end = 0.0
        self._ended = threading.Lock()
        self._ended.acquire()

    def settle(self, error: BaseException | None) -> None:
        self.error, self.end, self.done = error, time.perf_counter(), True
        self.work = self.held = None  # release what they kept alive
        self._ended.release()

    def wait(self, seconds: float) -> bool:
        """Wait at most that long, and return whether the work has ended. Python handles signals meanwhile."""
        if not self.done and self._ended.acquire(timeout=seconds):
            self._ended.release()
        return self.done


class HostLane:
    """Waits for works one after the other, in the order in which they were started.

    Its thread ends when the lane is closed or garbage-collected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[LaneFuture | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_wait, args=(self._queue,), name=f"stretto {name}", daemon=True)
        self._ends: HostLane | None = None
        self._last: LaneFuture | None = None
        _threads[self._thread] = self._queue
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def follow(self, work: Work, held: object = None) -> LaneFuture:
        """Return a future of this work, which keeps `held` alive until the work has ended."""
        return self._put(LaneFuture(work, held))

    def run(
        self, act: "Callable[[], Work | None]", needs: Sequence[LaneFuture], check: Callable[[], None]
    ) -> LaneFuture:
        """Run `act` in this lane's thread once all its needs have ended, and return a future of it.

        `check` raises if there is no more reason to wait for a need. If `act` only starts work, another thread waits
        for the end of that work.
        """
        future = LaneFuture(None)
        future.work = _Act(self, future, act, needs, check)
        return self._put(future)

    def _put(self, future: LaneFuture) -> LaneFuture:
        if self._closed:
            future.settle(RuntimeError("nothing more is waited for here"))
        else:
            self._queue.put(future)
        return future

    def hand_on(self, future: LaneFuture, work: Work) -> None:
        """Let another thread wait for the work that a task has started."""
        self._ends = self._ends or HostLane(f"{self._name} ends")
        before, self._last = self._last, future
        future.work = _Started(work, future, before)
        self._ends._put(future)

    def close(self) -> None:
        """End the thread after the work that was begun."""
        self._closed = True
        self._queue.put(None)
        if self._ends is not None:
            self._ends.close()

    def join(self, seconds: float) -> None:
        """Wait at most that long for the thread to end."""
        self._thread.join(seconds)


class _Act:
    """A task that runs in a lane's thread."""

    def __init__(
        self,
        lane: HostLane,
        future: LaneFuture,
        act: Callable[[], Work | None],
        needs: Sequence[LaneFuture],
        check: Callable[[], None],
    ) -> None:
        self._lane, self._future, self._act, self._needs, self._check = lane, future, act, needs, check

    def wait(self) -> object:
        for need in self._needs:
            while not need.wait(_POLL):
                self._check()
            if need.error is not None:
                raise need.error
        self._future.begin = time.perf_counter()
        started = self._act()
        if started is None:
            return None
        self._lane.hand_on(self._future, started)
        return _HANDED_ON


class _Started:
    """Work that a lane has started. It begins then, or when the work before it ends."""

    def __init__(self, work: Work, future: LaneFuture, before: LaneFuture | None) -> None:
        self._work, self._future, self._before = work, future, before

    def wait(self) -> None:
        self._work.wait()
        if self._before is not None:
            self._future.begin = max(self._future.begin, self._before.end)


_threads: dict[threading.Thread, "SimpleQueue[LaneFuture | None]"] = {}
"""The threads of all lanes, and their queues."""


def _wait(queue: "SimpleQueue[LaneFuture | None]") -> None:
    while (future := queue.get()) is not None:
        assert future.work is not None
        try:
            result = future.work.wait()
        except BaseException as error:
            future.settle(error)
        else:
            if result is not _HANDED_ON:
                future.settle(None)
        del future
    _threads.pop(threading.current_thread(), None)


@atexit.register
def _end_lanes() -> None:
    """End all lanes: a thread that returns from a wait in a process group while Python exits would crash it."""
    threads = dict(_threads)
    for queue in threads.values():
        queue.put(None)
    deadline = time.monotonic() + _LAST_WAIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
