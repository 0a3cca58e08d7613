"""A receiver as a sender sees it: what every kind of receiver can be asked, and how ours are asked over a socket."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from stretto.ir.errors import WeightsError, named
from stretto.weights.connection import Connection, PeerClosed, PeerTimeout
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.layout import Bucket
from stretto.weights.listener import connect
from stretto.weights.manifest import Manifest
from stretto.weights.messages import (
    Abandon,
    Assurance,
    Begin,
    Begun,
    Commit,
    End,
    Failed,
    Filled,
    InFlight,
    Loaded,
    Message,
    Open,
    Pause,
    Paused,
    Ready,
    Serving,
    Status,
    StatusRequest,
    Taken,
    Unknown,
)
from stretto.wire.connection import SILENCE
from stretto.wire.frames import close_files

T = TypeVar("T", bound=Message)
_HEARING = 1.0  # seconds for a receiver to take the word that nothing comes of it


@dataclass(frozen=True, slots=True)
class Offer:
    """What is to be pushed, and the buffers that it comes through."""

    manifest: Manifest
    buckets: list[Bucket]
    bucket_bytes: int
    split: bool
    shared: SharedBuffers
    content: str
    silence: float = SILENCE
    """Seconds without a sign of life, after which a receiver is taken to be stopped, and takes its sender to be so."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a receiver says to an offer that it can take."""

    skips: set[int]
    """Buckets of which it needs nothing."""
    alike: list[list[int]] = field(default_factory=list)
    """Tensors, by their places in the manifest, that are one there, and so must be equal."""


class Endpoint(Protocol):
    """A receiver. Every call ends within so many seconds, or raises a WeightsError that names the receiver."""

    name: str
    device: str
    """A GPU's UUID, or "cpu": buffers must be there."""

    def open(self, offer: Offer, *, seconds: float) -> Wanted:
        """Offer a version. Nothing has happened yet."""

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        """It stops serving, and nothing else. It hears of this update again within `patience` seconds, and again."""

    def begin(self, *, seconds: float) -> None:
        """It gets ready to load; from here on it may not be what it was."""

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:
        """It loads a bucket from a buffer, whose sum is this, and has no more use for the buffer."""

    def end(self, *, seconds: float) -> None:
        """It has loaded all."""

    def commit(self, *, seconds: float) -> Assurance:
        """It serves the new version; how sure that is."""

    def abandon(self, why: str) -> None:
        """It is told that nothing comes of it."""

    def close(self) -> None: ...


MEMBERS = ("name", "device", "open", "pause", "begin", "load", "end", "commit", "abandon", "close")
"""What an endpoint has."""


@contextlib.contextmanager
def naming(endpoint: Endpoint) -> Iterator[None]:
    """Errors that an endpoint did not foresee say whose they are."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(f"{endpoint.name}: {named(error)}") from error


class Remote:
    """One of our receivers, over its socket. The connection stays open from push to push."""

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        self.name, self._secret = address, secret
        self._connection: Connection = connect(address, secret)
        try:
            self.told = self.status()
        except WeightsError:
            self.close()
            raise
        self.device = self.told.device
        self._known: str = ""
        self._connection.keep_beating()

    def status(self, *, seconds: float = 5.0) -> Status:
        return self._ask(StatusRequest(), Status, seconds)

    def alive(self) -> bool:
        """Whether the connection still stands; raises if nobody answers at the other end."""
        try:
            self.status()
        except PeerTimeout:
            self.close()  # its answer may still come, and would be taken for that to another question
            raise
        except WeightsError:
            return False
        return True

    def open(self, offer: Offer, *, seconds: float) -> Wanted:
        try:
            return self._open(offer, seconds)
        except PeerTimeout:
            raise
        except PeerClosed:  # between two pushes another sender was let in, and this connection was closed
            before, self._connection = self._connection, connect(self.name, self._secret)
            before.close()
            self._connection.keep_beating()
            return self._open(offer, seconds)

    def _open(self, offer: Offer, seconds: float) -> Wanted:
        buffers, files = offer.shared.described(local=self._connection.local)
        digest = offer.manifest.digest
        message = Open(
            offer.manifest.version, digest, offer.content, offer.bucket_bytes, offer.split, buffers, offer.silence
        )
        self._connection.silence = offer.silence
        if self._known != digest:
            message.manifest = offer.manifest
        try:
            answer = self._answer(message, seconds, files)
        except PeerClosed as error:
            raise PeerClosed(f"{error} (has it called serve() or start()?)") from None
        if isinstance(answer, Unknown):
            message.manifest = offer.manifest
            answer = self._answer(message, seconds, files)
        if not isinstance(answer, Ready):
            raise WeightsError(f"{self.name} did not answer as expected: {type(answer).__name__}")
        self._known = digest
        return Wanted(set(answer.skips), answer.alike)

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        self._ask(Pause(in_flight, patience), Paused, seconds)

    def begin(self, *, seconds: float) -> None:
        self._ask(Begin(), Begun, seconds)

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:
        self._ask(Filled(bucket, slot, total), Taken, seconds)

    def end(self, *, seconds: float) -> None:
        self._ask(End(), Loaded, seconds)

    def commit(self, *, seconds: float) -> Assurance:
        return self._ask(Commit(), Serving, seconds).assurance

    def abandon(self, why: str) -> None:
        try:
            self._named(lambda: self._connection.send(Abandon(why[:1000]), seconds=_HEARING))
        except PeerClosed:
            self.close()  # which it finds out when it next listens
            raise

    def close(self) -> None:
        self._connection.close()

    def _ask(self, message: Message, kind: type[T], seconds: float) -> T:
        answer = self._answer(message, seconds)
        if not isinstance(answer, kind):
            raise WeightsError(f"{self.name} did not answer as expected: {type(answer).__name__}")
        return answer

    def _answer(self, message: Message, seconds: float, files: tuple[int, ...] = ()) -> Message:
        def exchange() -> Message:
            self._connection.send(message, files)
            answer, attached = self._connection.recv(seconds=seconds)
            close_files(attached)
            return answer

        answer = self._named(exchange)
        if isinstance(answer, Failed):
            raise WeightsError(f"{self.name}: {answer.why}")
        return answer

    def _named(self, act: Callable[[], object]) -> Message:
        try:
            return act()  # type: ignore[return-value]
        except PeerClosed as error:
            raise type(error)(f"{self.name} {error}") from None
