"""Lanes on the host: threads that wait for what was started, so that the main thread can always be woken."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

_POLL = 0.1
_LAST_WAIT = 2.0  # seconds that a process gives its lanes in the end


class Work(Protocol):
    """What a process group returns for what it has started."""

    def wait(self) -> Any: ...


class Awaited(Protocol):
    """Something that was started, and that a supervisor can wait for."""

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def wait(self, seconds: float) -> bool: ...


class Deferred:
    """Work that is done by the lane that waits for it, once all that it needs has ended."""

    def __init__(self, run: Callable[[], None], needs: "Sequence[Ticket]", check: Callable[[], None]) -> None:
        """`check` raises if there is no more reason to wait for a need."""
        self._run, self._needs, self._check = run, needs, check
        self.begin = 0.0

    def wait(self) -> None:
        for need in self._needs:
            while not need.wait(_POLL):
                self._check()
            if need.error is not None:
                raise need.error
        self.begin = time.perf_counter()
        self._run()


class Ticket:
    """Something that was started. `done` once its lane has seen it end, with `error` if it failed."""

    __slots__ = ("_ended", "done", "end", "error", "held", "work")

    def __init__(self, work: Work, held: object = None) -> None:
        self.work, self.held = work, held
        self.done = False
        self.error: BaseException | None = None
        self.end = 0.0
        self._ended = threading.Lock()
        self._ended.acquire()

    def settle(self, error: BaseException | None) -> None:
        self.error, self.end, self.done = error, time.perf_counter(), True
        self.held = None  # what it kept alive may go
        self._ended.release()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after that long at most. Signals are handled meanwhile."""
        if not self.done and self._ended.acquire(timeout=seconds):
            self._ended.release()
        return self.done


class HostLane:
    """Waits for works one after the other, in the order in which they were started. Its thread ends when it is closed,
    or when nobody has it any more."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_wait, args=(self._queue,), name=f"stretto {name}", daemon=True)
        _threads[self._thread] = self._queue
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def follow(self, work: Work, held: object = None) -> Ticket:
        """A ticket for this work, which keeps `held` alive until it has ended."""
        ticket = Ticket(work, held)
        if self._closed:
            ticket.settle(RuntimeError("nothing more is waited for here"))
        else:
            self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """Wait for nothing more than what was begun."""
        self._closed = True
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, that long at most."""
        self._thread.join(seconds)


_threads: dict[threading.Thread, "SimpleQueue[Ticket | None]"] = {}
"""Those that wait, and what for."""


def _wait(queue: "SimpleQueue[Ticket | None]") -> None:
    while (ticket := queue.get()) is not None:
        try:
            ticket.work.wait()
        except BaseException as error:
            ticket.settle(error)
        else:
            ticket.settle(None)
        del ticket
    _threads.pop(threading.current_thread(), None)


@atexit.register
def _end_lanes() -> None:
    """A thread that comes back from a wait inside a process group while Python ends would take the process down."""
    there = dict(_threads)
    for queue in there.values():
        queue.put(None)
    deadline = time.monotonic() + _LAST_WAIT
    for thread in there:
        thread.join(max(0.0, deadline - time.monotonic()))
