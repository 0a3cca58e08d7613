"""Where receivers listen, and who is let in."""

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stretto.ir.errors import WeightsError
from stretto.weights.connection import Connection, PeerClosed
from stretto.wire.connection import GREETING
from stretto.wire.forks import keep_from_children
from stretto.wire.peers import is_trusted, peer_user

_BACKLOG = 64
_LOCKING = 5.0  # seconds


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


def connect(address: str, secret: bytes | None = None, *, seconds: float = GREETING) -> Connection:
    """Reach a receiver."""
    where = Address(address)
    path = where.path
    if path is None and not secret:
        _ = where.host
        raise WeightsError(f"{address} needs a secret: both sides read one (secret_file=, --secret-file)")
    stream: socket.socket | None = None
    try:
        if path:
            stream = socket.socket(socket.AF_UNIX)
            stream.settimeout(seconds)
            _connect(stream, str(path), seconds)
            if not is_trusted(user := peer_user(stream)):
                raise WeightsError(f"{address} belongs to user {user}, and this process to user {os.geteuid()}")
        else:
            stream = socket.create_connection(where.host, timeout=seconds)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(stream)
        connection.meet(secret, serves=False)
    except BaseException as error:
        if stream is not None:
            stream.close()
        if isinstance(error, PeerClosed):
            raise PeerClosed(f"{address} {error}") from None
        if isinstance(error, OSError | UnicodeError):
            raise PeerClosed(f"{address} cannot be reached: {getattr(error, 'strerror', None) or error}") from None
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


class Listener:
    """Where a receiver listens: a socket that only its user can enter, or one that asks for the secret.

    Doors in one directory are opened and closed one at a time, which a lock on the directory sees to: exactly one
    process listens at a path, and nobody removes what is another's.
    """

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        where = Address(address)
        self._path, self._file = where.path, (0, 0)
        try:
            if self._path is None:
                self._server = _tcp(where, secret)
            else:
                _make_private(self._path.parent)
                with _locked(self._path.parent):
                    self._server = _unix(self._path)
                    self._file = _identity(self._path)
        except OSError as error:
            raise WeightsError(f"cannot listen at {address}: {error.strerror or error}") from None
        keep_from_children(self._server)

    def accept(self) -> socket.socket:
        return self._server.accept()[0]

    def close(self) -> None:
        """Take it away, and wake who waits at it."""
        if self._path is not None:
            with contextlib.suppress(OSError, WeightsError), _locked(self._path.parent):  # else a next one removes it
                if _identity(self._path) == self._file:
                    self._path.unlink()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _tcp(where: Address, secret: bytes | None) -> socket.socket:
    host = where.host
    if not secret:
        raise WeightsError(f"{where} needs a secret: both sides read one (secret_file=, --secret-file)")
    family = socket.AF_INET6 if ":" in host[0] else socket.AF_INET
    return socket.create_server(host, family=family, backlog=_BACKLOG)


def _make_private(room: Path) -> None:
    """All directories that are missing are made for this user alone."""
    for missing in reversed([it for it in (room, *room.parents) if not it.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    found = room.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise WeightsError(f"{room} is open to others; put the socket into a directory that is yours alone (mode 700)")


@contextlib.contextmanager
def _locked(room: Path) -> Iterator[None]:
    """Nobody else opens or closes a door in this directory."""
    file = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCKING
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WeightsError(f"another process has held a lock on {room} for {_LOCKING:g} s") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(file)  # and with it the lock


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _unix(path: Path) -> socket.socket:
    """A socket that listens, where there is none."""
    if os.path.lexists(path):
        _remove_stale(path)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
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
