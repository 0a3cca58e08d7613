"""Holds back a request to end (SIGTERM) during a turn, so that ranks end in order and can report why."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

REPORTING = 2.0  # seconds that a program has to report a failure before it ends on request
_ENDING = 5.0  # seconds that a turn has to end before its program does


class Termination:
    """Requests to end this process.

    Python runs signal handlers only in the main thread, which may be in a call that does not return. So each signal
    also writes to a socket, which another thread reads.
    """

    def __init__(self) -> None:
        self._requested = 0.0  # when this process was asked to end
        self._previous: Any = None  # the handler to call later, while requests are held back
        self.wakeup, self._wakeup_writer = socket.socketpair()
        self._closed = False
        for end in (self.wakeup, self._wakeup_writer):
            end.setblocking(False)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Hold requests back until `answer`, if this is the main thread; no other thread can.

        After a failure, requests are answered at once, but the program gets time to report the failure: torchrun sends
        SIGTERM as soon as any rank has failed.
        """
        if self._closed or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            if not self._requested:
                self._requested = time.monotonic()
            elif time.monotonic() - self._requested >= _ENDING:
                signal.signal(signal.SIGTERM, previous)
                os.kill(os.getpid(), signal.SIGTERM)

        previous = signal.signal(signal.SIGTERM, stop)
        self._previous = previous = previous.previous if isinstance(previous, _Delayed) else previous
        other_fd = signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        if other_fd != -1:  # other code uses the wakeup file
            signal.set_wakeup_fd(other_fd)
        after, failed = previous, False
        try:
            yield
        except BaseException:
            after, failed = _Delayed(previous), True
            raise
        finally:
            signal.set_wakeup_fd(other_fd)
            self._previous = None
            if self._closed:
                self._wakeup_writer.close()
            signal.signal(signal.SIGTERM, after)
            if failed:
                self.answer()

    def answer(self) -> None:
        """Deliver a request that was held back: the turn is over."""
        if self._requested:
            self._requested = 0.0
            os.kill(os.getpid(), signal.SIGTERM)

    # Called in the thread that reads the socket.

    def read_wakeup(self) -> None:
        """Read the signals that arrived."""
        with contextlib.suppress(OSError):
            if signal.SIGTERM in self.wakeup.recv(4096) and self._previous is not None:
                self._requested = self._requested or time.monotonic()

    def enforce(self) -> None:
        """Deliver a request that was held back for 5 s: the turn does not end."""
        if self._previous is not None and self._requested and time.monotonic() - self._requested > _ENDING:
            if self._previous is signal.SIG_DFL:
                ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # Python can set it only in the main thread
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Close the socket; its reader has ended."""
        self._closed = True
        self.wakeup.close()
        if self._previous is None:  # otherwise a signal could be written to another file with the same number
            self._wakeup_writer.close()


class _Delayed:
    """A signal handler that ends the program once it has had time to report its failure."""

    def __init__(self, previous: Any) -> None:
        self.previous, self._until = previous, time.monotonic() + REPORTING

    def __call__(self, *_: Any) -> None:
        left = self._until - time.monotonic()
        if left > 0:
            again = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
            again.daemon = True
            again.start()
        else:
            signal.signal(signal.SIGTERM, self.previous)
            os.kill(os.getpid(), signal.SIGTERM)
