"""The connection between a sender and a receiver, and the errors that end it."""

import logging
import socket

from stretto.ir.errors import WeightsError
from stretto.weights.messages import DECODER, Message
from stretto.wire import connection

PROTOCOL = 4


class PeerClosed(connection.PeerClosed, WeightsError):  # noqa: N818 (a state of the peer)
    """The peer has closed the connection, is silent, or violates the protocol."""


class PeerTimeout(connection.PeerTimeout, PeerClosed):
    """The peer is connected but does not answer in time."""


class ProtocolError(connection.ProtocolError, PeerClosed):
    """The peer sent a message that violates the protocol."""


class Connection(connection.Connection[Message]):
    """One end of a connection that carries weight-push messages."""

    closed_error, timeout_error, protocol_error = PeerClosed, PeerTimeout, ProtocolError

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream, DECODER)

    def meet(self, secret: bytes | None, *, serves: bool) -> None:
        """Exchange greetings; over TCP, also verify that the peer knows the secret.

        A Unix socket needs no secret: its caller checks the peer's user.
        """
        if not self.local and not secret:
            raise WeightsError("tcp needs a secret, which both sides read from a file")
        self.greet(PROTOCOL, None if self.local else secret, serves=serves)


def log_level(error: Exception) -> int:
    """Return the level to log an error at: a closed connection is normal, a protocol violation is a warning."""
    return logging.DEBUG if isinstance(error, PeerClosed) and not isinstance(error, ProtocolError) else logging.WARNING
