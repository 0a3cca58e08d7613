"""Side channels: connections between two ranks' hosts for the few bytes that precede a process group's messages."""

import select
import socket
from collections.abc import Callable, Iterable

from stretto.execute.rendezvous import Rendezvous
from stretto.execute.ring import connect_ranks, listening

_POLL = 0.2  # seconds after which a wait checks whether to go on


class SideChannel:
    """One end of a connection, which delivers all bytes in order."""

    error: BaseException | None = None

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(_POLL)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)

    @property
    def done(self) -> bool:
        """Whether data can be read, or the other end is gone."""
        return bool(self._poll.poll(0))

    def wait(self, seconds: float) -> bool:
        """Wait at most that long, and return whether data can be read, or the other end is gone."""
        return bool(self._poll.poll(seconds * 1000))

    def send(self, data: bytes, check: Callable[[], None]) -> None:
        """Send data; `check` raises if there is no more reason to wait."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._stream.send(rest) :]
            except TimeoutError:
                check()

    def receive(self, length: int, check: Callable[[], None]) -> bytes:
        """Receive exactly `length` bytes; `check` raises if there is no more reason to wait."""
        data = b""
        while len(data) < length:
            try:
                part = self._stream.recv(length - len(data))
            except TimeoutError:
                check()
                continue
            if not part:
                raise ConnectionError("the other end of a wire is gone")
            data = data + part if data else part
        return data

    def close(self) -> None:
        self._stream.close()


def side_channels(
    rendezvous: Rendezvous, directed: Iterable[tuple[int, int]]
) -> tuple[dict[int, SideChannel], dict[int, SideChannel]]:
    """Connect a side channel for each directed pair; return this rank's channels to and from other ranks, by rank.

    All ranks of the rendezvous must call this together.
    """
    rank, pairs = rendezvous.rank, list(directed)
    sources = {source for source, target in pairs if target == rank}
    targets = sorted(target for source, target in pairs if source == rank)
    with listening(rendezvous) as (server, addresses):
        to, of = connect_ranks(
            rank, targets, sources, addresses, server, check=rendezvous.check, failure=rendezvous.failure
        )
    return {peer: SideChannel(stream) for peer, stream in to.items()}, {
        peer: SideChannel(stream) for peer, stream in of.items()
    }
