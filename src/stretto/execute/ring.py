"""Makes the ring of supervisors of ranks that have met, and connections between any of them."""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from stretto.execute.meeting import Meeting
from stretto.execute.supervise import Supervisor
from stretto.ir.errors import told

_JOINING = 60.0  # seconds for a neighbour to come
_POLL = 0.2
_HERE = "127.0.0.1"
_BACKLOG = 128
_STRANGERS = 64  # who may stand at a door and say nothing
_WORD, _RANK = 32, 8  # characters


class Door(msgspec.Struct, frozen=True):
    """Where a rank waits for others, and the word by which it knows them from strangers."""

    host: str
    port: int
    word: str


def supervised(meeting: Meeting | None, *, timeout: float, turns: str) -> Supervisor:
    """One that knows its neighbours. Without a meeting, one that watches nobody."""
    supervisor = Supervisor(0 if meeting is None else meeting.rank, timeout=timeout, turns=turns)
    if meeting is not None:
        with opened_doors(meeting) as (server, doors):
            peers = neighbours(meeting.rank, doors, server, timeout=min(timeout, _JOINING))
            supervisor.watch(peers, on_one_machine=doors[0].host == _HERE)
    return supervisor


@contextlib.contextmanager
def opened_doors(meeting: Meeting) -> Iterator[tuple[socket.socket, list[Door]]]:
    """This rank's server, and where all wait, for as long as they are needed. On one machine nobody else can come."""
    alone = len(set(meeting.gather(_machine()))) == 1
    with socket.create_server((_HERE if alone else "", 0), backlog=max(_BACKLOG, meeting.size)) as server:
        host = _HERE if alone else socket.gethostname()
        mine = Door(host, server.getsockname()[1], secrets.token_hex(_WORD // 2))
        said = meeting.gather(msgspec.json.encode(mine).decode())
        yield server, [msgspec.json.decode(it, type=Door) for it in said]


def _machine() -> str:
    """What ranks have in common that can reach and see each other: a machine, its network and its processes."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join(found)


def neighbours(
    rank: int, doors: Sequence[Door], server: socket.socket, *, timeout: float = _JOINING
) -> dict[int, socket.socket]:
    """Connections with the rank after this one, which it goes to, and with the one before, which comes."""
    if len(doors) == 1:
        return {}
    following, before = (rank + 1) % len(doors), (rank - 1) % len(doors)
    to, of = connected(rank, [following], [before], doors, server, timeout=timeout)
    if following == before:  # two ranks: one connection is enough to watch by
        (to[following] if rank else of[before]).close()
        return {following: of[before] if rank else to[following]}
    return {following: to[following], before: of[before]}


def connected(
    rank: int,
    targets: Sequence[int],
    sources: Collection[int],
    doors: Sequence[Door],
    server: socket.socket,
    *,
    timeout: float = _JOINING,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connections to some ranks and from some, by their ranks. It goes and receives at the same time: if everybody
    went first, a crowd of strangers at the doors would keep all out.
    """
    to, of = dict[int, socket.socket](), dict[int, socket.socket]()

    def go() -> None:
        for target in targets:
            to[target] = failing.enter_context(connection_to(doors[target], rank, target, timeout=timeout))

    with contextlib.ExitStack() as failing, ThreadPoolExecutor(1) as pool:
        going = pool.submit(go)
        if sources:
            for source, stream in guests(server, doors[rank].word, timeout=timeout, check=check):
                of[source] = failing.enter_context(stream)
                if not set(sources) - of.keys():
                    break
        if missing := set(sources) - of.keys():
            raise told(f"rank {min(missing)} did not connect to rank {rank} within {timeout:.0f} s")
        going.result()
        failing.pop_all()
    return to, of


def connection_to(door: Door, rank: int, other: int, *, timeout: float = _JOINING) -> socket.socket:
    """From a rank to another one's door, where it says the word and who it is."""
    try:
        stream = socket.create_connection((door.host, door.port), timeout=timeout)
        stream.sendall(f"{door.word}{rank:0{_RANK}}".encode())
    except OSError as error:
        raise told(f"rank {rank} cannot reach rank {other} at {door.host}:{door.port}: {error}") from None
    return stream


def guests(
    server: socket.socket, word: str, *, timeout: float, check: Callable[[], None]
) -> Iterator[tuple[int, socket.socket]]:
    """Those who know the word, as they come, and who they are. Strangers are sent away, and nobody waits for them.
    `check` raises if there is no more reason to wait.
    """
    deadline, said = time.monotonic() + timeout, dict[socket.socket, bytes]()
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                check()
                for key, _ in selector.select(min(left, _POLL)):
                    if key.fileobj is server:
                        with contextlib.suppress(OSError):
                            stream, _ = server.accept()
                            stream.setblocking(False)
                            selector.register(stream, selectors.EVENT_READ)
                            said[stream] = b""
                        continue
                    stream = key.fileobj  # type: ignore[assignment]
                    data = b""
                    with contextlib.suppress(OSError):
                        data = stream.recv(_WORD + _RANK - len(said[stream]))
                    said[stream] += data
                    if data and len(said[stream]) < _WORD + _RANK:
                        continue
                    selector.unregister(stream)
                    text = said.pop(stream)
                    if hmac.compare_digest(text[:_WORD], word.encode()) and len(text) == _WORD + _RANK:
                        stream.setblocking(True)
                        yield int(text[_WORD:]), stream
                    else:
                        stream.close()
                while len(said) > _STRANGERS:
                    stream = next(iter(said))
                    selector.unregister(stream)
                    said.pop(stream)
                    stream.close()
        finally:
            for stream in said:
                stream.close()
