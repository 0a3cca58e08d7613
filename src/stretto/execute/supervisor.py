"""The supervisor: ranks watch each other in a ring, and what stops one is known to all within seconds."""

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
from pathlib import Path

import msgspec

from stretto.execute.host_lanes import Awaited
from stretto.execute.termination import TELLING, Termination
from stretto.ir.errors import PeerError, StrettoError, named, one_line
from stretto.wire.connection import SILENCE
from stretto.wire.frames import MalformedMessage, Reader, pack_message

_COMING = 60.0  # seconds that a rank may wait for its neighbours
BEAT = 0.2  # seconds between two heartbeats
_POLL = 0.1
_LATE = 1.0  # seconds without a turn of ours, after which it was us who stood still
_GRACE = 3.0  # seconds in which the reason of something that was seen to fail is expected
_NOBODY = -1


class _Message(msgspec.Struct, omit_defaults=True):
    """What goes round the ring."""

    rank: int
    process: int = 0
    doing: str = ""
    """What the sender is doing: a heartbeat."""
    turn: int = 0
    """How many turns, which are steps and the like, it has begun."""
    label: str = ""
    """What this turn is, until it has ended."""
    busy: bool = False
    """Whether it does that itself, and does not wait for others."""
    quiet: float = 0.0
    """Seconds since it last knew of a rank that was busy."""
    failure: str = ""
    """Why the whole cannot go on; passed on by everyone."""
    about: int = _NOBODY
    """Which rank that is about."""
    bye: bool = False


_DECODER = msgspec.msgpack.Decoder(_Message)
_LARGEST = 1 << 20  # bytes of a message


