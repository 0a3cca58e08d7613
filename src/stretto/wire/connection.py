"""A conversation over a stream socket: messages one after the other, signs of life, a deadline on every wait."""

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
BEAT = 0.5  # seconds between two signs of life
SILENCE = 6.0  # seconds without one are allowed at least
GREETING = 5.0  # seconds for a greeting
_SMALL, _LARGE = 4096, 1 << 29  # bytes of a message before and after it
_AT_ONCE = 1 << 20  # bytes
_STEP = 3600.0  # seconds; the kernel counts no more than 24 days


class PeerClosed(StrettoError):  # noqa: N818 (a state of the other side)
    """The other side has closed the connection, is silent, or talks nonsense."""


class PeerTimeout(PeerClosed):
    """The other side is there, but does not answer."""


class ProtocolError(PeerClosed):
    """The other side says what nobody of ours would say."""


class Beat(msgspec.Struct, tag=True):
    """A sign of life."""


class Connection(Generic[M]):
    """One side of a conversation. Any thread may tell; one at a time may hear."""

    gone: type[PeerClosed] = PeerClosed
    late: type[PeerTimeout] = PeerTimeout
    odd: type[ProtocolError] = ProtocolError

    def __init__(self, stream: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        stream.setblocking(True)
        self._stream, self._decoder = stream, decoder
        self._sending = threading.Lock()
        self._over = threading.Event()
        self.local = stream.family == socket.AF_UNIX
        self.limit = _SMALL
        self.silence = SILENCE
        """Seconds without a sign of life, after which the other side is taken to be stopped."""
        self._heard = time.monotonic()
        keep_from_children(stream)

    def send(self, message: M, files: tuple[int, ...] = (), *, seconds: float = SILENCE) -> None:
        data = memoryview(pack_message(message))
        deadline = time.monotonic() + seconds
        with self._sending:
            while data:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.gone(f"did not take a message for {seconds:g} s")
                try:
                    self._stream.settimeout(left)
                    data = data[send_bytes(self._stream, data, files) :]
                    files = ()
                except TimeoutError:  # perhaps another thread's, which hears: they share one
                    continue
                except OSError as error:
                    raise self.gone(f"is gone ({error.strerror or error})") from None

    def recv(self, *, seconds: float) -> tuple[M, list[int]]:
        """The next message that is no mere sign of life, and its files."""
        deadline = time.monotonic() + seconds
        self._heard = time.monotonic()
        while True:
            message, files = self._one(deadline)
            if not isinstance(message, Beat):
                return message, files
            close_files(files)

    def _one(self, deadline: float) -> tuple[M, list[int]]:
        files: list[int] = []
        try:
            length = length_of(self._bytes(HEADER_BYTES, deadline, files), self.limit)
            message = unpack_message(self._bytes(length, deadline, files), self._decoder)
            self._heard = time.monotonic()
        except MalformedMessage as error:
            close_files(files)
            raise self.odd(f"talks nonsense: it sent {error}") from None
        except BaseException:
            close_files(files)
            raise
        return message, files

    def _bytes(self, count: int, deadline: float, files: list[int]) -> bytearray:
        """So many, and no more: who comes after us may read the rest in another way."""
        data = bytearray()
        while len(data) < count:
            now = time.monotonic()
            until = min(deadline, self._heard + self.silence)
            if now >= until:
                if until == deadline:
                    raise self.late("is slow: it did not answer in time")
                raise self.late(f"has been silent for {self.silence:g} s")
            try:
                self._stream.settimeout(min(until - now, _STEP))
                part, attached = recv_bytes(self._stream, min(count - len(data), _AT_ONCE))
            except TimeoutError:
                continue
            except OSError as error:
                raise self.gone(f"is gone ({error.strerror or error})") from None
            files += attached
            if not part:
                raise self.gone("has closed the connection")
            data += part
        return data

    def greet(
        self, protocol: int, secret: bytes | None, *, serves: bool, name: str = "", seconds: float = GREETING
    ) -> str:
        """Say hello and, with a secret, prove that one knows it; who the other side says it is."""
        self.silence = max(SILENCE, seconds)
        greeting: Any = Greeting(protocol, secret, serves=serves, name=name)
        try:
            self.send(greeting.hello, seconds=seconds)
            other: str = greeting.meet(self._answer(seconds))
            if secret is not None:
                if not serves:
                    self.send(greeting.proof(), seconds=seconds)
                    greeting.check(self._accepted(seconds))
                else:
                    greeting.check(self._answer(seconds))
                    self.send(greeting.proof(), seconds=seconds)
        except MalformedMessage as error:
            raise self.odd(f"sent {error}") from None
        self.limit, self.silence = _LARGE, SILENCE
        return other

    def _answer(self, seconds: float) -> M:
        message, files = self.recv(seconds=seconds)
        close_files(files)
        return message

    def _accepted(self, seconds: float) -> M:
        try:
            return self._answer(seconds)
        except PeerTimeout:
            raise
        except PeerClosed:
            raise self.gone("did not accept the secret") from None

    def beat(self) -> None:
        """A sign of life, unless the other side is too busy to take one."""
        poll = select.poll()  # select knows no file above 1024
        try:
            poll.register(self._stream, select.POLLOUT)
            writable = any(event & select.POLLOUT for _, event in poll.poll(0))
        except (OSError, ValueError) as error:
            raise self.gone(f"is gone ({error})") from None
        if writable:
            beat: Any = Beat()
            self.send(beat)

    def keep_beating(self, when: Callable[[], bool] = lambda: True) -> None:
        """Give signs of life from a thread of its own, as long as there is reason to, until it is closed."""

        weakref.finalize(self, self._stream.close).atexit = False
        threading.Thread(
            target=_beats, args=(weakref.ref(self), self._over, when), name="stretto beats", daemon=True
        ).start()

    @property
    def was_left(self) -> bool:
        """Whether the other side is gone, though what it has said may not have been heard."""
        poll = select.poll()
        try:
            poll.register(self._stream, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def _beats(connection: "weakref.ref[Connection[Any]]", over: threading.Event, when: Callable[[], bool]) -> None:
    """A connection that was let go of and not closed gives no more signs of life."""
    while not over.wait(BEAT) and (there := connection()) is not None:
        if when():
            try:
                there.beat()
            except PeerClosed:
                return
        del there
