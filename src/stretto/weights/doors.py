"""Where receivers listen, and who is let in."""

import os
import socket
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stretto.ir.errors import WeightsError
from stretto.weights.wire import GREETING, Connection, Gone

_BACKLOG = 64


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
        raise WeightsError(f"{address} needs a secret: tcp is open to others (both sides read it from a file)")
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
            raise WeightsError(f"{address} needs a secret: tcp is open to others (both sides read it from a file)")
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
        raise WeightsError(f"{room} is open to others; put the socket into a directory that is yours alone (mode 700)")
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
