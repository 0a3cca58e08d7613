"""Sockets that a forked child has no part in: the other side is to see the end of the process that it talks with."""

import os
import socket
import weakref

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def keep_from_children(stream: socket.socket) -> None:
    _sockets.add(stream)


def _close_all() -> None:
    for stream in list(_sockets):
        stream.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_all)
