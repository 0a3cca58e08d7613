"""The ring: ranks find their neighbours, whoever else comes to their doors."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from stretto.execute import ring
from stretto.ir.errors import PeerError


def _doors(stack: ExitStack, ranks: int) -> tuple[list[socket.socket], list[ring.ListenAddress]]:
    servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200)) for _ in range(ranks)]
    return servers, [ring.ListenAddress("127.0.0.1", it.getsockname()[1], f"{k:032}") for k, it in enumerate(servers)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_strangers_are_sent_away(ranks: int) -> None:
    with ExitStack() as stack:
        servers, addresses = _doors(stack, ranks)
        strangers = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"x" * 40):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", addresses[0].port)))
            stranger.sendall(said)
            if not said:
                stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        with ThreadPoolExecutor(ranks) as pool:
            made = list(pool.map(lambda rank: ring.neighbours(rank, addresses, servers[rank]), range(ranks)))
        for peers in made:
            for stream in peers.values():
                stack.enter_context(stream)
        for rank, peers in enumerate(made):
            assert set(peers) == {(rank + 1) % ranks, (rank - 1) % ranks}
            for peer, stream in peers.items():
                stream.sendall(f"{rank} to {peer};".encode())
        for rank, peers in enumerate(made):
            for peer, stream in peers.items():
                stream.settimeout(10)
                assert stream.recv(100) == f"{peer} to {rank};".encode()
        for stranger in strangers:
            stranger.settimeout(10)
            with suppress(ConnectionResetError):  # with what it had said unread
                while said := stranger.recv(100):  # a hello, and nothing that would be a secret
                    assert b"Proof" not in said


def test_strangers_who_say_nothing_delay_nobody() -> None:
    with ExitStack() as stack:
        servers, addresses = _doors(stack, 3)
        for door in addresses:
            for _ in range(100):  # more than may stand there
                stack.enter_context(socket.create_connection(("127.0.0.1", door.port)))
        begun = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda rank: ring.neighbours(rank, addresses, servers[rank]), range(3)))
        assert time.monotonic() - begun < 3
        for peers in made:
            for stream in peers.values():
                stream.close()


def test_a_neighbour_that_does_not_come_is_named() -> None:
    with ExitStack() as stack:
        servers, addresses = _doors(stack, 3)
        with pytest.raises(PeerError, match="rank 2 did not connect to rank 0 within 0 s"):
            ring.neighbours(0, addresses, servers[0], timeout=0.2)
        servers[2].close()
        with ThreadPoolExecutor(1) as pool:
            came = pool.submit(ring.connection_to, addresses[1], 0, 1)
            with pytest.raises(PeerError, match="rank 1 cannot reach rank 2 at 127"):
                ring.neighbours(1, addresses, servers[1], timeout=10)
            came.result(10).close()


def test_who_does_not_know_the_word_is_not_let_in_and_learns_nothing() -> None:
    with ExitStack() as stack:
        (server,), (door,) = _doors(stack, 1)
        came = ring.accepted_ranks(server, door.word, timeout=5, check=lambda: None)
        with ThreadPoolExecutor(2) as pool:
            wrong = pool.submit(ring.connection_to, ring.ListenAddress(door.host, door.port, "x" * 32), 3, 0, timeout=5)
            right = pool.submit(ring.connection_to, door, 7, 0, timeout=5)
            rank, stream = next(came)
            stack.enter_context(stream)
            stack.enter_context(right.result(10))
            list(came)
            assert rank == 7
            with pytest.raises(PeerError, match=r"rank 3 came to rank 0 at .*, which did not accept the secret"):
                wrong.result(10)


def test_one_rank_has_no_neighbours() -> None:
    with ExitStack() as stack:
        servers, addresses = _doors(stack, 1)
        assert ring.neighbours(0, addresses, servers[0]) == {}
