"""The supervisor: ranks watch each other in a ring, and what stops one is known to all within seconds."""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from stretto.execute.lanes import Awaited
from stretto.ir.errors import PipelineError

BEAT = 0.2  # seconds between two heartbeats
SILENCE = 6.0  # seconds without one, after which a rank is taken to be stopped
_POLL = 0.1
_GRACE = 3.0  # seconds in which the reason of something that was seen to fail is expected
_TELLING = 2.0  # seconds that a program has to tell of a failure before it ends on request


class _Message(msgspec.Struct, omit_defaults=True):
    """One line of the ring's wire."""

    rank: int
    task: str = ""
    """What the sender is doing: a heartbeat."""
    busy: bool = False
    """Whether it does that itself, and does not wait for others."""
    failure: str = ""
    """Why the whole cannot go on; passed on by everyone."""
    bye: bool = False


class Supervisor:
    """Watches the ranks before and after this one, and is watched by them.

    From `watch` on, `check` and `wait` raise if any rank has failed, died, gone silent or stood still for too long.
    """

    def __init__(self, rank: int, *, timeout: float) -> None:
        self.rank, self._timeout = rank, timeout
        self.task: Callable[[], str] = lambda: "nothing yet"
        """What this rank is at."""
        self._stepping = self._waiting = False
        self.waited = 0.0
        """Seconds that this rank has spent waiting."""
        self._reason: str | None = None
        self._asked = 0.0  # when this rank was asked to end
        self._peers: dict[int, socket.socket] = {}
        # A neighbour's last heartbeat that told anything new, and when.
        self._doing: dict[int, tuple[_Message, float]] = {}
        self._heard: dict[int, float] = {}
        self._closing = False
        self._lock = threading.Lock()

    def watch(self, peers: dict[int, socket.socket]) -> None:
        """Begin, with connections to the neighbours by their ranks."""
        self._peers, now = peers, time.monotonic()
        for peer, connection in peers.items():
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._heard[peer], self._doing[peer] = now, (_Message(peer, task="nothing yet"), now)
        threading.Thread(target=self._watch, name="stretto supervisor", daemon=True).start()

    def check(self) -> None:
        """Raise if the whole cannot go on."""
        while self._asked and self._reason is None:
            self._give_up_if_asked()
            time.sleep(0.02)
        if self._reason is not None:
            raise PipelineError(self._reason)

    def _give_up_if_asked(self) -> None:
        """A launcher asks all to end when one has died; why is about to be known, and says more than that."""
        if self._reason is None and self._asked and time.monotonic() - self._asked > _GRACE:
            self.fail(f"rank {self.rank} was asked to end")

    def wait(self, ticket: Awaited, what: Callable[[], str], *, patience: float | None = None) -> None:
        """Wait for something that was started; raise if it fails, or if what it waits for can never come.

        Where nobody is to blame it is given up after the timeout, or after as many seconds as `patience` says.
        """
        try:
            self._wait(ticket, what, patience)
        except (OSError, RuntimeError) as error:  # of a group or connection that has failed
            raise self.explained(error, what()) from error

    def _wait(self, ticket: Awaited, what: Callable[[], str], patience: float | None) -> None:
        if ticket.done and ticket.error is None:
            return
        self._waiting, since = True, time.monotonic()
        while not ticket.wait(_POLL):
            if self._reason is None and time.monotonic() - since > (patience or self._timeout) + SILENCE:
                self.fail(f"rank {self.rank} waited for {what()} for {time.monotonic() - since:.0f} s")
            self._give_up_if_asked()
            if self._reason is not None:
                raise PipelineError(f"{self._reason}; rank {self.rank} was waiting for {what()}")
        self._waiting = False
        self.waited += time.monotonic() - since
        if isinstance(ticket.error, PipelineError) and self._reason is None:
            raise ticket.error  # which says itself what is wrong
        if ticket.error is not None:
            raise self.explained(ticket.error, what()) from ticket.error

    def explained(self, error: BaseException, what: str) -> PipelineError:
        """Why something that was waited for has failed: a connection fails before its reason is known."""
        deadline = time.monotonic() + _GRACE
        while self._reason is None and time.monotonic() < deadline:
            time.sleep(0.02)
        reason = self._reason or f"rank {self.rank} lost a connection: {_one_line(error)}"
        return PipelineError(f"{reason}; rank {self.rank} was waiting for {what}")

    def fail(self, reason: str) -> None:
        """Tell everybody why the whole cannot go on; the first reason counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._tell(_Message(self.rank, failure=reason))

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """A step: what goes wrong in it is told to all, and a request to end is one thing that can."""

        def stop(*_: Any) -> None:
            self._asked = self._asked or time.monotonic()

        before, failed = None, False
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, stop)
        self._stepping, self._waiting = True, False
        try:
            self.check()
            yield
        except BaseException as error:
            failed = True
            told = isinstance(error, PipelineError) and self._reason is not None
            if not told:
                self.fail(f"rank {self.rank} stopped at {self.task()}: {type(error).__name__}: {_one_line(error)}")
            raise
        finally:
            self._stepping = False
            if before is not None:
                signal.signal(signal.SIGTERM, _later(before) if failed else before)
                if self._asked and not failed:  # the step has ended all the same; what follows is as it would be
                    self._asked = 0.0
                    os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Leave the ring in peace."""
        if not self._closing:
            self._closing = True
            self._tell(_Message(self.rank, bye=True))
            for connection in self._peers.values():
                with contextlib.suppress(OSError):
                    connection.close()

    def _tell(self, message: _Message) -> None:
        line = msgspec.json.encode(message) + b"\n"
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        left = dict.fromkeys(self._peers, b"")
        try:
            for peer, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, peer)
        except (OSError, ValueError):  # closed before it has begun
            return
        beat = 0.0
        while not self._closing:
            if time.monotonic() >= beat:
                self._tell(_Message(self.rank, task=self.task(), busy=self._stepping and not self._waiting))
                beat = time.monotonic() + BEAT
            try:
                ready = selector.select(timeout=_POLL)
            except (OSError, ValueError):
                return
            for key, _ in ready:
                peer = key.data
                data = b""
                with contextlib.suppress(OSError):
                    data = self._peers[peer].recv(65536)
                if not data:
                    selector.unregister(key.fileobj)
                    self._heard.pop(peer, None)
                    if not self._closing and peer in self._doing:
                        self.fail(f"rank {peer} died; it was last heard of at {self._doing[peer][0].task}")
                    continue
                *lines, left[peer] = (left[peer] + data).split(b"\n")
                for line in lines:
                    self._hear(peer, msgspec.json.decode(line, type=_Message))
            self._judge()

    def _hear(self, peer: int, message: _Message) -> None:
        now = time.monotonic()
        self._heard[peer] = now
        if message.failure:
            self.fail(message.failure)
        elif message.bye:
            self._doing.pop(peer, None)
            self._heard.pop(peer, None)
        elif peer not in self._doing or self._doing[peer][0] != message:
            self._doing[peer] = message, now

    def _judge(self) -> None:
        now = time.monotonic()
        for peer, heard in list(self._heard.items()):
            message, since = self._doing[peer]
            if now - heard > SILENCE:
                self.fail(f"rank {peer} has not been heard of for {now - heard:.0f} s; it was at {message.task}")
            elif message.busy and now - since > self._timeout:
                self.fail(f"rank {peer} has been at {message.task} for {now - since:.0f} s")


def _later(before: Any) -> Callable[..., None]:
    """A request to end that follows a failure, as torchrun's does at once, leaves the program time to tell of it."""
    asked: float | None = None

    def stop(*_: Any) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            again = threading.Timer(_TELLING, os.kill, (os.getpid(), signal.SIGTERM))
            again.daemon = True
            again.start()
        elif time.monotonic() - asked >= _TELLING:
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:
        text = f"(an error that cannot say what it is: {type(broken).__name__})"
    return " ".join(text.encode(errors="replace").decode().split())[:300]
