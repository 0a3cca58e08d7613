"""A conversation's wire: messages over a stream socket, with a deadline on every wait."""

import array
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time

import msgspec

from stretto.ir.errors import WeightsError
from stretto.weights.messages import DECODER, Beat, Hello, Message, Proof

PROTOCOL = 3
BEAT = 0.5  # seconds between two signs of life
SILENCE = 6.0  # seconds without one are allowed at least
GREETING = 5.0  # seconds for a greeting
_SMALL, _LARGE = 4096, 1 << 29  # bytes of a message before and after it
_HEADER = struct.Struct("!Q")
_STEP = 3600.0  # seconds; the kernel counts no more than 24 days
_FILES = 8


class Gone(WeightsError):  # noqa: N818 (a state of the other side)
    """The other side has closed the connection, is silent, or talks nonsense."""


class Late(Gone):
    """The other side is there, but does not answer."""


class Odd(Gone):
    """The other side says what nobody of ours would say."""


class Connection:
    """One side of a conversation. Any thread may tell; one at a time may hear."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(True)
        self._stream = stream
        self._telling = threading.Lock()
        self.local = stream.family == socket.AF_UNIX
        self.limit = _SMALL
        self.silence = SILENCE
        """Seconds without a sign of life, after which the other side is taken to be stopped."""
        self._heard = time.monotonic()

    def tell(self, message: Message, files: tuple[int, ...] = (), *, seconds: float = SILENCE) -> None:
        body = msgspec.msgpack.encode(message)
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        data = memoryview(_HEADER.pack(len(body)) + body)
        deadline = time.monotonic() + seconds
        with self._telling:
            while data:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Gone(f"did not take a message for {seconds:g} s")
                try:
                    self._stream.settimeout(left)
                    data = data[self._stream.sendmsg([data], attached) :]
                    attached = []
                except TimeoutError:  # perhaps another thread's, which hears: they share one
                    continue
                except OSError as error:
                    raise Gone(f"is gone ({error.strerror or error})") from None

    def beat(self) -> None:
        """A sign of life, unless the other side is too busy to take one."""
        poll = select.poll()  # select knows no file above 1024
        try:
            poll.register(self._stream, select.POLLOUT)
            writable = any(event & select.POLLOUT for _, event in poll.poll(0))
        except (OSError, ValueError) as error:
            raise Gone(f"is gone ({error})") from None
        if writable:
            self.tell(Beat())

    def hear(self, *, seconds: float) -> tuple[Message, list[int]]:
        """The next message that is no mere sign of life, and its files."""
        deadline = time.monotonic() + seconds
        self._heard = time.monotonic()
        while True:
            message, files = self._one(deadline)
            if not isinstance(message, Beat):
                return message, files
            close_files(files)

    def _one(self, deadline: float) -> tuple[Message, list[int]]:
        files: list[int] = []
        try:
            size = _HEADER.unpack(self._bytes(_HEADER.size, deadline, files))[0]
            if size > self.limit:
                raise Odd(f"sent a message of {size} bytes, more than the {self.limit} allowed")
            message = DECODER.decode(self._bytes(size, deadline, files))
            self._heard = time.monotonic()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            close_files(files)
            raise Odd(f"talks nonsense: {error}") from None
        except BaseException:
            close_files(files)
            raise
        return message, files

    def _bytes(self, count: int, deadline: float, files: list[int]) -> bytearray:
        data = bytearray()
        while len(data) < count:
            now = time.monotonic()
            until = min(deadline, self._heard + self.silence)
            if now >= until:
                if until == deadline:
                    raise Late("is slow: it did not answer in time")
                raise Late(f"has been silent for {self.silence:g} s")
            try:
                self._stream.settimeout(min(until - now, _STEP))
                part, attached, flags, _ = self._stream.recvmsg(
                    min(count - len(data), 1 << 20), socket.CMSG_SPACE(_FILES * 4)
                )
            except TimeoutError:
                continue
            except OSError as error:
                raise Gone(f"is gone ({error.strerror or error})") from None
            for _, _, what in attached:
                files += array.array("i", what[: len(what) // 4 * 4])
            if not part:
                raise Gone("has closed the connection")
            if flags & socket.MSG_CTRUNC:
                raise Odd("sent files that could not be opened: too many were sent, or too many are open")
            data += part
        return data

    def greet(self, secret: bytes | None, *, serves: bool) -> None:
        """Say which protocol one speaks and, over TCP, prove that one knows the secret, without telling it."""
        mine = secrets.token_bytes(32)
        self.tell(Hello(PROTOCOL, mine), seconds=GREETING)
        hello, files = self.hear(seconds=GREETING)
        close_files(files)
        if not isinstance(hello, Hello) or len(hello.nonce) != len(mine):
            raise Odd("did not say hello")
        if hello.protocol != PROTOCOL:
            raise Odd(f"speaks protocol {hello.protocol}, and this side {PROTOCOL}")
        if not self.local:
            if not secret:
                raise WeightsError("tcp needs a secret, which both sides read from a file")
            self._prove(secret, mine, hello.nonce, serves=serves)
        self.limit = _LARGE

    def _prove(self, secret: bytes, mine: bytes, other: bytes, *, serves: bool) -> None:
        def digest(server: bool) -> bytes:
            nonces = (mine, other) if server == serves else (other, mine)
            return hmac.digest(secret, (b"server" if server else b"client") + b"".join(nonces), hashlib.sha256)

        if not serves:  # who asks proves first, so that nobody gets a proof for nothing
            self.tell(Proof(digest(False)), seconds=GREETING)
        try:
            proof, files = self.hear(seconds=GREETING)
        except Gone:
            if serves:
                raise
            raise Gone("did not accept the secret") from None
        close_files(files)
        if not isinstance(proof, Proof) or not hmac.compare_digest(proof.digest, digest(not serves)):
            raise Odd("does not know the secret")
        if serves:
            self.tell(Proof(digest(True)), seconds=GREETING)

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
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def loudness(error: Exception) -> int:
    """Whoever does not keep to the protocol is worth a warning; whoever leaves is not."""
    return logging.INFO if isinstance(error, Gone) and not isinstance(error, Odd) else logging.WARNING
