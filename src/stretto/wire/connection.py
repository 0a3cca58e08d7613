"""A message connection over a stream socket, with heartbeats and a deadline on every wait."""

import contextlib
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from stretto.ir.errors import StrettoError
from stretto.wire import timing
from stretto.wire.forks import keep_from_children
from stretto.wire.frames import (
    HEADER_BYTES,
    MalformedMessage,
    close_files,
    length_of,
    pack_message,
    recv_bytes,
    send_bytes,
    unpack_message,
)
from stretto.wire.greeting import Greeting

M = TypeVar("M")
GREETING = 5.0  # seconds for the greeting
_SMALL, _LARGE = 4096, 1 << 29  # largest message in bytes, before and after the greeting
_AT_ONCE = 1 << 20  # most bytes per receive call
_STEP = 3600.0  # longest socket timeout in seconds; the kernel allows at most 24 days


class PeerClosed(StrettoError):  # noqa: N818 (a state of the other side)
    """The peer closed the connection, stopped sending heartbeats, or sent a malformed message."""


class PeerTimeout(PeerClosed):
    """The peer is connected but does not answer."""


class ProtocolError(PeerClosed):
    """The peer sent a message that violates the protocol."""


class Beat(msgspec.Struct, tag=True):
    """A heartbeat."""


class Connection(Generic[M]):
    """One side of a connection. Any thread may send; only one thread at a time may receive."""

    closed_error: type[PeerClosed] = PeerClosed
    timeout_error: type[PeerTimeout] = PeerTimeout
    protocol_error: type[ProtocolError] = ProtocolError

    def __init__(self, stream: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        stream.setblocking(True)
        self._stream, self._decoder = stream, decoder
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self.local = stream.family == socket.AF_UNIX
        self.limit = _SMALL
        self.silence = timing.SILENCE
        """Seconds without a message or heartbeat after which the peer counts as stopped."""
        self._last_received = time.monotonic()
        keep_from_children(stream)

    def send(self, message: M, files: tuple[int, ...] = (), *, seconds: float | None = None) -> None:
        data = memoryview(pack_message(message))
        deadline = time.monotonic() + (timing.SILENCE if seconds is None else seconds)
        with self._sending:
            while data:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.closed_error(f"did not take a message for {seconds:g} s")
                try:
                    self._stream.settimeout(left)
                    data = data[send_bytes(self._stream, data, files) :]
                    files = ()
                except TimeoutError:  # may be the receiving thread's timeout: both threads share the socket's
                    continue
                except OSError as error:
                    raise self.closed_error(f"is gone ({error.strerror or error})") from None

    def recv(self, *, seconds: float) -> tuple[M, list[int]]:
        """Return the next message that is not a heartbeat, and its attached files."""
        deadline = time.monotonic() + seconds
        self._last_received = time.monotonic()
        while True:
            message, files = self._next_message(deadline)
            if not isinstance(message, Beat):
                return message, files
            close_files(files)

    def _next_message(self, deadline: float) -> tuple[M, list[int]]:
        files: list[int] = []
        try:
            length = length_of(self._read_exactly(HEADER_BYTES, deadline, files), self.limit)
            message = unpack_message(self._read_exactly(length, deadline, files), self._decoder)
            self._last_received = time.monotonic()
        except MalformedMessage as error:
            close_files(files)
            raise self.protocol_error(f"talks nonsense: it sent {error}") from None
        except BaseException:
            close_files(files)
            raise
        return message, files

    def _read_exactly(self, count: int, deadline: float, files: list[int]) -> bytearray:
        """Read exactly `count` bytes: code that later takes over the socket may read the rest differently."""
        data = bytearray()
        while len(data) < count:
            now = time.monotonic()
            until = min(deadline, self._last_received + self.silence)
            if now >= until:
                if until == deadline:
                    raise self.timeout_error("is slow: it did not answer in time")
                raise self.timeout_error(f"has been silent for {self.silence:g} s")
            try:
                self._stream.settimeout(min(until - now, _STEP))
                part, attached = recv_bytes(self._stream, min(count - len(data), _AT_ONCE))
            except TimeoutError:
                continue
            except OSError as error:
                raise self.closed_error(f"is gone ({error.strerror or error})") from None
            files += attached
            if not part:
                raise self.closed_error("has closed the connection")
            data += part
        return data

    def greet(
        self, protocol: int, secret: bytes | None, *, serves: bool, name: str = "", seconds: float = GREETING
    ) -> str:
        """Exchange hellos and, if there is a secret, prove that both sides know it. Return the peer's name."""
        self.silence = max(timing.SILENCE, seconds)
        greeting: Any = Greeting(protocol, secret, serves=serves, name=name)
        try:
            self.send(greeting.hello, seconds=seconds)
            peer_name: str = greeting.meet(self._recv_message(seconds))
            if secret is not None:
                if not serves:
                    self.send(greeting.proof(), seconds=seconds)
                    greeting.check(self._recv_proof(seconds))
                else:
                    greeting.check(self._recv_message(seconds))
                    self.send(greeting.proof(), seconds=seconds)
        except MalformedMessage as error:
            raise self.protocol_error(f"sent {error}") from None
        self.limit, self.silence = _LARGE, timing.SILENCE
        return peer_name

    def _recv_message(self, seconds: float) -> M:
        message, files = self.recv(seconds=seconds)
        close_files(files)
        return message

    def _recv_proof(self, seconds: float) -> M:
        try:
            return self._recv_message(seconds)
        except PeerTimeout:
            raise
        except PeerClosed:
            raise self.closed_error("did not accept the secret") from None

    def beat(self) -> None:
        """Send a heartbeat, unless the socket's send buffer is full."""
        poll = select.poll()  # select() cannot handle file descriptors of 1024 and above
        try:
            poll.register(self._stream, select.POLLOUT)
            writable = any(event & select.POLLOUT for _, event in poll.poll(0))
        except (OSError, ValueError) as error:
            raise self.closed_error(f"is gone ({error})") from None
        if writable:
            beat: Any = Beat()
            self.send(beat)

    def keep_beating(self, when: Callable[[], bool] = lambda: True) -> None:
        """Start a thread that sends heartbeats while `when()` is true, until the connection is closed."""
        weakref.finalize(self, self._stream.close).atexit = False
        threading.Thread(
            target=_send_heartbeats, args=(weakref.ref(self), self._closed, when), name="stretto beats", daemon=True
        ).start()

    @property
    def was_left(self) -> bool:
        """Whether the peer has disconnected; messages that it sent before may still be unread."""
        poll = select.poll()
        try:
            poll.register(self._stream, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def _send_heartbeats(
    connection: "weakref.ref[Connection[Any]]", closed: threading.Event, when: Callable[[], bool]
) -> None:
    """Send heartbeats until the connection is closed, or garbage-collected without having been closed."""
    while not closed.wait(timing.BEAT) and (live_connection := connection()) is not None:
        if when():
            try:
                live_connection.beat()
            except PeerClosed:
                return
        del live_connection
