"""A rank's side of a broker that is none, or that fails; and what a rank knows of its memory."""

import errno
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from stretto import cuda
from stretto.onegpu import broker, engine
from stretto.onegpu.allocations import Allocations
from stretto.onegpu.engine import Engine
from stretto.onegpu.errors import GroupError
from stretto.onegpu.member import Member
from stretto.onegpu.messages import Message
from stretto.onegpu.rendezvous import meet
from stretto.onegpu.work import MessageWork, StreamWork
from stretto.onegpu_broker.flags import BLOCKS, EVER, Flags
from stretto.onegpu_broker.wire import (
    PROTOCOL,
    Bye,
    Failed,
    Freed,
    Here,
    Join,
    Joined,
    Leave,
    Place,
    Refused,
    Taken,
    recv_from_rank,
    send_message,
)
from stretto.wire.frames import framed
from stretto.wire.greeting import Hello

NUMBERS = count()
HELLO = Hello(PROTOCOL, bytes(32))


class Impostor:
    """A broker that says what it is told to."""

    def __init__(self) -> None:
        self.address = f"stretto-test-engine-{os.getpid()}-{next(NUMBERS)}"
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(f"\0{self.address}")
        self.server.listen(4)
        self.flags = Flags()
        self.accepted: list[socket.socket] = []

    def accept(self, *words: Any) -> socket.socket:
        """A rank is told these words, of which a Hello or Here has a file."""
        connection, _ = self.server.accept()
        self.accepted.append(connection)
        for word in words:
            if isinstance(word, bytes):
                connection.send(framed(word))
            else:
                send_message(connection, word, self.flags.file if isinstance(word, Hello | Here) else -1)
        return connection

    def serve(self, first: int) -> tuple[Engine, Member, socket.socket]:
        """A rank that has joined a group of two, whose blocks begin here."""

        def answer() -> None:
            connection = self.accept(HELLO)
            assert recv_from_rank(connection)[0] == Join("g", 0, 2)
            send_message(connection, Joined("g", first))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            made = Engine(self.address)
            return made, made.join("g", 0, 2, 30), self.accepted[0]
        finally:
            thread.join()

    def close(self) -> None:
        for connection in (*self.accepted, self.server):
            connection.close()
        os.close(self.flags.file)


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    made = Impostor()
    yield made
    made.close()


def files() -> int:
    gc.collect()  # boards of other tests
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "it does not answer"),
        ((b"nonsense",), "it sent a malformed message (Expected `object`, got `int`)"),
        ((Joined("g", 0),), "it sent no hello"),
        ((Here("g", 0, 0),), "it sent no hello"),
        ((Bye(),), "it sent a malformed message (Invalid value 'Bye' - at `$.type`)"),
        ((msgspec.msgpack.encode(HELLO),), "it sent a Hello with 0 files"),
        (
            (Hello(PROTOCOL + 1, bytes(32)),),
            f"it sent a hello in protocol {PROTOCOL + 1}, and this side speaks {PROTOCOL}",
        ),
    ],
)
def test_what_does_not_greet_as_a_broker_is_none(impostor: Impostor, words: tuple[Any, ...], said: str) -> None:
    before = files()
    thread = threading.Thread(target=lambda: impostor.accept(*words).close())
    thread.start()
    with pytest.raises(GroupError) as error:
        Engine(impostor.address)
    thread.join()
    assert str(error.value) == f"the broker of this machine's ranks cannot be used: {said}"
    assert files() == before


def test_a_broker_that_is_not_there_is_named() -> None:
    with pytest.raises(GroupError, match=r"the broker of this machine's ranks cannot be used: .*Connection refused"):
        Engine("stretto-test-nobody")


def test_a_board_that_is_too_small_is_refused(impostor: Impostor) -> None:
    impostor.flags.file, flags = os.memfd_create("small"), impostor.flags.file
    os.close(flags)
    before = files()
    thread = threading.Thread(target=lambda: impostor.accept(HELLO).close())
    thread.start()
    with pytest.raises(GroupError, match="cannot be used"):
        Engine(impostor.address)
    thread.join()
    assert files() == before


