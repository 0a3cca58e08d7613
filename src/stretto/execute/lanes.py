"""Lanes on the host: threads that wait for what was started, so that the main thread can always be woken."""

import threading
import time
from queue import SimpleQueue
from typing import Any, Protocol


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
    """Waits for works one after the other, in the order in which they were started."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"stretto {name}", daemon=True)
        self._thread.start()

    def follow(self, work: Work, held: object = None) -> Ticket:
        """A ticket for this work, which keeps `held` alive until it has ended."""
        ticket = Ticket(work, held)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        self._queue.put(None)

    def _wait(self) -> None:
        while (ticket := self._queue.get()) is not None:
            try:
                ticket.work.wait()
            except BaseException as error:
                ticket.settle(error)
            else:
                ticket.settle(None)
            del ticket
