"""Processes connected to the broker; sending to them never blocks."""

import os
import selectors
import socket
import time
from collections import deque

from stretto.onegpu_broker.wire import FromBroker, close
from stretto.wire.frames import pack_message, send_bytes

_MOST_WAITING = 65536  # messages in the queue of a client; the client asked for each of them
_MOST_BYTES = 2**22  # bytes in the queue of a client
_PATIENCE = 60.0  # seconds that a client may read nothing


class Client:
    """One connected process. Messages that do not fit into its socket are queued here."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)
        self.connection, self._selector = connection, selector
        self.since = time.monotonic()
        self.has_joined = False
        """Whether the process has joined a group."""
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._bytes, self._is_full = 0, False
        self._moved = 0.0  # when the queue last shrank, or began

    def send(self, message: FromBroker, file: int = -1) -> None:
        """Send a message, or queue it if the socket is full."""
        data = pack_message(message)
        if self._waiting or not self._try_send(data, file):
            if not self._waiting:
                self._moved = time.monotonic()
                self._selector.modify(self.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
            self._is_full = self._is_full or len(self._waiting) >= _MOST_WAITING or self._bytes >= _MOST_BYTES
            if not self._is_full:  # a full client is disconnected before it could miss this message
                self._bytes += len(data)
                self._waiting.append((data, os.dup(file) if file >= 0 else -1))

    def send_waiting(self) -> None:
        """Send as many queued messages as the socket takes."""
        while self._waiting and self._try_send(*self._waiting[0]):
            data, file = self._waiting.popleft()
            close(file)
            self._bytes -= len(data)
            self._moved = time.monotonic()
        if not self._waiting:
            self._selector.modify(self.connection, selectors.EVENT_READ, self)

    @property
    def is_stuck(self) -> bool:
        """Whether the client has stopped reading: its queue is full, or has not moved for too long."""
        is_late = bool(self._waiting) and time.monotonic() > self._moved + _PATIENCE
        return is_late or self._is_full

    def close(self) -> None:
        self._selector.unregister(self.connection)
        self.connection.close()
        for _, file in self._waiting:
            close(file)
        self._waiting.clear()

    def _try_send(self, data: bytes, file: int) -> bool:
        """Return False if the message must wait. A lost connection counts as sent: the next read reports it."""
        try:
            send_bytes(self.connection, data, [file] if file >= 0 else [])
        except ConnectionError:
            return True
        except OSError:  # the socket is full, or more files are in transit than the kernel allows
            return False
        return True
