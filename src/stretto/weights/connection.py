"""A conversation between a sender and a receiver, and what ends it."""

import logging
import socket

from stretto.ir.errors import WeightsError
from stretto.weights.messages import DECODER, Message
from stretto.wire import connection

PROTOCOL = 4


class PeerClosed(connection.PeerClosed, WeightsError):  # noqa: N818 (a state of the other side)
    """The other side has closed the connection, is silent, or talks nonsense."""


class PeerTimeout(connection.PeerTimeout, PeerClosed):
    """The other side is there, but does not answer."""


class ProtocolError(connection.ProtocolError, PeerClosed):
    """The other side says what nobody of ours would say."""


class Connection(connection.Connection[Message]):
    """One side of it."""

    gone, late, odd = PeerClosed, PeerTimeout, ProtocolError

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream, DECODER)

    def meet(self, secret: bytes | None, *, serves: bool) -> None:
        """Know that the other side is of ours: over TCP by the secret, over a Unix socket its user tells."""
        if not self.local and not secret:
            raise WeightsError("tcp needs a secret, which both sides read from a file")
        self.greet(PROTOCOL, None if self.local else secret, serves=serves)


def log_level(error: Exception) -> int:
    """Whoever does not keep to the protocol is worth a warning; whoever leaves is not."""
    return logging.DEBUG if isinstance(error, PeerClosed) and not isinstance(error, ProtocolError) else logging.WARNING
