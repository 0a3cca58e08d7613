"""Connects ranks that have met: the ring of supervisors, and connections between any two ranks."""

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

_JOINING = 60.0  # seconds for a neighbour to connect
_POLL = 0.2
_LOCALHOST = "127.0.0.1"
_BACKLOG = 128
_STRANGERS = 64  # connections that may stay open without having greeted
_LARGEST = 4096  # bytes of a message
PROTOCOL = 1
_DECODER: msgspec.msgpack.Decoder[Hello | Proof] = msgspec.msgpack.Decoder(Hello | Proof)


class ListenAddress(msgspec.Struct, frozen=True):
    """Where a rank listens, and the secret that other ranks prove they know."""

    host: str
    port: int
    word: str
    """The secret."""


def make_supervisor(rendezvous: Rendezvous | None, *, timeout: float, turns: str) -> Supervisor:
    """Return a supervisor connected to its neighbours; without a rendezvous, it watches no rank."""
    failure = PeerError if rendezvous is None else rendezvous.failure
    supervisor = Supervisor(0 if rendezvous is None else rendezvous.rank, timeout=timeout, turns=turns, failure=failure)
    if rendezvous is not None:
        with listening(rendezvous) as (server, addresses):
            peers = neighbours(rendezvous.rank, addresses, server, timeout=min(timeout, _JOINING), failure=failure)
            supervisor.watch(peers, on_one_machine=addresses[0].host == _LOCALHOST)
    return supervisor


@contextlib.contextmanager
def listening(rendezvous: Rendezvous) -> Iterator[tuple[socket.socket, list[ListenAddress]]]:
    """Listen, and yield this rank's server and all ranks' addresses.

    If all ranks are on one machine, they listen on localhost only, where no other machine can connect.
    """
    is_one_machine = len(set(rendezvous.gather(machine()))) == 1
    with socket.create_server(
        (_LOCALHOST if is_one_machine else "", 0), backlog=max(_BACKLOG, rendezvous.size)
    ) as server:
        host = _LOCALHOST if is_one_machine else socket.gethostname()
        address = ListenAddress(host, server.getsockname()[1], secrets.token_hex(16))
        texts = rendezvous.gather(msgspec.json.encode(address).decode())
        yield server, [msgspec.json.decode(text, type=ListenAddress) for text in texts]


def machine() -> str:
    """Identify what ranks must share to reach and see each other: a machine, its network and its processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join(parts)


def neighbours(
    rank: int,
    addresses: Sequence[ListenAddress],
    server: socket.socket,
    *,
    timeout: float = _JOINING,
    failure: Callable[[str], StrettoError] = PeerError,
) -> dict[int, socket.socket]:
    """Connect to the rank after this one, accept the rank before it, and return the connections by rank."""
    if len(addresses) == 1:
        return {}
    following, before = (rank + 1) % len(addresses), (rank - 1) % len(addresses)
    to, of = connect_ranks(rank, [following], [before], addresses, server, timeout=timeout, failure=failure)
    if following == before:  # two ranks need only one connection
        (to[following] if rank else of[before]).close()
        return {following: of[before] if rank else to[following]}
    return {following: to[following], before: of[before]}


def connect_ranks(
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
    """Return connections to the targets and from the sources, by rank.

    It connects and accepts at the same time: if all ranks connected first, many strangers in the listen queues would
    keep all of them out.
    """
    to, of = dict[int, socket.socket](), dict[int, socket.socket]()

    def connect() -> None:
        for target in targets:
            to[target] = on_failure.enter_context(connection_to(addresses[target], rank, target, timeout, failure))

    with contextlib.ExitStack() as on_failure, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect)
        if sources:
            for source, stream in accepted_ranks(server, addresses[rank].word, timeout=timeout, check=check):
                of[source] = on_failure.enter_context(stream)
                if not set(sources) - of.keys():
                    break
        if missing := set(sources) - of.keys():
            raise failure(f"rank {min(missing)} did not connect to rank {rank} within {timeout:.0f} s")
        connecting.result()
        on_failure.pop_all()
    return to, of


def connection_to(
    address: ListenAddress,
    rank: int,
    target: int,
    timeout: float = _JOINING,
    failure: Callable[[str], StrettoError] = PeerError,
) -> socket.socket:
    """Connect a rank to a target's address; it sends its rank, and both prove that they know the secret."""
    try:
        stream = socket.create_connection((address.host, address.port), timeout=timeout)
    except OSError as error:
        raise failure(f"rank {rank} cannot reach rank {target} at {address.host}:{address.port}: {error}") from None
    connection = Connection(stream, _DECODER)
    try:
        connection.greet(PROTOCOL, address.word.encode(), serves=False, name=str(rank), seconds=timeout)
    except PeerClosed as error:
        connection.close()
        raise failure(f"rank {rank} came to rank {target} at {address.host}:{address.port}, which {error}") from None
    return stream


class _Greeter:
    """Greets one incoming connection without blocking."""

    def __init__(self, stream: socket.socket, secret: str) -> None:
        stream.setblocking(False)
        self.stream, self._reader = stream, Reader(_DECODER, _LARGEST)
        self._greeting = Greeting(PROTOCOL, secret.encode(), serves=True)
        self._name: str | None = None
        self._send(self._greeting.hello)

    def read(self) -> int | None:
        """Read what has arrived; return the peer's rank once it has proved the secret. Raise if it cannot."""
        data = self.stream.recv(_LARGEST)
        if not data:
            raise MalformedMessage("nothing more")
        for message in self._reader.feed(data):
            if self._name is None:
                self._name = self._greeting.meet(message)
            else:
                self._greeting.check(message)
                self._send(self._greeting.proof())
                return int(self._name)
        return None

    def _send(self, message: Hello | Proof) -> None:
        self.stream.send(pack_message(message))  # fits into the buffer of a new connection


def accepted_ranks(
    server: socket.socket, secret: str, *, timeout: float, check: Callable[[], None]
) -> Iterator[tuple[int, socket.socket]]:
    """Accept connections, and yield the rank and the socket of each that proves the secret.

    Strangers are disconnected, and never make it wait. `check` raises if there is no more reason to wait.
    """
    deadline, greeters = time.monotonic() + timeout, dict[socket.socket, _Greeter]()
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                check()
                for key, _ in selector.select(min(left, _POLL)):
                    stream: socket.socket = key.fileobj  # type: ignore[assignment]
                    if stream is server:
                        with contextlib.suppress(OSError), contextlib.ExitStack() as on_failure:
                            accepted = on_failure.enter_context(server.accept()[0])
                            greeters[accepted] = _Greeter(accepted, secret)
                            selector.register(accepted, selectors.EVENT_READ)
                            on_failure.pop_all()
                        continue
                    try:
                        rank = greeters[stream].read()
                    except (OSError, ValueError):  # a stranger
                        selector.unregister(stream)
                        greeters.pop(stream).stream.close()
                        continue
                    if rank is not None:
                        selector.unregister(stream)
                        del greeters[stream]
                        stream.setblocking(True)
                        yield rank, stream
                while len(greeters) > _STRANGERS:
                    stream = next(iter(greeters))
                    selector.unregister(stream)
                    greeters.pop(stream).stream.close()
        finally:
            for stream in greeters:
                stream.close()