class Supervisor:
    """Watches the ranks before and after this one, and is watched by them.

    From `watch` on, `check` and `wait` raise if any rank has failed, died, gone silent or stood still for too long.
    """

    def __init__(
        self, rank: int, *, timeout: float, turns: str = "step", failure: Callable[[str], StrettoError] = PeerError
    ) -> None:
        """`turns` are what ranks do together, again and again; `failure` is the error that ends it, of its words."""
        self._failure = failure
        self.rank, self._timeout, self._turns = rank, timeout, turns
        self.task: Callable[[], str] = lambda: "the start"
        """What this rank is at, within its turn."""
        self._now = 0, ""  # how many turns were begun, and what this one is; one value, which threads see whole
        self._last, self._idle = "", "setting up"
        self.mark = 0
        """A number that ranks have in common if they are in the same turn."""
        self._waiting = False
        self.waited = 0.0
        """Seconds that this rank has spent waiting."""
        self._reason: str | None = None
        self._about, self._reason_is_ours = rank, False
        self._termination: Termination | None = None
        self._process = os.getpid()
        self._peers: dict[int, socket.socket] = {}
        # A neighbour's last heartbeat that told anything new, and when.
        self._doing: dict[int, tuple[_Message, float]] = {}
        self._heard: dict[int, float] = {}
        self._left: dict[int, _Message] = {}
        self._looked = self._stirred = time.monotonic()  # when we last looked, and last knew of a rank that was busy
        self._closing, self._until, self._unused = False, float("inf"), False
        self._on_one_machine = False
        self._lock, self._sending = threading.Lock(), threading.Lock()

    def watch(self, peers: dict[int, socket.socket], *, on_one_machine: bool = False) -> None:
        """Begin, with connections to the neighbours by their ranks. On one machine it can be seen whether a process
        that says nothing is stopped, or does something that lets none of its threads run.
        """
        self._on_one_machine = on_one_machine
        self._peers, now = peers, time.monotonic()
        for peer, connection in peers.items():
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._doing[peer] = _Message(peer, doing=self._idle), now
            self._heard[peer] = now + _COMING  # it may still be waiting for its other neighbour, and say nothing yet
        self._looked = now
        self._termination = Termination()
        atexit.register(self.close)
        threading.Thread(target=self._watch, name="stretto supervisor", daemon=True).start()

    def ready(self) -> None:
        """All is set up, and turns may begin."""
        self._idle = f"before its first {self._turns}"

    @property
    def label(self) -> str:
        """What this turn is, or the last one was."""
        return self._last

    @property
    def has_failed(self) -> bool:
        """Whether it is known that the whole cannot go on."""
        return self._reason is not None

    def check(self) -> None:
        """Raise if the whole cannot go on."""
        if self._reason is not None:
            raise self._error()

    def _error(self, more: str = "") -> StrettoError:
        """What all ranks are told of. The rank that it is about, if it hears of that at all, was given up on."""
        given_up = self._about == self.rank and not self._reason_is_ours
        return self._failure(f"{'the other ranks gave up on this one: ' if given_up else ''}{self._reason}{more}")

    def wait(self, ticket: Awaited, what: Callable[[], str], *, patience: float | None = None) -> None:
        """Wait for something that was started; raise if it fails, or if what it waits for can never come.

        Where nobody is to blame it is given up after the timeout, or after as many seconds as `patience` says.
        """
        with self.explaining(what):
            self._wait(ticket, what, patience)

    def _wait(self, ticket: Awaited, what: Callable[[], str], patience: float | None) -> None:
        if ticket.done and ticket.error is None:
            return
        self._waiting, since = True, time.monotonic()
        left = (patience or self._timeout) + SILENCE
        while not ticket.wait(_POLL):
            left -= _POLL  # by turns of ours and not by the clock, which goes on while this process is stopped
            quiet = time.monotonic() - self._stirred  # while any rank is busy, what we wait for may come
            if self._reason is None and left < 0 and quiet > (patience or self._timeout):
                self._give_up(what(), time.monotonic() - since, knowing=left < -_LATE)
            if self._reason is not None and not ticket.wait(_POLL):
                mine = self._reason_is_ours and f"rank {self.rank} waited for " in self._reason
                raise self._error("" if mine else f"; rank {self.rank} was waiting for {what()}")
        self._waiting = False
        self.waited += time.monotonic() - since
        if isinstance(ticket.error, StrettoError) and self._reason is None:
            raise ticket.error  # which says itself what is wrong
        if ticket.error is not None:
            raise self.explained(ticket.error, what()) from ticket.error

    def _give_up(self, what: str, seconds: float, *, knowing: bool) -> None:
        """Say who is missing. One whose neighbours are there lets those speak first who may know more."""
        waited = f"rank {self.rank} waited for {what} for {seconds:.0f} s"
        turn, label = self._now
        for peer, (message, _) in list(self._doing.items()):
            if message.turn < turn:
                self.fail(f"rank {peer} has not begun {label}; it was last seen {message.doing}; {waited}", peer)
        if knowing:
            self.fail(waited)

    def explaining(self, what: Callable[[], str]) -> "_Explaining":
        """If a group or connection fails within, say why that is."""
        return _Explaining(self, what)

    def explained(self, error: BaseException, what: str) -> StrettoError:
        """Why something that was waited for has failed: a connection fails before its reason is known."""
        deadline = time.monotonic() + _GRACE
        while self._reason is None and time.monotonic() < deadline:
            time.sleep(0.02)
        waiting = f"; rank {self.rank} was waiting for {what}"
        if self._reason is None:
            return self._failure(f"rank {self.rank} lost a connection: {one_line(error)}{waiting}")
        return self._error(waiting)

    def fail(self, reason: str, about: int | None = None) -> None:
        """Tell everybody why the whole cannot go on, and which rank that is about; the first reason counts."""
        self._fail(reason, self.rank if about is None else about, ours=True)

    def _fail(self, reason: str, about: int, *, ours: bool) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._about, self._reason_is_ours = about, ours
            self._reason = reason
        self._tell(_Message(self.rank, failure=reason, about=about))

    def failed_by(self, error: BaseException) -> None:
        """Tell everybody of an error that this rank has run into."""
        if not (isinstance(error, StrettoError) and self._reason is not None):
            self.fail(f"rank {self.rank} failed {self._where()}: {named(error)}")

    @contextmanager
    def guarding(self, label: str = "") -> Iterator[None]:
        """A turn with a name, or more of the last one. What goes wrong in it is told to all. A request to end waits for
        `answer`, which says that the turn is over.
        """
        if label:
            self.task, self._last, self._idle = lambda: "the start", label, f"after {label}"
        self._waiting = False
        self._now = self._now[0] + bool(label), self._last
        if label:
            self.mark = int.from_bytes(hashlib.blake2b(f"{self._now}".encode(), digest_size=8).digest())
            self._beat()
        with contextlib.nullcontext() if self._termination is None else self._termination.holding():
            try:
                if label:  # what has begun is ended, if it can be: another rank may have failed in its next turn
                    self.check()
                yield
            except BaseException as error:
                self.failed_by(error)
                raise
            finally:
                self._now = self._now[0], ""

    def answer(self) -> None:
        """The turn is over: a request to end that came meanwhile is followed."""
        if self._termination is not None:
            self._termination.answer()

    def retire(self) -> None:
        """After a failure: leave the ring as soon as all others can have heard of it."""
        self._until = time.monotonic() + TELLING

    def leave(self) -> None:
        """Close it soon, from the thread that watches: nobody has any use for it, and who says so may be anywhere."""
        self._unused = True

    def close(self) -> None:
        """Leave the ring in peace."""
        atexit.unregister(self.close)
        if not self._closing and os.getpid() == self._process:  # a child that was forked has no part in it
            if self._now[1]:
                self.fail(f"rank {self.rank} was closed {self._where()}")
            self._tell(_Message(self.rank, doing=self._where(), turn=self._now[0], bye=True))
            self._closing = True  # the thread that watches closes the connections
            for connection in self._peers.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def _where(self) -> str:
        """As in "failed at 0F0 of step 3", "last seen after step 3"."""
        _, label = self._now
        return f"at {self.task()} of {label}" if label else self._idle

    def _beat(self) -> None:
        turn, label = self._now
        now, busy = time.monotonic(), bool(label) and not self._waiting
        self._stirred = now if busy else self._stirred
        self._tell(_Message(self.rank, os.getpid(), self._where(), turn, label, busy, now - self._stirred))

    def _tell(self, message: _Message) -> None:
        data = pack_message(message)
        with self._sending:
            for connection in list(self._peers.values()):
                with contextlib.suppress(OSError):
                    connection.sendall(data)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_ones:
            readers = {peer: Reader(_DECODER, _LARGEST) for peer in self._peers}
            for peer, connection in self._peers.items():
                open_ones.enter_context(connection)
                selector.register(connection, selectors.EVENT_READ, peer)
            assert self._termination is not None
            open_ones.callback(self._termination.close)
            selector.register(self._termination.bell, selectors.EVENT_READ)
            beat = 0.0
            while not self._closing and time.monotonic() < self._until:
                if self._unused:
                    self.close()
                if time.monotonic() >= beat:
                    self._beat()
                    beat = time.monotonic() + BEAT
                found = selector.select(timeout=_POLL)
                self._forgive()
                for key, _ in found:
                    if key.data is None:
                        self._termination.heard()
                        continue
                    peer, data = key.data, b""
                    with contextlib.suppress(OSError):
                        data = self._peers[peer].recv(65536)
                    if not data:
                        selector.unregister(key.fileobj)
                        self._lost(peer)
                        continue
                    try:
                        for message in readers[peer].feed(data):
                            self._hear(peer, message)
                    except MalformedMessage as error:
                        selector.unregister(key.fileobj)
                        self.fail(f"rank {peer} sent {error}", peer)
                self._judge()
                self._termination.press()
        self._closing = True
        atexit.unregister(self.close)

    def _lost(self, peer: int) -> None:
        """A connection has ended: if its rank has not said farewell, it died."""
        self._heard.pop(peer, None)
        if not self._closing and peer not in self._left:
            self._fail(f"rank {peer} died; it was last seen {self._doing[peer][0].doing}", peer, ours=True)

    def _hear(self, peer: int, message: _Message) -> None:
        now = time.monotonic()
        self._heard[peer] = now
        if message.failure:
            self._fail(message.failure, message.about, ours=False)
        elif message.bye:
            self._left[peer] = message
            self._doing[peer] = message, now
            self._heard.pop(peer, None)
        else:
            self._stirred = max(self._stirred, now - message.quiet)
            message.quiet = 0.0
            if self._doing[peer][0] != message:
                self._doing[peer] = message, now

    def _forgive(self) -> None:
        """If this process was stopped itself, what it has not heard meanwhile says nothing."""
        now = time.monotonic()
        late, self._looked = now - self._looked, now
        if late > _LATE:
            self._heard = {peer: heard + late for peer, heard in self._heard.items()}
            self._doing = {peer: (message, since + late) for peer, (message, since) in self._doing.items()}

    def _judge(self) -> None:
        now, (turn, label) = time.monotonic(), self._now
        for peer, (message, since) in list(self._doing.items()):
            silence = now - self._heard.get(peer, now)
            busy = self._on_one_machine and silence < self._timeout and not is_stopped(message.process)
            if silence > SILENCE and not busy:
                self.fail(
                    f"rank {peer} has not been heard of for {silence:.0f} s; it was last seen {message.doing}", peer
                )
            elif message.busy and now - since > self._timeout and silence < _LATE:
                self.fail(f"rank {peer} has been {message.doing} for {now - since:.0f} s", peer)
            elif label and peer in self._left and message.turn < turn:
                self.fail(
                    f"rank {peer} left {message.doing}, before {label}: it was closed, or its program has ended", peer
                )
            elif label and message.label and message.turn == turn and message.label != label:
                said = f"rank {peer} runs {message.label} while rank {self.rank} runs {label}"
                self.fail(f"{said}; all ranks must call the same", _NOBODY)


class _Explaining:
    """What `explaining` opens; a class because it is opened for every message."""

    __slots__ = ("_supervisor", "_what")

    def __init__(self, supervisor: Supervisor, what: Callable[[], str]) -> None:
        self._supervisor, self._what = supervisor, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError | RuntimeError):
            raise self._supervisor.explained(error, self._what()) from error


def is_stopped(process: int) -> bool:
    """Whether a process of this machine is stopped, or gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TtZX"
    except (OSError, IndexError):
        return True
