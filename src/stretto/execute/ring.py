"""Makes the ring of supervisors of ranks that have met, and connections between any of them."""

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from stretto.execute.rendezvous import Rendezvous
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import PeerError, StrettoError
from stretto.wire.connection import Connection, PeerClosed
from stretto.wire.frames import MalformedMessage, Reader, pack_message
from stretto.wire.greeting import Greeting, Hello, Proof

_JOINING = 60.0  # seconds for a neighbour to come
_POLL = 0.2
_HERE = "127.0.0.1"
_BACKLOG = 128
_STRANGERS = 64  # who may stand at a door and say nothing
_LARGEST = 4096  # bytes of a message
PROTOCOL = 1
_DECODER: msgspec.msgpack.Decoder[Hello | Proof] = msgspec.msgpack.Decoder(Hello | Proof)


class ListenAddress(msgspec.Struct, frozen=True):
    """Where a rank waits for others, and the word by which it knows them from strangers."""

    host: str
    port: int
    word: str


def supervised(rendezvous: Rendezvous | None, *, timeout: float, turns: str) -> Supervisor:
    """One that knows its neighbours. Without a meeting, one that watches nobody."""
    failure = PeerError if rendezvous is None else rendezvous.failure
    supervisor = Supervisor(0 if rendezvous is None else rendezvous.rank, timeout=timeout, turns=turns, failure=failure)
    if rendezvous is not None:
        with listening(rendezvous) as (server, addresses):
            peers = neighbours(rendezvous.rank, addresses, server, timeout=min(timeout, _JOINING), failure=failure)
            supervisor.watch(peers, on_one_machine=addresses[0].host == _HERE)
    return supervisor


@contextlib.contextmanager
def listening(rendezvous: Rendezvous) -> Iterator[tuple[socket.socket, list[ListenAddress]]]:
    """This rank's server, and where all wait, for as long as they are needed. On one machine nobody else can come."""
    alone = len(set(rendezvous.gather(_machine()))) == 1
    with socket.create_server((_HERE if alone else "", 0), backlog=max(_BACKLOG, rendezvous.size)) as server:
        host = _HERE if alone else socket.gethostname()
        mine = ListenAddress(host, server.getsockname()[1], secrets.token_hex(16))
        said = rendezvous.gather(msgspec.json.encode(mine).decode())
        yield server, [msgspec.json.decode(it, type=ListenAddress) for it in said]


def _machine() -> str:
    """What ranks have in common that can reach and see each other: a machine, its network and its processes."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join(found)


def neighbours(
    rank: int,
    addresses: Sequence[ListenAddress],
    server: socket.socket,
    *,
    timeout: float = _JOINING,
    failure: Callable[[str], StrettoError] = PeerError,
) -> dict[int, socket.socket]:
    """Connections with the rank after this one, which it goes to, and with the one before, which comes."""
    if len(addresses) == 1:
        return {}
    following, before = (rank + 1) % len(addresses), (rank - 1) % len(addresses)
    to, of = connected(rank, [following], [before], addresses, server, timeout=timeout, failure=failure)
    if following == before:  # two ranks: one connection is enough to watch by
        (to[following] if rank else of[before]).close()
        return {following: of[before] if rank else to[following]}
    return {following: to[following], before: of[before]}


def connected(
    rank: int,
    targets: Sequence[int],
    sources: Collection[int],
    addresses: Sequence[ListenAddress],
    server: socket.socket,
    *,
    timeout: float = _JOINING,
    check: Callable[[], None] = lambda: None,
    failure: Callable[[str], StrettoError] = PeerError,
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connections to some ranks and from some, by their ranks. It goes and receives at the same time: if everybody
    went first, a crowd of strangers at the doors would keep all out.
    """
    to, of = dict[int, socket.socket](), dict[int, socket.socket]()

    def go() -> None:
        for target in targets:
            to[target] = failing.enter_context(connection_to(addresses[target], rank, target, timeout, failure))

    with contextlib.ExitStack() as failing, ThreadPoolExecutor(1) as pool:
        going = pool.submit(go)
        if sources:
            for source, stream in guests(server, addresses[rank].word, timeout=timeout, check=check):
                of[source] = failing.enter_context(stream)
                if not set(sources) - of.keys():
                    break
        if missing := set(sources) - of.keys():
            raise failure(f"rank {min(missing)} did not connect to rank {rank} within {timeout:.0f} s")
        going.result()
        failing.pop_all()
    return to, of


def connection_to(
    door: ListenAddress,
    rank: int,
    other: int,
    timeout: float = _JOINING,
    failure: Callable[[str], StrettoError] = PeerError,
) -> socket.socket:
    """From a rank to another one's door, where it says who it is, and both prove that they know the word."""
    try:
        stream = socket.create_connection((door.host, door.port), timeout=timeout)
    except OSError as error:
        raise failure(f"rank {rank} cannot reach rank {other} at {door.host}:{door.port}: {error}") from None
    connection = Connection(stream, _DECODER)
    try:
        connection.greet(PROTOCOL, door.word.encode(), serves=False, name=str(rank), seconds=timeout)
    except PeerClosed as error:
        connection.close()
        raise failure(f"rank {rank} came to rank {other} at {door.host}:{door.port}, which {error}") from None
    return stream


class _Guest:
    """Somebody at the door. Nobody waits for what it says next."""

    def __init__(self, stream: socket.socket, word: str) -> None:
        stream.setblocking(False)
        self.stream, self._reader = stream, Reader(_DECODER, _LARGEST)
        self._greeting = Greeting(PROTOCOL, word.encode(), serves=True)
        self._name: str | None = None
        self._say(self._greeting.hello)

    def heard(self) -> int | None:
        """Go on with what it has said; which rank it is, once it has proved that it may come in. Raises if it may not
        come."""
        data = self.stream.recv(_LARGEST)
        if not data:
            raise MalformedMessage("nothing more")
        for message in self._reader.feed(data):
            if self._name is None:
                self._name = self._greeting.meet(message)
            else:
                self._greeting.check(message)
                self._say(self._greeting.proof())
                return int(self._name)
        return None

    def _say(self, message: Hello | Proof) -> None:
        self.stream.send(pack_message(message))  # which a new connection has room for


def guests(
    server: socket.socket, word: str, *, timeout: float, check: Callable[[], None]
) -> Iterator[tuple[int, socket.socket]]:
    """Those who know the word, as they come, and who they are. Strangers are sent away, and nobody waits for them.
    `check` raises if there is no more reason to wait.
    """
    deadline, there = time.monotonic() + timeout, dict[socket.socket, _Guest]()
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                check()
                for key, _ in selector.select(min(left, _POLL)):
                    stream: socket.socket = key.fileobj  # type: ignore[assignment]
                    if stream is server:
                        with contextlib.suppress(OSError), contextlib.ExitStack() as failing:
                            came = failing.enter_context(server.accept()[0])
                            there[came] = _Guest(came, word)
                            selector.register(came, selectors.EVENT_READ)
                            failing.pop_all()
                        continue
                    try:
                        rank = there[stream].heard()
                    except (OSError, ValueError):  # a stranger
                        selector.unregister(stream)
                        there.pop(stream).stream.close()
                        continue
                    if rank is not None:
                        selector.unregister(stream)
                        del there[stream]
                        stream.setblocking(True)
                        yield rank, stream
                while len(there) > _STRANGERS:
                    stream = next(iter(there))
                    selector.unregister(stream)
                    there.pop(stream).stream.close()
        finally:
            for stream in there:
                stream.close()