def test_another_users_broker_is_not_talked_to(impostor: Impostor, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(broker, "peer_user", lambda _: user + 1)
    with pytest.raises(GroupError, match=f"it belongs to user {user + 1}, and this process to user {user}$"):
        Engine(impostor.address)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (None, "the broker of this machine's ranks died"),
        (b"nonsense", "failed: it sent a malformed message ("),
        (HELLO, "failed: it sent a second hello"),
        (Bye(), "failed: it sent a malformed message (Invalid value 'Bye'"),
        (Refused("it said no"), "the broker of this machine's ranks disconnected this process: it said no"),
    ],
)
def test_nonsense_is_the_end_of_the_broker(impostor: Impostor, word: Any, said: str) -> None:
    rank, member, connection = impostor.serve(first=4)
    before = files() - 1  # the connection
    for stray in (Taken("unknown", 0, 0), Here("unknown", 0, 0), Joined("unknown", 0), Failed("unknown", "no")):
        send_message(connection, stray, impostor.flags.file if isinstance(stray, Here) else -1)
    if isinstance(word, bytes):
        connection.send(framed(word))
    elif word is not None:
        send_message(connection, word, impostor.flags.file if isinstance(word, Hello) else -1)
    else:
        connection.shutdown(socket.SHUT_RDWR)
    with rank.changed:
        assert rank.changed.wait_for(lambda: rank.lost, 10)
    with pytest.raises(GroupError) as error:
        member.check()
    assert said in str(error.value)
    assert connection.recv(100) == b""  # and a broker that lives knows that we have gone
    done = [impostor.flags.read(impostor.flags.done(block)) for block in range(4, 8)]
    assert done == ([0] * 4 if isinstance(word, Refused) else [EVER] * 4)  # it is for the broker to let streams go
    with pytest.raises(GroupError) as error:
        rank.join("h", 0, 2, 30)
    assert said in str(error.value)
    deadline = time.monotonic() + 10
    while files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert files() == before


def released(member: Member) -> MessageWork:
    """A message on a device that has ended since the broker has released everything."""

    class Released:
        gpu = 0

        @property
        def ended(self) -> bool:
            member.unblock()
            return True

    return MessageWork(member, [cast("Message", Released())], [])


def test_what_has_ended_without_its_data_is_not_complete_though_the_reason_comes_later(impostor: Impostor) -> None:
    rank, member, connection = impostor.serve(first=4)
    member.check()
    later = threading.Timer(0.3, lambda: send_message(connection, Failed("g", "no memory"), -1))
    later.start()
    with pytest.raises(GroupError, match="no memory"):
        released(member).is_completed()
    later.join()
    rank.close()


def test_a_collective_on_a_stream_that_was_released_is_not_complete(impostor: Impostor) -> None:
    rank, member, connection = impostor.serve(first=4)

    class Event:
        def query(self) -> bool:
            member.unblock()
            send_message(connection, Failed("g", "no memory"), -1)
            return True

    with pytest.raises(GroupError, match="no memory"):
        StreamWork(member, Event(), []).is_completed()
    rank.close()


def test_nothing_is_posted_to_a_group_that_was_released(impostor: Impostor) -> None:
    rank, member, connection = impostor.serve(first=4)
    member.unblock()
    send_message(connection, Failed("g", "no memory"), -1)
    with pytest.raises(GroupError, match="no memory"):
        member.receive(torch.zeros(1), 1)
    rank.close()


def test_a_broker_that_dies_as_it_lets_a_rank_in_is_the_end_of_that_group_too(impostor: Impostor) -> None:
    def answer() -> None:
        connection = impostor.accept(HELLO)
        recv_from_rank(connection)
        send_message(connection, Joined("g", 0))
        connection.shutdown(socket.SHUT_RDWR)

    for _ in range(20):
        thread = threading.Thread(target=answer)
        thread.start()
        rank = Engine(impostor.address)
        with pytest.raises(GroupError, match="died"):  # noqa: PT012 - sooner or later, but surely
            member = rank.join("g", 0, 2, 30)
            with rank.changed:
                assert rank.changed.wait_for(lambda rank=rank: rank.lost, 10)  # type: ignore[misc]
            member.check()
        thread.join()


