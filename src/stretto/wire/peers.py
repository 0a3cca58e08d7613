"""Which user runs the process at the other end of a Unix socket."""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")


def peer_user(connection: socket.socket) -> int:
    """Return the peer's user ID: of a client when it connected, of a server when it began to listen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def is_trusted(user: int) -> bool:
    """Return whether this is our own user or root, who can read our memory anyway."""
    return user in (os.geteuid(), 0)
