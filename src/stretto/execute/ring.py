"""Makes the ring of supervisors of a process group."""

import atexit
import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stretto.execute.supervise import Supervisor
from stretto.ir.errors import PipelineError

_JOINING = 60.0  # seconds for a neighbour to come
_SAYING = 5.0  # seconds for whoever comes to say the word
_WORD = 32  # characters


@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank waits for the one before it, and the word by which it knows that one from a stranger."""

    host: str
    port: int
    word: str


def supervised(group: dist.ProcessGroup | None, device: torch.device, *, timeout: float) -> Supervisor:
    """One that knows its neighbours. Without a group, one that watches nobody."""
    if not timeout > 0:
        raise PipelineError(f"timeout is a number of seconds above 0 (got {timeout})")
    if group is None:
        return Supervisor(0, timeout=timeout)
    supervisor = Supervisor(group.rank(), timeout=timeout)
    with socket.create_server(("", 0)) as server:
        supervisor.watch(neighbours(group.rank(), opened_doors(server, group, device), server))
    atexit.register(supervisor.close)
    return supervisor


def opened_doors(server: socket.socket, group: dist.ProcessGroup, device: torch.device) -> list[Door]:
    """Where all ranks of a group wait, this one at its server."""
    mine = Door(socket.gethostname(), server.getsockname()[1], secrets.token_hex(_WORD // 2))
    doors = _told(mine, group, device)
    if len({door.host for door in doors}) == 1:
        doors = [Door("127.0.0.1", door.port, door.word) for door in doors]
    return doors


def _told(mine: Door, group: dist.ProcessGroup, device: torch.device) -> list[Door]:
    """Everybody's, over the group."""
    text = f"{mine.host} {mine.port} {mine.word}".encode().ljust(320)
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    rows = [torch.zeros_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    found = (bytes(it.tolist()).decode().split() for it in rows)
    return [Door(host, int(port), word) for host, port, word in found]


def neighbours(rank: int, doors: Sequence[Door], server: socket.socket) -> dict[int, socket.socket]:
    """Connections with the rank after this one, which it goes to, and with the one before, which comes."""
    if len(doors) == 1:
        return {}
    following, before = (rank + 1) % len(doors), (rank - 1) % len(doors)
    with contextlib.ExitStack() as failing:
        onward = failing.enter_context(connection_to(doors[following], rank, following))
        back = welcomed(server, doors[rank].word)
        if back is None:
            raise PipelineError(f"rank {before} did not connect to rank {rank} within {_JOINING:.0f} s")
        failing.pop_all()
    if following == before:  # two ranks: one connection is enough to watch by
        (onward if rank else back).close()
        return {following: back if rank else onward}
    return {following: onward, before: back}


def connection_to(door: Door, rank: int, other: int) -> socket.socket:
    """From a rank to another one's door, where it says the word."""
    try:
        stream = socket.create_connection((door.host, door.port), timeout=_JOINING)
        stream.sendall(door.word.encode())
    except OSError as error:
        raise PipelineError(f"rank {rank} cannot reach rank {other} at {door.host}:{door.port}: {error}") from None
    return stream


def welcomed(server: socket.socket, word: str) -> socket.socket | None:
    """The first who knows the word; others are sent away."""
    deadline = time.monotonic() + _JOINING
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(TimeoutError, ConnectionError):
            stream, _ = server.accept()
            if hmac.compare_digest(_heard(stream), word.encode()):
                return stream
            stream.close()
    return None


def _heard(stream: socket.socket) -> bytes:
    """As many bytes as the word has, or fewer if they do not come."""
    data, deadline = b"", time.monotonic() + _SAYING
    with contextlib.suppress(OSError):
        while len(data) < _WORD and (left := deadline - time.monotonic()) > 0:
            stream.settimeout(left)
            part = stream.recv(_WORD - len(data))
            if not part:
                break
            data += part
    return data
