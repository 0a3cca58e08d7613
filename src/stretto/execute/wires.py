"""Wires: connections between the hosts of two ranks, for the few bytes that go ahead of what a process group moves."""

import select
import socket
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from stretto.execute.ring import connection_to, opened_doors, welcomed
from stretto.ir.errors import PipelineError

_POLL = 0.2  # seconds after which a wait looks whether there is still reason to


class Wire:
    """One end of a connection. What is sent arrives whole and in order."""

    error: BaseException | None = None

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(_POLL)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)

    @property
    def done(self) -> bool:
        """Whether something can be read, or the other end is gone."""
        return bool(self._poll.poll(0))

    def wait(self, seconds: float) -> bool:
        """The same, after that long at most."""
        return bool(self._poll.poll(seconds * 1000))

    def send(self, data: bytes, check: Callable[[], None]) -> None:
        """`check` raises if there is no more reason to wait."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._stream.send(rest) :]
            except TimeoutError:
                check()

    def receive(self, length: int, check: Callable[[], None]) -> bytes:
        """So many bytes; `check` raises if there is no more reason to wait for them."""
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


def wired(
    group: dist.ProcessGroup, device: torch.device, directed: Iterable[tuple[int, int]]
) -> tuple[dict[int, Wire], dict[int, Wire]]:
    """This rank's wires to others and from others, by the other's rank, one for each directed pair.

    All ranks of the group make theirs together.
    """
    rank, pairs = group.rank(), list(directed)
    with socket.create_server(("", 0), backlog=max(1, len(pairs))) as server:
        doors = opened_doors(server, group, device)
        to = {}
        for target in sorted(target for source, target in pairs if source == rank):
            stream = connection_to(doors[target], rank, target)
            stream.sendall(b"%08d" % rank)
            to[target] = Wire(stream)
        sources, of = {source for source, target in pairs if target == rank}, dict[int, Wire]()
        while missing := sources - of.keys():
            stream_or_none = welcomed(server, doors[rank].word)
            if stream_or_none is None:
                raise PipelineError(f"rank {min(missing)} did not connect to rank {rank}")
            stream_or_none.settimeout(None)
            source = int(stream_or_none.recv(8, socket.MSG_WAITALL))
            of[source] = Wire(stream_or_none)
    return to, of
