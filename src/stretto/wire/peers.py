"""Who is at the other end of a Unix socket."""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")


def peer_user(connection: socket.socket) -> int:
    """The user that the process at the other end runs as, or ran as when it began to listen."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(told)[1]
    return user


def is_trusted(user: int) -> bool:
    """Whether it is this process's user, or root, from whom nothing can be kept."""
    return user in (os.geteuid(), 0)
