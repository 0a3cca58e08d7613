"""Closes sockets in forked children, so that a peer sees the connection end when the original process ends."""

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
