"""Processes that talk to the broker. None of them can make it wait."""

import os
import selectors
import socket
import time
from collections import deque

from stretto.onegpu_broker.wire import FromBroker, close
from stretto.wire.frames import pack_message, send_bytes

_MOST_WAITING = 65536  # messages; a client has asked for each of them
_MOST_BYTES = 2**22
_PATIENCE = 60.0  # seconds in which a client reads nothing


class Client:
    """One process. What does not fit into its socket waits here until it does."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)
        self.connection, self._selector = connection, selector
        self.since = time.monotonic()
        self.has_joined = False
        """Some group: it is a rank, and not a stranger."""
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._bytes, self._is_full = 0, False
        self._moved = 0.0  # when a message last left, while some wait

    def say(self, message: FromBroker, file: int = -1) -> None:
        data = pack_message(message)
        if self._waiting or not self._sent(data, file):
            if not self._waiting:
                self._moved = time.monotonic()
                self._selector.modify(self.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
            self._is_full = self._is_full or len(self._waiting) >= _MOST_WAITING or self._bytes >= _MOST_BYTES
            if not self._is_full:  # otherwise it is disconnected before it could miss this
                self._bytes += len(data)
                self._waiting.append((data, os.dup(file) if file >= 0 else -1))

    def send_waiting(self) -> None:
        """As much as fits."""
        while self._waiting and self._sent(*self._waiting[0]):
            data, file = self._waiting.popleft()
            close(file)
            self._bytes -= len(data)
            self._moved = time.monotonic()
        if not self._waiting:
            self._selector.modify(self.connection, selectors.EVENT_READ, self)

    @property
    def is_stuck(self) -> bool:
        """Whether it does not read."""
        late = bool(self._waiting) and time.monotonic() > self._moved + _PATIENCE
        return late or self._is_full

    def close(self) -> None:
        self._selector.unregister(self.connection)
        self.connection.close()
        for _, file in self._waiting:
            close(file)
        self._waiting.clear()

    def _sent(self, data: bytes, file: int) -> bool:
        """Whether a message has left; or there is nobody to hear it, which reading will show."""
        try:
            send_bytes(self.connection, data, [file] if file >= 0 else [])
        except ConnectionError:
            return True
        except OSError:  # its socket is full, or more files are on their way than the kernel allows
            return False
        return True
