"""Receivers as a sender sees them: the Endpoint protocol, and Remote, a Stretto receiver behind a socket."""

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
from stretto.wire import timing
from stretto.wire.frames import close_files

T = TypeVar("T", bound=Message)
_ABANDONING = 1.0  # seconds for a receiver to accept the message that the push failed


@dataclass(frozen=True, slots=True)
class Offer:
    """The version to push, and the buffers that it comes through."""

    manifest: Manifest
    buckets: list[Bucket]
    bucket_bytes: int
    split: bool
    shared: SharedBuffers
    content: str
    silence: float = field(default_factory=lambda: timing.SILENCE)
    """Seconds without a heartbeat after which sender and receiver each take the other to be stopped."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A receiver's answer to an offer that it accepts."""

    skips: set[int]
    """Buckets that it needs nothing from."""
    alike: list[list[int]] = field(default_factory=list)
    """Groups of tensors, by their places in the manifest, that are one tensor there and so must be equal."""


class Endpoint(Protocol):
    """A receiver. Every call returns within `seconds`, or raises a WeightsError that names the receiver."""

    name: str
    device: str
    """The GPU's UUID, or "cpu": where the buffers must be."""

    def open(self, offer: Offer, *, seconds: float) -> Wanted:
        """Offer a version. The receiver changes nothing yet."""

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        """Stop serving, and change nothing else. The sender makes each following call within `patience` seconds."""

    def begin(self, *, seconds: float) -> None:
        """Prepare to load; from now on the receiver's weights may change."""

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:
        """Load a bucket from buffer `slot`; `total` is its checksum. After this call the buffer may be overwritten."""

    def end(self, *, seconds: float) -> None:
        """Finish loading: all buckets were loaded."""

    def commit(self, *, seconds: float) -> Assurance:
        """Serve the new version; return what is known about its weights."""

    def abandon(self, why: str) -> None:
        """Give up the update, because the push failed for the reason `why`."""

    def close(self) -> None: ...


MEMBERS = ("name", "device", "open", "pause", "begin", "load", "end", "commit", "abandon", "close")
"""The members that every endpoint needs."""


@contextlib.contextmanager
def naming(endpoint: Endpoint) -> Iterator[None]:
    """Turn unexpected errors of an endpoint into WeightsErrors that name it."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(f"{endpoint.name}: {named(error)}") from error


class Remote:
    """A Stretto receiver behind a socket. The connection stays open from push to push."""

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        self.name, self._secret = address, secret
        self._connection: Connection = connect(address, secret)
        try:
            self.initial_status = self.status()
        except WeightsError:
            self.close()
            raise
        self.device = self.initial_status.device
        self._known_manifest: str = ""  # digest of the manifest that the receiver knows
        self._connection.keep_beating()

    def status(self, *, seconds: float = 5.0) -> Status:
        return self._request(StatusRequest(), Status, seconds)

    def alive(self) -> bool:
        """Return whether the connection still works; raise PeerTimeout if the receiver does not answer."""
        try:
            self.status()
        except PeerTimeout:
            self.close()  # a late answer would be taken as the answer to the next request
            raise
        except WeightsError:
            return False
        return True

    def open(self, offer: Offer, *, seconds: float) -> Wanted:
        try:
            return self._open(offer, seconds)
        except PeerTimeout:
            raise
        except PeerClosed:  # the receiver closed this connection when another sender connected between pushes
            previous, self._connection = self._connection, connect(self.name, self._secret)
            previous.close()
            self._connection.keep_beating()
            return self._open(offer, seconds)

    def _open(self, offer: Offer, seconds: float) -> Wanted:
        buffers, files = offer.shared.described(local=self._connection.local)
        digest = offer.manifest.digest
        message = Open(
            offer.manifest.version, digest, offer.content, offer.bucket_bytes, offer.split, buffers, offer.silence
        )
        self._connection.silence = offer.silence
        if self._known_manifest != digest:
            message.manifest = offer.manifest
        try:
            answer = self._exchange(message, seconds, files)
        except PeerClosed as error:
            raise PeerClosed(f"{error} (has it called serve() or start()?)") from None
        if isinstance(answer, Unknown):
            message.manifest = offer.manifest
            answer = self._exchange(message, seconds, files)
        if not isinstance(answer, Ready):
            raise WeightsError(f"{self.name} did not answer as expected: {type(answer).__name__}")
        self._known_manifest = digest
        return Wanted(set(answer.skips), answer.alike)

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        self._request(Pause(in_flight, patience), Paused, seconds)

    def begin(self, *, seconds: float) -> None:
        self._request(Begin(), Begun, seconds)

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:
        self._request(Filled(bucket, slot, total), Taken, seconds)

    def end(self, *, seconds: float) -> None:
        self._request(End(), Loaded, seconds)

    def commit(self, *, seconds: float) -> Assurance:
        return self._request(Commit(), Serving, seconds).assurance

    def abandon(self, why: str) -> None:
        try:
            self._naming_errors(lambda: self._connection.send(Abandon(why[:1000]), seconds=_ABANDONING))
        except PeerClosed:
            self.close()  # the receiver notices at its next read
            raise

    def close(self) -> None:
        self._connection.close()

    def _request(self, message: Message, kind: type[T], seconds: float) -> T:
        """Send a message; return the answer, which must be of this type."""
        answer = self._exchange(message, seconds)
        if not isinstance(answer, kind):
            raise WeightsError(f"{self.name} did not answer as expected: {type(answer).__name__}")
        return answer

    def _exchange(self, message: Message, seconds: float, files: tuple[int, ...] = ()) -> Message:
        """Send a message; return the answer, or raise WeightsError if it is `Failed`."""

        def send_and_recv() -> Message:
            self._connection.send(message, files)
            answer, attached = self._connection.recv(seconds=seconds)
            close_files(attached)
            return answer

        answer = self._naming_errors(send_and_recv)
        if isinstance(answer, Failed):
            raise WeightsError(f"{self.name}: {answer.why}")
        return answer

    def _naming_errors(self, act: Callable[[], object]) -> Message:
        """Run `act`; put the receiver's name in front of connection errors."""
        try:
            return act()  # type: ignore[return-value]
        except PeerClosed as error:
            raise type(error)(f"{self.name} {error}") from None
