"""The supervisor: ranks watch each other in a ring, and within seconds all know why one has stopped."""

import atexit
import contextlib
import hashlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stretto.execute.host_lanes import Awaited
from stretto.execute.neighbours import LATE, Neighbours
from stretto.execute.ring_messages import DECODER, LARGEST, RingMessage
from stretto.execute.termination import REPORTING, Termination
from stretto.ir.errors import PeerError, StrettoError, named, one_line
from stretto.wire import timing
from stretto.wire.frames import MalformedMessage, Reader, pack_message

BEAT = 0.2  # seconds between two heartbeats
_POLL = 0.1
_GRACE = 3.0  # seconds to wait for the reason of a failed connection


class Supervisor:
    """Watches the ranks before and after this one, and is watched by them.

    From `watch` on, `check` and `wait` raise if any rank has failed, died, gone silent or stalled for too long.
    """

    def __init__(
        self, rank: int, *, timeout: float, turns: str = "step", failure: Callable[[str], StrettoError] = PeerError
    ) -> None:
        """`turns` names what the ranks do together again and again; `failure` makes the final error from its text."""
        self._failure = failure
        self.rank, self._timeout, self._turns = rank, timeout, turns
        self.task: Callable[[], str] = lambda: "the start"
        """Returns the task of this rank within its turn."""
        self._turn = 0, ""  # the count of turns, and the label of the current one; a tuple, so that threads see both
        self._last_label, self._idle = "", "setting up"
        self.mark = 0
        """A number that all ranks in the same turn have in common."""
        self._waiting = False
        self.waited = 0.0
        """Seconds that this rank has spent waiting."""
        self._reason: str | None = None
        self._about, self._is_own_reason = rank, False
        self._termination: Termination | None = None
        self._process = os.getpid()
        self._peers: dict[int, socket.socket] = {}
        self._neighbours = Neighbours(rank, timeout=timeout)
        self._last_busy = time.monotonic()  # when this rank last knew of a busy rank
        self._closing, self._until, self._is_unused = False, float("inf"), False
        self._lock, self._sending = threading.Lock(), threading.Lock()

    def watch(self, peers: dict[int, socket.socket], *, on_one_machine: bool = False) -> None:
        """Begin to watch, with connections to the neighbours by rank.

        On one machine, a silent process is blamed early only if it is stopped, not if it just lets no thread run.
        """
        self._peers = peers
        for connection in peers.values():
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._neighbours.begin(peers, self._idle, on_one_machine=on_one_machine)
        self._termination = Termination()
        atexit.register(self.close)
        threading.Thread(target=self._watch, name="stretto supervisor", daemon=True).start()

    def ready(self) -> None:
        """Record that the set-up is complete, and turns may begin."""
        self._idle = f"before its first {self._turns}"

    @property
    def label(self) -> str:
        """The label of the current turn, or of the last one."""
        return self._last_label

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the ranks cannot go on."""
        return self._reason is not None

    def check(self) -> None:
        """Raise if the ranks cannot go on."""
        if self._reason is not None:
            raise self._error()

    def _error(self, more: str = "") -> StrettoError:
        """Return the error that all ranks raise. The rank it is about learns that the others gave up on it."""
        given_up = self._about == self.rank and not self._is_own_reason
        return self._failure(f"{'the other ranks gave up on this one: ' if given_up else ''}{self._reason}{more}")

    def wait(self, future: Awaited, what: Callable[[], str], *, patience: float | None = None) -> None:
        """Wait for started work; raise if it fails, or if it can never end because the ranks cannot go on.

        If no rank is to blame, give up after the timeout, or after `patience` seconds.
        """
        with self.explaining(what):
            self._wait(future, what, patience)

    def _wait(self, future: Awaited, what: Callable[[], str], patience: float | None) -> None:
        if future.done and future.error is None:
            return
        self._waiting, since = True, time.monotonic()
        left = (patience or self._timeout) + timing.SILENCE
        while not future.wait(_POLL):
            left -= _POLL  # count polls, since the clock goes on while this process is stopped
            quiet = time.monotonic() - self._last_busy  # while any rank is busy, the work may still end
            if self._reason is None and left < 0 and quiet > (patience or self._timeout):
                self._give_up(what(), time.monotonic() - since, blame_self=left < -LATE)
            if self._reason is not None and not future.wait(_POLL):
                names_wait = self._is_own_reason and f"rank {self.rank} waited for " in self._reason
                raise self._error("" if names_wait else f"; rank {self.rank} was waiting for {what()}")
        self._waiting = False
        self.waited += time.monotonic() - since
        if isinstance(future.error, StrettoError) and self._reason is None:
            raise future.error  # its text explains the failure
        if future.error is not None:
            raise self.explained(future.error, what()) from future.error

    def _give_up(self, what: str, seconds: float, *, blame_self: bool) -> None:
        """Fail, and name the neighbour that has not begun this turn.

        If both have begun it, fail only with `blame_self`: until then, ranks that may know more can report first.
        """
        waited = f"rank {self.rank} waited for {what} for {seconds:.0f} s"
        turn, label = self._turn
        for peer, message in self._neighbours.beats():
            if message.turn < turn:
                self.fail(f"rank {peer} has not begun {label}; it was last seen {message.doing}; {waited}", peer)
        if blame_self:
            self.fail(waited)

    def explaining(self, what: Callable[[], str]) -> "_Explaining":
        """Return a context that explains why a group or connection failed within it."""
        return _Explaining(self, what)

    def explained(self, error: BaseException, what: str) -> StrettoError:
        """Return an error that says why awaited work failed; a connection may fail before the reason is known."""
        deadline = time.monotonic() + _GRACE
        while self._reason is None and time.monotonic() < deadline:
            time.sleep(0.02)
        waiting = f"; rank {self.rank} was waiting for {what}"
        if self._reason is None:
            return self._failure(f"rank {self.rank} lost a connection: {one_line(error)}{waiting}")
        return self._error(waiting)

    def fail(self, reason: str, about: int | None = None) -> None:
        """Tell all ranks why they cannot go on, and which rank that is about; the first reason counts."""
        self._fail(reason, self.rank if about is None else about, is_own=True)

    def _fail(self, reason: str, about: int, *, is_own: bool) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._about, self._is_own_reason = about, is_own
            self._reason = reason
        self._send(RingMessage(self.rank, failure=reason, about=about))

    def failed_by(self, error: BaseException) -> None:
        """Tell all ranks of an error on this rank."""
        if not (isinstance(error, StrettoError) and self._reason is not None):
            self.fail(f"rank {self.rank} failed {self._where()}: {named(error)}")

    @contextmanager
    def guarding(self, label: str = "") -> Iterator[None]:
        """Run a turn with this label, or more of the last one; tell all ranks of an error in it.

        A request to end this process waits for `answer`, which says that the turn is over.
        """
        if label:
            self.task, self._last_label, self._idle = lambda: "the start", label, f"after {label}"
        self._waiting = False
        self._turn = self._turn[0] + bool(label), self._last_label
        if label:
            self.mark = int.from_bytes(hashlib.blake2b(f"{self._turn}".encode(), digest_size=8).digest())
            self._beat()
        with contextlib.nullcontext() if self._termination is None else self._termination.holding():
            try:
                if label:  # not for more of a turn, which may still end: another rank may have failed in its next turn
                    self.check()
                yield
            except BaseException as error:
                self.failed_by(error)
                raise
            finally:
                self._turn = self._turn[0], ""

    def answer(self) -> None:
        """Follow a request to end that came during the turn: the turn is over."""
        if self._termination is not None:
            self._termination.answer()

    def retire(self) -> None:
        """Leave the ring after a failure, once all other ranks can have received the reason."""
        self._until = time.monotonic() + REPORTING

    def leave(self) -> None:
        """Close soon, from the watching thread: the supervisor is unused. Any thread may call this."""
        self._is_unused = True

    def close(self) -> None:
        """Leave the ring with a farewell."""
        atexit.unregister(self.close)
        if not self._closing and os.getpid() == self._process:  # a forked child is not in the ring
            if self._turn[1]:
                self.fail(f"rank {self.rank} was closed {self._where()}")
            self._send(RingMessage(self.rank, doing=self._where(), turn=self._turn[0], bye=True))
            self._closing = True  # the watching thread closes the connections
            for connection in self._peers.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def _where(self) -> str:
        """Return a phrase as in "failed at 0F0 of step 3", "last seen after step 3"."""
        _, label = self._turn
        return f"at {self.task()} of {label}" if label else self._idle

    def _beat(self) -> None:
        """Send a heartbeat."""
        turn, label = self._turn
        now, busy = time.monotonic(), bool(label) and not self._waiting
        self._last_busy = now if busy else self._last_busy
        self._send(RingMessage(self.rank, os.getpid(), self._where(), turn, label, busy, now - self._last_busy))

    def _send(self, message: RingMessage) -> None:
        """Send a message to both neighbours."""
        data = pack_message(message)
        with self._sending:
            for connection in list(self._peers.values()):
                with contextlib.suppress(OSError):
                    connection.sendall(data)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            readers = {peer: Reader(DECODER, LARGEST) for peer in self._peers}
            for peer, connection in self._peers.items():
                stack.enter_context(connection)
                selector.register(connection, selectors.EVENT_READ, peer)
            assert self._termination is not None
            stack.callback(self._termination.close)
            selector.register(self._termination.wakeup, selectors.EVENT_READ)
            next_beat = 0.0
            while not self._closing and time.monotonic() < self._until:
                if self._is_unused:
                    self.close()
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + BEAT
                ready = selector.select(timeout=_POLL)
                self._neighbours.forgive()
                for key, _ in ready:
                    if key.data is None:
                        self._termination.read_wakeup()
                        continue
                    peer, data = key.data, b""
                    with contextlib.suppress(OSError):
                        data = self._peers[peer].recv(65536)
                    if not data:
                        selector.unregister(key.fileobj)
                        self._lose(peer)
                        continue
                    try:
                        for message in readers[peer].feed(data):
                            self._receive(peer, message)
                    except MalformedMessage as error:
                        selector.unregister(key.fileobj)
                        self.fail(f"rank {peer} sent {error}", peer)
                for reason, about in self._neighbours.failures(*self._turn, most_silence=timing.SILENCE):
                    self.fail(reason, about)
                self._termination.enforce()
        self._closing = True
        atexit.unregister(self.close)

    def _lose(self, peer: int) -> None:
        """Handle a connection that has ended: unless its rank said farewell, it died."""
        doing = self._neighbours.lose(peer)
        if not self._closing and doing is not None:
            self._fail(f"rank {peer} died; it was last seen {doing}", peer, is_own=True)

    def _receive(self, peer: int, message: RingMessage) -> None:
        self._neighbours.hear(peer)
        if message.failure:
            self._fail(message.failure, message.about, is_own=False)
            return
        if not message.bye:
            self._last_busy = max(self._last_busy, time.monotonic() - message.quiet)
        self._neighbours.update(peer, message)


class _Explaining:
    """The context of `explaining`; a class, because it is entered for every message and must be fast."""

    __slots__ = ("_supervisor", "_what")

    def __init__(self, supervisor: Supervisor, what: Callable[[], str]) -> None:
        self._supervisor, self._what = supervisor, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError | RuntimeError):
            raise self._supervisor.explained(error, self._what()) from error
