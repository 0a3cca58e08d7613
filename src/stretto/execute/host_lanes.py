"""Lanes on the host: threads that run tasks, or wait for what was started, so that the main thread can be woken."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

_POLL = 0.1
_LAST_WAIT = 2.0  # seconds that a process gives its lanes in the end
_HANDED_ON = object()


class Work(Protocol):
    """Something that was started, as what a process group returns."""

    def wait(self) -> Any: ...


class Awaited(Protocol):
    """Something that was started, and that a supervisor can wait for."""

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def wait(self, seconds: float) -> bool: ...


class Ticket:
    """Something that was started. `done` once its lane has seen it end, with `error` if it failed."""

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
        self.work = self.held = None  # what they kept alive may go
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
        self._name = name
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_wait, args=(self._queue,), name=f"stretto {name}", daemon=True)
        self._ends: HostLane | None = None
        self._last: Ticket | None = None
        _threads[self._thread] = self._queue
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def follow(self, work: Work, held: object = None) -> Ticket:
        """A ticket for this work, which keeps `held` alive until it has ended."""
        return self._put(Ticket(work, held))

    def run(self, act: "Callable[[], Work | None]", needs: Sequence[Ticket], check: Callable[[], None]) -> Ticket:
        """A ticket for what this lane's thread is to do, once all that it needs has ended. `check` raises if there is
        no more reason to wait for a need. If it only starts something, another thread waits for the end of that.
        """
        ticket = Ticket(None)
        ticket.work = _Act(self, ticket, act, needs, check)
        return self._put(ticket)

    def _put(self, ticket: Ticket) -> Ticket:
        if self._closed:
            ticket.settle(RuntimeError("nothing more is waited for here"))
        else:
            self._queue.put(ticket)
        return ticket

    def hand_on(self, ticket: Ticket, work: Work) -> None:
        """Let another thread wait for what was started."""
        self._ends = self._ends or HostLane(f"{self._name} ends")
        before, self._last = self._last, ticket
        ticket.work = _Started(work, ticket, before)
        self._ends._put(ticket)

    def close(self) -> None:
        """Wait for nothing more than what was begun."""
        self._closed = True
        self._queue.put(None)
        if self._ends is not None:
            self._ends.close()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, that long at most."""
        self._thread.join(seconds)


class _Act:
    """A task of a lane's own thread."""

    def __init__(
        self,
        lane: HostLane,
        ticket: Ticket,
        act: Callable[[], Work | None],
        needs: Sequence[Ticket],
        check: Callable[[], None],
    ) -> None:
        self._lane, self._ticket, self._act, self._needs, self._check = lane, ticket, act, needs, check

    def wait(self) -> object:
        for need in self._needs:
            while not need.wait(_POLL):
                self._check()
            if need.error is not None:
                raise need.error
        self._ticket.begin = time.perf_counter()
        started = self._act()
        if started is None:
            return None
        self._lane.hand_on(self._ticket, started)
        return _HANDED_ON


class _Started:
    """What a lane has started, which began when it did, or when the one before it ended."""

    def __init__(self, work: Work, ticket: Ticket, before: Ticket | None) -> None:
        self._work, self._ticket, self._before = work, ticket, before

    def wait(self) -> None:
        self._work.wait()
        if self._before is not None:
            self._ticket.begin = max(self._ticket.begin, self._before.end)


_threads: dict[threading.Thread, "SimpleQueue[Ticket | None]"] = {}
"""Those that wait, and what for."""


def _wait(queue: "SimpleQueue[Ticket | None]") -> None:
    while (ticket := queue.get()) is not None:
        assert ticket.work is not None
        try:
            said = ticket.work.wait()
        except BaseException as error:
            ticket.settle(error)
        else:
            if said is not _HANDED_ON:
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
