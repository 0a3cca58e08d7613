"""A request to end (SIGTERM) is held back while a turn lasts, so that ranks end in order and can tell why."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

TELLING = 2.0  # seconds that a program has to tell of a failure before it ends on request
_ENDING = 5.0  # seconds that a turn has to end before its program does


class Termination:
    """Of this process. Python runs handlers in the main thread only, which may be in a call that does not return; so
    signals also ring a bell, which another thread listens to.
    """

    def __init__(self) -> None:
        self._asked = 0.0  # when this process was asked to end
        self._before: Any = None  # the handler that would have been called, while requests are held back
        self.bell, self._rope = socket.socketpair()
        self._closed = False
        for end in (self.bell, self._rope):
            end.setblocking(False)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keep requests for `answer`; in the main thread, since no other can. After a failure they are answered at
        once, but leave the program time to tell of it: torchrun sends one as soon as any rank has failed.
        """
        if self._closed or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            if not self._asked:
                self._asked = time.monotonic()
            elif time.monotonic() - self._asked >= _ENDING:
                signal.signal(signal.SIGTERM, before)
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, stop)
        self._before = before = before.before if isinstance(before, _Later) else before
        others = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        if others != -1:  # somebody else needs it
            signal.set_wakeup_fd(others)
        after, failed = before, False
        try:
            yield
        except BaseException:
            after, failed = _Later(before), True
            raise
        finally:
            signal.set_wakeup_fd(others)
            self._before = None
            if self._closed:
                self._rope.close()
            signal.signal(signal.SIGTERM, after)
            if failed:
                self.answer()

    def answer(self) -> None:
        """The turn is over: let a request that was held back do what it would have done."""
        if self._asked:
            self._asked = 0.0
            os.kill(os.getpid(), signal.SIGTERM)

    # In the thread that listens.

    def heard(self) -> None:
        """The bell has rung."""
        with contextlib.suppress(OSError):
            if signal.SIGTERM in self.bell.recv(4096) and self._before is not None:
                self._asked = self._asked or time.monotonic()

    def press(self) -> None:
        """After 5 s the turn does not come back: let the request do what it would have done."""
        if self._before is not None and self._asked and time.monotonic() - self._asked > _ENDING:
            if self._before is signal.SIG_DFL:
                ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # Python can set it only in the main thread
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Nobody listens any more."""
        self._closed = True
        self.bell.close()
        if self._before is None:  # else a signal could be written to whatever file gets its number
            self._rope.close()


class _Later:
    """A handler that follows a request once the program has had time to tell of its failure."""

    def __init__(self, before: Any) -> None:
        self.before, self._until = before, time.monotonic() + TELLING

    def __call__(self, *_: Any) -> None:
        left = self._until - time.monotonic()
        if left > 0:
            again = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
            again.daemon = True
            again.start()
        else:
            signal.signal(signal.SIGTERM, self.before)
            os.kill(os.getpid(), signal.SIGTERM)
