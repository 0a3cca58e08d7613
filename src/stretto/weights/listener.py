"""Addresses, and how receivers listen and senders connect securely."""

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
_LOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a receiver: unix:///path or tcp://host:port."""

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
    """Connect to a receiver and exchange greetings."""
    parsed = Address(address)
    path = parsed.path
    if path is None and not secret:
        _ = parsed.host  # raises if this is not an address at all
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
            stream = socket.create_connection(parsed.host, timeout=seconds)
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
    """Connect a Unix socket, and retry while the listener's backlog is full: the kernel then refuses immediately."""
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
    """A receiver's listening socket: a Unix socket that only its user can reach, or TCP with a secret.

    A lock on the directory makes Unix listeners in it open and close one at a time: exactly one process listens at a
    path, and no process removes another's socket.
    """

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        parsed = Address(address)
        self._path, self._file = parsed.path, (0, 0)
        try:
            if self._path is None:
                self._server = _tcp(parsed, secret)
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
        """Remove the socket and wake the thread that accepts."""
        if self._path is not None:
            # If this fails, the next listener removes the stale socket.
            with contextlib.suppress(OSError, WeightsError), _locked(self._path.parent):
                if _identity(self._path) == self._file:
                    self._path.unlink()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _tcp(address: Address, secret: bytes | None) -> socket.socket:
    host = address.host
    if not secret:
        raise WeightsError(f"{address} needs a secret: both sides read one (secret_file=, --secret-file)")
    family = socket.AF_INET6 if ":" in host[0] else socket.AF_INET
    return socket.create_server(host, family=family, backlog=_BACKLOG)


def _make_private(directory: Path) -> None:
    """Create missing directories with mode 700; raise WeightsError if other users can access the directory."""
    for missing in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise WeightsError(
            f"{directory} is open to others; put the socket into a directory that is yours alone (mode 700)"
        )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock under which listeners in this directory open and close."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WeightsError(
                        f"another process has held a lock on {directory} for {_LOCK_SECONDS:g} s"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(file)  # releases the lock


def _identity(path: Path) -> tuple[int, int]:
    """Return the numbers that identify a file on this machine."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def _unix(path: Path) -> socket.socket:
    """Listen at a path, replacing a stale socket there."""
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
    """Remove the socket of a killed process; raise WeightsError if it is in use or not a socket."""
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
    """Read a secret; raise WeightsError if other users can read the file or the secret is too short."""
    if path is None:
        return None
    try:
        status = Path(path).stat()
        text = Path(path).read_bytes().strip()
    except OSError as error:
        raise WeightsError(f"cannot read the secret {path}: {error.strerror}") from None
    if status.st_mode & 0o077:
        raise WeightsError(f"others can read {path}: chmod 600 {path}")
    if len(text) < 16:
        raise WeightsError(f"the secret in {path} has {len(text)} bytes; make one with: openssl rand -hex 32 > {path}")
    return text