def test_what_has_ended_without_its_data_is_not_complete_though_no_reason_comes(
    impostor: Impostor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.onegpu.member._NEWS", 0.1)
    rank, member, _ = impostor.serve(first=4)
    with pytest.raises(GroupError, match="the broker has ended this group"):
        released(member).is_completed()
    rank.close()


def test_a_file_that_cannot_be_read_fails_one_group_only(impostor: Impostor) -> None:
    rank, member, connection = impostor.serve(first=0)
    move = member.receive(torch.zeros(8), 1)
    assert isinstance(recv_from_rank(connection)[0], Place)
    with open(os.devnull) as empty:
        send_message(connection, Here("g", 1, 0), empty.fileno())
    with pytest.raises(GroupError) as error:
        member.wait(move)
    assert str(error.value) == "rank 0 could not read message 0 from rank 1: its file ends after 0 of 32 bytes"
    assert recv_from_rank(connection)[0] == Failed("g", str(error.value))
    assert not rank.lost


def test_a_place_beyond_the_board_is_nonsense(impostor: Impostor) -> None:
    with pytest.raises(GroupError, match="it sent a place beyond its board"):
        impostor.serve(first=BLOCKS - 1)


class Driver:
    """Numbers allocations, which lie one after the other and are 100 bytes long."""

    def __init__(self) -> None:
        self.numbers = {100 * k: k for k in range(1, 5)}
        self.exports = 0

    def buffer_id(self, address: int) -> int:
        if address // 100 * 100 not in self.numbers:
            raise cuda.DriverError("invalid argument")
        return self.numbers[address // 100 * 100]

    def extent(self, address: int) -> tuple[int, int]:
        return address // 100 * 100, 100

    def export(self, base: int) -> bytes:
        self.exports += 1
        return b"%d" % self.numbers[base]


@pytest.fixture
def memory() -> Iterator[Driver]:
    fake = Driver()
    with mock.patch.multiple(cuda, buffer_id=fake.buffer_id, extent=fake.extent, export=fake.export):
        yield fake


def test_an_allocation_is_exported_once_and_forgotten_when_it_is_freed(memory: Driver) -> None:
    known = Allocations()
    assert known.find(130) is known.find(170)
    assert (known.find(250).base, known.find(250).size, known.find(250).handle) == (200, 100, b"2")
    assert memory.exports == 2
    assert known.take_freed() == []
    del memory.numbers[100]  # freed
    memory.numbers[200] = 9  # freed, and another lies there now
    assert sorted(it.handle for it in known.take_freed()) == [b"1", b"2"]
    assert known.take_freed() == []
    assert known.find(250).handle == b"9"


def test_allocations_are_found_and_freed_by_several_threads(memory: Driver) -> None:
    known, freed, numbers = Allocations(), list[bytes](), count(10)

    def allocate(base: int) -> None:
        for _ in range(300):
            memory.numbers[base] = next(numbers)  # which frees the one before
            known.find(base + 50)

    threads = [threading.Thread(target=allocate, args=(base,)) for base in (100, 200, 300)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        freed += [it.handle for it in known.take_freed()]
    memory.numbers.clear()
    freed += [it.handle for it in known.take_freed()]
    assert sorted(map(int, freed)) == list(range(10, 910))


def test_the_broker_is_told_what_was_freed(impostor: Impostor, memory: Driver) -> None:
    rank, _, connection = impostor.serve(first=0)
    rank.allocations.find(150)
    del memory.numbers[100]
    connection.settimeout(10)
    assert recv_from_rank(connection)[0] == Freed(b"1")
    rank.close()


def test_a_message_that_the_broker_cannot_be_handed_fails_the_group(
    impostor: Impostor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, member, connection = impostor.serve(first=0)

    def tell_without_files(connection: socket.socket, message: Any, file: int = -1) -> None:
        if file >= 0:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        send_message(connection, message)

    monkeypatch.setattr(engine, "send_message", tell_without_files)
    with pytest.raises(GroupError) as error:
        member.send(torch.zeros(8), 1)
    assert str(error.value) == (
        f"rank 0 could not hand message 0 for rank 1 to the broker: [Errno {errno.ETOOMANYREFS}] Too many references"
    )
    assert recv_from_rank(connection)[0] == Failed("g", str(error.value))
    assert not rank.lost


def test_a_rank_that_leaves_groups_of_one_fate_says_so_in_all(
    impostor: Impostor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, member, connection = impostor.serve(first=0)

    def answer() -> None:
        assert recv_from_rank(connection)[0] == Join("h", 0, 2)
        send_message(connection, Joined("h", 4))

    thread = threading.Thread(target=answer)
    thread.start()
    other, post = rank.join("h", 0, 2, 30), rank.post
    thread.join()

    def told(message: Any, file: int = -1) -> None:
        """The broker fails a group as soon as this rank has left the other."""
        post(message, file)
        if message == Leave("g"):
            rank._dispatch(Failed("h", "rank 0 has left"), -1)

    monkeypatch.setattr(rank, "post", told)
    rank.leave("g", "h")
    assert [member.error, other.error] == ["rank 0 has left this group"] * 2


def test_closing_ends_all_threads_and_what_waits(impostor: Impostor) -> None:
    rank, member, connection = impostor.serve(first=0)
    move = member.receive(torch.zeros(8), 1)
    rank.close()
    assert not any(thread.is_alive() for thread in rank._threads)
    with pytest.raises(GroupError, match="rank 0 has left this group"):
        member.wait(move)
    heard = [recv_from_rank(connection)[0] for _ in range(3)]
    assert isinstance(heard[0], Place)
    assert heard[1:] == [Bye(), None]


def test_no_thread_of_ours_is_left_when_a_program_ends(tmp_path: Path) -> None:
    script = f"""
import atexit, threading
atexit.register(lambda: print(sorted(thread.name for thread in threading.enumerate() if "stretto" in thread.name)))
import torch, torch.distributed as dist, stretto.onegpu
dist.init_process_group("onecpu", init_method="file://{tmp_path}/meeting", rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
print(sorted(thread.name for thread in threading.enumerate() if "stretto" in thread.name))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0
    assert result.stdout.splitlines() == ["['stretto onecpu', 'stretto onegpu', 'stretto onegpu watch']", "[]"]


def test_a_forked_child_says_nothing_in_its_parents_name(impostor: Impostor, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, member, connection = impostor.serve(first=0)
    monkeypatch.setattr(Engine, "_all", {impostor.address: rank})
    child = os.fork()
    if not child:
        try:
            forgotten = rank._connection.fileno() < 0 and Engine._all == {} and member.error is not None
            rank.leave("g")
            rank.close()
            os._exit(0 if forgotten else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    member.check()
    rank.send_message(Freed(b"parent"))
    assert recv_from_rank(connection)[0] == Freed(b"parent")
    rank.close()


def test_a_store_that_has_served_a_group_serves_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "any_address", lambda: "address")
    store = dist.HashStore()

    seen = set[str]()

    def meet_both() -> None:
        keys = [meet(store, rank, 2)[1] for rank in (0, 1)]
        assert keys[0] == keys[1]
        assert keys[0] not in seen
        seen.add(keys[0])

    for _ in range(3):
        meet_both()
    meet(store, 0, 2)  # a group that the other rank never came to
    meet_both()
    store.add("asked 1", 1)  # one that rank 0 never came to
    keys = list[str]()
    other = threading.Thread(target=lambda: keys.append(meet(store, 1, 2)[1]))
    asked = store.add("asked 1", 0)
    other.start()
    while store.add("asked 1", 0) == asked:
        pass
    assert meet(store, 0, 2)[1] not in seen
    other.join(10)
    assert keys
    assert keys[0] not in seen
