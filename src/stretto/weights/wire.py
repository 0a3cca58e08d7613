"""A conversation between a sender and a receiver, and what ends it."""

import logging
import socket

from stretto.ir.errors import WeightsError
from stretto.weights.messages import DECODER, Message
from stretto.wire import connection

PROTOCOL = 4


class Gone(connection.Gone, WeightsError):  # noqa: N818 (a state of the other side)
    """The other side has closed the connection, is silent, or talks nonsense."""


class Late(connection.Late, Gone):
    """The other side is there, but does not answer."""


class Odd(connection.Odd, Gone):
    """The other side says what nobody of ours would say."""


class Connection(connection.Connection[Message]):
    """One side of it."""

    gone, late, odd = Gone, Late, Odd

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream, DECODER)

    def meet(self, secret: bytes | None, *, serves: bool) -> None:
        """Know that the other side is of ours: over TCP by the secret, over a Unix socket its user tells."""
        if not self.local and not secret:
            raise WeightsError("tcp needs a secret, which both sides read from a file")
        self.greet(PROTOCOL, None if self.local else secret, serves=serves)


def loudness(error: Exception) -> int:
    """Whoever does not keep to the protocol is worth a warning; whoever leaves is not."""
    return logging.DEBUG if isinstance(error, Gone) and not isinstance(error, Odd) else logging.WARNING
