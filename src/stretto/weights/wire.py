"""What senders and receivers tell each other: msgspec messages over stream sockets, with a deadline on every wait."""

import array
import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import Manifest

PROTOCOL = 1
BEAT = 0.5  # seconds between two signs of life
SILENCE = 6.0  # seconds without one, after which the other side is taken to be stopped
_GREETING = 5.0  # seconds for a greeting
_SMALL, _LARGE = 4096, 1 << 29  # bytes of a message before and after it
_HEADER = struct.Struct("!Q")
_FILES = 8
_BACKLOG = 64

State: TypeAlias = Literal["serving", "paused", "loading", "loaded", "dirty"]
InFlight: TypeAlias = Literal["wait", "abort", "keep"]


class Hello(msgspec.Struct, tag=True):
    protocol: int
    nonce: bytes


class Proof(msgspec.Struct, tag=True):
    """That one knows the secret: a keyed hash of both nonces."""

    digest: bytes


class Beat(msgspec.Struct, tag=True):
    """A sign of life."""


class Ask(msgspec.Struct, tag=True):
    """How are you?"""


class Told(msgspec.Struct, tag=True):
    """How a receiver is."""

    state: State
    version: str
    error: str
    device: str
    """A GPU's UUID, or "cpu"."""
    in_place: bool
    """Whether it takes tensors in parts."""
    attested: bool


class Buffers(msgspec.Struct):
    """Two buffers that both sides see: of a device, in an attached file, or in one to be opened."""

    number: int
    """Another number is another pair."""
    nbytes: int
    """Of each."""
    handle: bytes = b""
    offset: int = 0
    """On a device: the allocation's handle, and where in it they begin."""
    path: str = ""


class Open(msgspec.Struct, tag=True):
    """A version is to come; nothing happens yet. Without a manifest if the receiver should know it."""

    version: str
    digest: str
    bucket_bytes: int
    split: bool
    buffers: Buffers
    manifest: Manifest | None = None


class Unknown(msgspec.Struct, tag=True):
    """Tell me the manifest."""


class Ready(msgspec.Struct, tag=True):
    """The version can come."""

    skips: list[int] = []
    """Buckets of which nothing is needed."""


class Start(msgspec.Struct, tag=True):
    """Stop serving, and get ready to load."""

    in_flight: InFlight


class Started(msgspec.Struct, tag=True):
    pass


class Filled(msgspec.Struct, tag=True):
    """A bucket lies in one of the buffers."""

    bucket: int
    slot: int
    sum: int


class Taken(msgspec.Struct, tag=True):
    """A bucket was loaded; its buffer may be filled again."""

    bucket: int


class End(msgspec.Struct, tag=True):
    """That was the last bucket."""


class Loaded(msgspec.Struct, tag=True):
    """All is in place."""

    attested: bool


class Commit(msgspec.Struct, tag=True):
    """All receivers have loaded: serve the new version."""


class Serving(msgspec.Struct, tag=True):
    version: str


class Abandon(msgspec.Struct, tag=True):
    """This update came to nothing."""

    why: str


class Failed(msgspec.Struct, tag=True):
    """The receiver cannot go on with this update."""

    why: str
    dirty: bool = True


Message: TypeAlias = (
    Hello
    | Proof
    | Beat
    | Ask
    | Told
    | Open
    | Unknown
    | Ready
    | Start
    | Started
    | Filled
    | Taken
    | End
    | Loaded
    | Commit
    | Serving
    | Abandon
    | Failed
)
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Gone(WeightsError):  # noqa: N818 (a state of the other side)
    """The other side has closed the connection, is silent, or talks nonsense."""


class Connection:
    """One side of a conversation. Any thread may tell; one at a time may hear."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(True)
        self._stream = stream
        self._telling = threading.Lock()
        self.local = stream.family == socket.AF_UNIX
        self.limit = _SMALL
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
        try:
            writable = select.select([], [self._stream], [], 0)[1]
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
                raise Gone(f"sent a message of {size} bytes, more than the {self.limit} allowed")
            message = _DECODER.decode(self._bytes(size, deadline, files))
            self._heard = time.monotonic()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            close_files(files)
            raise Gone(f"talks nonsense: {error}") from None
        except BaseException:
            close_files(files)
            raise
        return message, files

    def _bytes(self, count: int, deadline: float, files: list[int]) -> bytearray:
        data = bytearray()
        while len(data) < count:
            now = time.monotonic()
            until = min(deadline, self._heard + SILENCE)
            if now >= until:
                late = "is slow: no answer in time" if until == deadline else f"has been silent for {SILENCE:g} s"
                raise Gone(late)
            try:
                self._stream.settimeout(until - now)
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
            if flags & socket.MSG_CTRUNC or len(files) > _FILES:
                raise Gone("sent files that could not be taken")
            data += part
        return data

    def greet(self, secret: bytes | None, *, serves: bool) -> None:
        """Say which protocol one speaks and, over TCP, prove that one knows the secret, without telling it."""
        mine = secrets.token_bytes(32)
        self.tell(Hello(PROTOCOL, mine), seconds=_GREETING)
        hello, files = self.hear(seconds=_GREETING)
        close_files(files)
        if not isinstance(hello, Hello) or len(hello.nonce) != len(mine):
            raise Gone("did not say hello")
        if hello.protocol != PROTOCOL:
            raise Gone(f"speaks protocol {hello.protocol}, and this side {PROTOCOL}")
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
            self.tell(Proof(digest(False)), seconds=_GREETING)
        proof, files = self.hear(seconds=_GREETING)
        close_files(files)
        if not isinstance(proof, Proof) or not hmac.compare_digest(proof.digest, digest(not serves)):
            raise Gone("does not know the secret")
        if serves:
            self.tell(Proof(digest(True)), seconds=_GREETING)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a receiver listens: unix:///path or tcp://host:port."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def path(self) -> Path | None:
        return Path(self.text.removeprefix("unix://")) if self.text.startswith("unix:///") else None

    @property
    def host(self) -> tuple[str, int]:
        try:
            parts = urlsplit(self.text)
            if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path.strip("/"):
                return parts.hostname, parts.port
        except ValueError:
            pass
        raise WeightsError(f"{self.text!r:.100} is no address; there are unix:///path and tcp://host:port")


def connect(address: str, secret: bytes | None = None, *, seconds: float = _GREETING) -> Connection:
    """Reach a receiver."""
    where = Address(address)
    path = where.path
    if path is None and not secret:
        _ = where.host
        raise WeightsError(f"{address} needs a secret: tcp is open to others (see secret_file)")
    stream = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    stream.settimeout(seconds)
    try:
        if path:
            _connect(stream, str(path), seconds)
        else:
            stream.close()
            stream = socket.create_connection(where.host, timeout=seconds)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(stream)
        connection.greet(secret, serves=False)
    except Gone as error:
        stream.close()
        raise Gone(f"{address} {error}") from None
    except (OSError, UnicodeError) as error:
        stream.close()
        raise Gone(f"{address} cannot be reached: {getattr(error, 'strerror', None) or error}") from None
    except BaseException:
        stream.close()
        raise
    return connection


def _connect(stream: socket.socket, path: str, seconds: float) -> None:
    """A door that many wait at says so at once; it is asked again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            stream.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def listen(address: str, secret: bytes | None = None) -> socket.socket:
    """Open a receiver's door: a socket only its user can enter, or one that asks for the secret."""
    where = Address(address)
    path = where.path
    if path is None:
        host = where.host
        if not secret:
            raise WeightsError(f"{address} needs a secret: tcp is open to others (see secret_file)")
        try:
            family = socket.AF_INET6 if ":" in host[0] else socket.AF_INET
            return socket.create_server(host, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise WeightsError(f"cannot listen at {address}: {error.strerror or error}") from None
    room = path.parent
    try:
        room.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = room.stat()
    except OSError as error:
        raise WeightsError(f"cannot listen at {address}: {error.strerror or error}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WeightsError(f"{room} must be yours alone: chmod 700 {room}, or take another directory")
    if path.exists():
        _remove_stale(path)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise WeightsError(f"cannot listen at {address}: {error.strerror or error}") from None
    return server


def _remove_stale(path: Path) -> None:
    """What a process that was killed has left."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise WeightsError(f"{path} is there, and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise WeightsError(f"another process listens at unix://{path}")


def same_user(stream: socket.socket) -> bool:
    """Whether the other end of a Unix socket belongs to this user, or to root."""
    if stream.family != socket.AF_UNIX:
        return True
    uid = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid in (os.getuid(), 0)


def read_secret(path: str | Path | None) -> bytes | None:
    """A secret from a file that nobody else can read."""
    if path is None:
        return None
    try:
        found = Path(path).stat()
        text = Path(path).read_bytes().strip()
    except OSError as error:
        raise WeightsError(f"cannot read the secret {path}: {error.strerror}") from None
    if found.st_mode & 0o077:
        raise WeightsError(f"others can read {path}: chmod 600 {path}")
    if len(text) < 16:
        raise WeightsError(f"the secret in {path} has {len(text)} bytes; make one with: openssl rand -hex 32 > {path}")
    return text
