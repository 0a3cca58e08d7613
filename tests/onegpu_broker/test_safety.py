"""Whatever a process says to the broker, or does not: it is that process's end at most, and nobody else's."""

import array
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.onegpu_broker import clients, serve
from stretto.onegpu_broker.flags import RING
from stretto.onegpu_broker.link_model import SimulatedLink
from stretto.onegpu_broker.registry import GroupRegistry
from stretto.onegpu_broker.serve import Broker
from stretto.onegpu_broker.wire import (
    PROTOCOL,
    Bye,
    Failed,
    Freed,
    FromBroker,
    Here,
    Join,
    Joined,
    Leave,
    Place,
    Refused,
    SetLink,
    ShareFate,
    Taken,
    recv_from_broker,
    send_message,
)
from stretto.wire.frames import framed, pack_message
from stretto.wire.greeting import Hello

NAMES = count()
HELLO = Hello(PROTOCOL, bytes(32))
RW = "reading and writing"
VALID = [
    Join("g", 0, 2),
    Place("g", 1, 0, True, 0),
    Place("g", 1, 0, False, 8),
    Place("g", 1, 0, True, 8, 0, bytes(64), 0, 8),
    Taken("g", 1, 0),
    Failed("g", "no more"),
    Leave("g"),
    SetLink("g", SimulatedLink(1.0)),
    ShareFate("g", "h"),
    Freed(bytes(64)),
    Bye(),
    HELLO,
    Joined("g", 0),
    Here("g", 1, 0),
    Refused("no"),
]


class Talker:
    """A process of the same user, as the broker sees it."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(name)
        message, file = recv_from_broker(self.socket)
        assert isinstance(message, Hello)
        os.close(file)

    def say(self, message: Any, files: int = 0, *, size: int = 0) -> None:
        """A message, or any bytes, and files of a size."""
        data = framed(message) if isinstance(message, bytes) else pack_message(message)
        made = [os.memfd_create("test") for _ in range(files)]
        for file in made:
            os.ftruncate(file, size)
        try:
            attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", made))] if made else []
            self.socket.sendmsg([data], attached)
        finally:
            for file in made:
                os.close(file)

    def hear(self) -> FromBroker | None:
        message, file = recv_from_broker(self.socket)
        if file >= 0:
            os.close(file)
        return message

    def hear_last(self) -> FromBroker | None:
        """What was said last before the connection ended."""
        last = None
        while (message := self.hear()) is not None:
            last = message
        return last


class Running:
    """A broker in a process of its own, or in a thread."""

    def __init__(self, *, in_thread: bool) -> None:
        self.name = f"\0stretto-test-{os.getpid()}-{next(NAMES)}"
        self.stack = contextlib.ExitStack()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind(self.name)
        server.listen(64)
        self.thread = self.process = None
        if in_thread:
            broker = Broker(server)
            self.stack.callback(server.close)
            self.thread = threading.Thread(target=broker.serve, daemon=True)
            self.thread.start()
            self.stack.callback(self.thread.join, 10)
            self.stack.callback(setattr, broker, "_until", 0.0)  # once all ranks are disconnected
        else:
            with server:
                file = server.fileno()
                command = [sys.executable, "-m", "stretto.onegpu_broker.serve", str(file)]
                self.process = subprocess.Popen(command, pass_fds=[file])
            self.stack.callback(self.process.wait, 10)
            self.stack.callback(self.process.kill)

    def connect(self) -> Talker:
        talker = Talker(self.name)
        self.stack.callback(talker.socket.close)
        return talker

    def pair(self) -> tuple[Talker, Talker, str]:
        """The two ranks of a group."""
        ranks, group = (self.connect(), self.connect()), f"pair {next(NAMES)}"
        for number, rank in enumerate(ranks):
            rank.say(Join(group, number, 2))
            assert isinstance(rank.hear(), Joined)
        return *ranks, group

    def files(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def has_ended(self) -> bool:
        """Whether it has in a few seconds."""
        if self.thread is not None:
            self.thread.join(10)
            return not self.thread.is_alive()
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        return self.process.returncode is not None


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start(*, in_thread: bool = False) -> Running:
            running = Running(in_thread=in_thread)
            stack.callback(running.stack.close)
            return running

        yield start


def exchange(pair: tuple[Talker, Talker, str], number: int) -> None:
    """A message of 8 bytes on the host goes from the first to the second."""
    source, target, group = pair
    source.say(Place(group, 1, number, True, 8), 1, size=8)
    target.say(Place(group, 0, number, False, 8))
    assert target.hear() == Here(group, 0, number)
    target.say(Taken(group, 0, number))
    assert source.hear() == Taken(group, 1, number)


def settled(read: Callable[[], int], most: int) -> int:
    """What is read, once it is at most this, or after a few seconds."""
    deadline = time.monotonic() + 10
    while (found := read()) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("message", "files", "said"),
    [
        (b"\xff\xff", 0, "it sent a malformed message (Expected `object`, got `int`)"),
        (b"x" * 60_000, 0, "it sent a malformed message ("),
        (b"x" * 70_000, 0, "it sent a message of more than 65536 bytes"),
        (msgspec.msgpack.encode({"type": "x" * 60_000}), 1, "it sent a malformed message (Invalid value 'xxx"),
        (HELLO, 0, "it sent a malformed message (Invalid value 'Hello'"),
        (Joined("g", 0), 0, "it sent a malformed message (Invalid value 'Joined'"),
        (Here("g", 0, 0), 1, "it sent a malformed message (Invalid value 'Here'"),
        (Refused("no"), 0, "it sent a malformed message (Invalid value 'Refused'"),
        (Join("g", 0, 0), 0, "it sent a malformed message (Expected `int` >= 1 - at `$.size`)"),
        (Join("g", 0, -1), 0, "it sent a malformed message (Expected `int` >= 1 - at `$.size`)"),
        (Join("g", -1, 2), 0, "it sent a malformed message (Expected `int` >= 0 - at `$.rank`)"),
        (Join("g", 2, 2), 0, "it sent a Join as rank 2 of 2"),
        (Join("g" * 1000, 0, 2), 0, "it sent a malformed message (Expected `str` of length <= 128 - at `$.group`)"),
        (Join("g", 0, 2), 1, "it sent a Join with 1 files"),
        (Join("g", 0, 2), 7, "it sent a Join with 7 files"),
        (Join("mine", 0, 2), 0, "it sent a Join as rank 0 to a group that has this rank or process already"),
        (Join("mine", 1, 2), 0, "it sent a Join as rank 1 to a group that has this rank or process already"),
        (Join("mine", 1, 3), 0, "it sent a Join as rank 1 of 3 to a group of 2"),
        (Join("other", 1, 2), 0, "it sent a Join as rank 1 to a group that has this rank or process already"),
        (Place("mine", 2, 0, True, 0), 1, "it sent a message for rank 2 of a group of 2"),
        (Place("mine", 1, 1, True, 0), 1, "it sent message 1 where message 0 is next"),
        (Place("mine", 1, 0, True, -8), 1, "it sent a malformed message (Expected `int` >= 0 - at `$.count`)"),
        (Place("mine", 1, 0, True, 9), 1, "it sent a message of 9 bytes in a file of 0"),
        (Place("mine", 1, 0, True, 0), 0, "it sent a Place with 0 files"),
        (Place("mine", 1, 0, True, 0), 2, "it sent a Place with 2 files"),
        (Place("mine", 1, 0, False, 0), 1, "it sent a Place with 1 files"),
        (Place("mine", 1, 0, True, 8, 0, b"short", 0, 8), 0, "it sent a place of 8 bytes that is not within its all"),
        (Place("mine", 1, 0, True, 8, 0, bytes(64), 1, 8), 0, "it sent a place of 8 bytes that is not within its all"),
        (Place("mine", 1, 0, True, 8, 0, bytes(65), 0, 8), 0, "it sent a malformed message (Expected `bytes` of leng"),
        (Taken("mine", 1, 0), 0, "it sent that it has read message 0, which it was not given"),
        (SetLink("mine", SimulatedLink(0.0)), 0, "it sent a link that no message can pass"),
        (SetLink("mine", SimulatedLink(float("nan"))), 0, "it sent a link that no message can pass"),
    ],
)
def test_nonsense_disconnects_its_sender_with_a_reason(
    run: Callable[..., Running], message: Any, files: int, said: str
) -> None:
    broker = run(in_thread=True)
    pair, other, offender, partner = broker.pair(), broker.connect(), broker.connect(), broker.connect()
    other.say(Join("other", 1, 2))
    assert isinstance(other.hear(), Joined)
    if not isinstance(message, Join) or message.group != "other":
        for rank, talker in enumerate((offender, partner)):
            talker.say(Join("mine", rank, 2))
            assert isinstance(talker.hear(), Joined)
    offender.say(message, files)
    last = offender.hear_last()
    assert isinstance(last, Refused)
    assert last.why.startswith(said)
    assert len(last.why) < 500
    if not isinstance(message, Join) or message.group != "other":
        assert partner.hear() == Failed("mine", f"rank 0 was disconnected by the broker: {last.why}")
    exchange(pair, 0)
    assert other.socket.fileno() >= 0


def test_a_handle_that_is_none_fails_its_group_only(run: Callable[..., Running]) -> None:
    broker = run()
    good, pair = broker.pair(), broker.pair()
    group = pair[2]
    for rank, talker in enumerate(pair[:2]):
        talker.say(Place(group, 1 - rank, 0, rank == 0, 8, 0, bytes([1]) * 64, 0, 8))
    for talker in pair[:2]:
        message = talker.hear()
        assert isinstance(message, Failed)
        assert message.why.startswith("the broker could not move a message from rank 0: ")
    exchange(good, 0)


def test_a_size_that_no_board_has_room_for_is_answered(run: Callable[..., Running]) -> None:
    broker = run(in_thread=True)
    talker = broker.connect()
    for size in (91, 10**9):
        talker.say(Join("g", 0, size))
        assert talker.hear() == Failed("g", "too many groups: the broker has no room for more")
    exchange(broker.pair(), 0)


def test_a_rank_is_not_ahead_of_the_other_by_more_than_the_board_has(run: Callable[..., Running]) -> None:
    broker = run(in_thread=True)
    source, target, group = broker.pair()
    for number in range(RING + 1):
        source.say(Place(group, 1, number, False, 8))
    assert source.hear_last() == Refused("it sent more than 256 messages at a time")
    assert isinstance(target.hear(), Failed)


@pytest.mark.parametrize("seed", range(4))
def test_random_messages_end_nothing_and_leave_nothing(run: Callable[..., Running], seed: int) -> None:
    """Valid ones, in any order and with bytes changed, files attached, and connections that end in between."""
    order = random.Random(seed)
    broker = run()
    pair = broker.pair()
    exchange(pair, 0)
    files = broker.files()
    talker, number = None, 0
    for _ in range(1500):
        if talker is None or order.random() < 0.05:
            if talker is not None:
                talker.socket.close()
            talker = broker.connect()
        data = bytearray(msgspec.msgpack.encode(order.choice(VALID)))
        for _ in range(order.choice((0, 0, 0, 1, 3))):
            data[order.randrange(len(data))] = order.randrange(256)
        try:
            talker.say(bytes(data), order.choice((0, 0, 1, 1, 3)), size=order.choice((0, 8)))
        except OSError:
            talker.socket.close()
            talker = None
        if order.random() < 0.02:
            number += 1
            exchange(pair, number)
    if talker is not None:
        talker.socket.close()
    exchange(pair, number + 1)
    assert settled(broker.files, files) == files


def test_joins_good_and_bad_leave_no_files(run: Callable[..., Running]) -> None:
    broker = run()
    pair = broker.pair()
    files = broker.files()
    for number in range(2000):
        with Talker(broker.name).socket as joined:
            good = number % 2 == 0
            send_message(joined, Join(f"g{number}", 0, 2) if good else Join("g", 5, 2), -1 if number % 4 < 2 else 1)
            if number % 4 == 0:
                assert isinstance(recv_from_broker(joined)[0], Joined)
    exchange(pair, 0)
    assert settled(broker.files, files) == files


def test_a_rank_that_never_reads_holds_nobody_up(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_PATIENCE", 0.5)
    broker = run(in_thread=True)
    pair, (partner, deaf, group) = broker.pair(), broker.pair()
    with contextlib.suppress(ConnectionError):
        for number in range(2000):  # answers are more than its socket holds
            deaf.say(Join(f"{group} {number}", 0, 1))
    for number in range(100):
        exchange(pair, number)
    assert partner.hear() == Failed(group, "rank 1 was disconnected by the broker: it does not read what it is told")
    exchange(pair, 100)


def test_a_rank_that_reads_late_gets_everything(run: Callable[..., Running]) -> None:
    broker = run(in_thread=True)
    talker = broker.connect()
    for number in range(2000):
        talker.say(Join(f"g{number}", 0, 1))
    assert [talker.hear() for _ in range(2000)] == [Joined(f"g{number}", number) for number in range(2000)]


def test_an_error_of_our_own_disconnects_one_rank(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(GroupRegistry, "join", fails)
    broker = run(in_thread=True)
    bystander, talker = broker.connect(), broker.connect()
    talker.say(Join("g", 0, 1))
    assert talker.hear_last() == Refused("it sent what the broker failed on (KeyError: 'oops')")
    bystander.say(Leave("g"))
    bystander.say(b"nonsense")
    assert isinstance(bystander.hear(), Refused)


def test_a_stranger_that_leaves_does_not_end_it(run: Callable[..., Running]) -> None:
    broker = run(in_thread=True)
    for word in (None, Bye(), b"nonsense"):
        stranger = broker.connect()
        if word is not None:
            stranger.say(word)
            assert not isinstance(stranger.hear_last(), Hello)
        stranger.socket.close()
    source, target, _ = pair = broker.pair()
    exchange(pair, 0)
    for talker in (source, target):
        talker.say(Bye())
    assert broker.has_ended()


def test_a_stranger_does_not_keep_it_alive(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    broker = run(in_thread=True)
    rank = broker.connect()
    rank.say(Join("g", 0, 1))
    assert rank.hear() == Joined("g", 0)
    broker.connect()
    monkeypatch.setattr(serve, "_GRACE", 0.5)
    rank.socket.close()
    assert broker.has_ended()


def test_another_users_process_is_not_let_in(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    broker = run(in_thread=True)
    pair = broker.pair()
    monkeypatch.setattr(serve, "peer_user", lambda _: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(broker.name)
        assert recv_from_broker(other) == (None, -1)
    exchange(pair, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_a_process_of_another_user_is_not_let_in(run: Callable[..., Running]) -> None:
    broker = run()
    script = (
        "import socket, sys\n"
        "connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "connection.connect('\\0' + sys.argv[1])\n"
        "print(connection.recv(1000))\n"
    )
    command = [sys._base_executable, "-I", "-S", "-c", script, broker.name[1:]]
    python = Path("/usr/bin/python3")  # ours may lie where nobody else can read
    if python.exists():
        command[0] = str(python)
    result = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/")
    assert (result.stdout, result.stderr) == ("b''\n", "")
    exchange(broker.pair(), 0)


@pytest.mark.parametrize("kind", ["its own socket", "a folder", "a file on disk", "read only"])
def test_a_file_that_is_no_plain_memory_disconnects_its_sender(
    run: Callable[..., Running], tmp_path: Path, kind: str
) -> None:
    broker = run(in_thread=True)
    source, target, group = broker.pair()
    match kind:
        case "its own socket":
            file = os.dup(source.socket.fileno())
        case "a folder":
            file = os.open(tmp_path, os.O_RDONLY)
        case "a file on disk":
            file = os.open(Path(__file__), os.O_RDONLY)
        case _:
            made = os.memfd_create("test")
            file = os.open(f"/proc/self/fd/{made}", os.O_RDONLY)
            os.close(made)
    send_message(source.socket, Place(group, 1, 0, True, os.fstat(file).st_size), file)
    os.close(file)
    last = source.hear_last()
    assert isinstance(last, Refused)
    assert last.why in ("it sent a file that does not lie in memory", f"it sent a file that is not open for {RW}")
    assert target.hear() == Failed(group, f"rank 0 was disconnected by the broker: {last.why}")


def test_a_receiver_that_leaves_with_a_message_unread_fails_its_sender(run: Callable[..., Running]) -> None:
    broker = run(in_thread=True)
    source, target, group = broker.pair()
    source.say(Place(group, 1, 0, True, 8), 1, size=8)
    target.say(Place(group, 0, 0, False, 8))
    assert target.hear() == Here(group, 0, 0)
    target.say(Leave(group))
    assert source.hear() == Failed(group, "rank 1 has left")


def test_ranks_at_different_collectives_fail_their_group(run: Callable[..., Running]) -> None:
    broker = run(in_thread=True)
    source, target, group = broker.pair()
    source.say(Place(group, 1, 0, True, 8, turn=3), 1, size=8)
    target.say(Place(group, 0, 0, False, 8, turn=4))
    for talker in (source, target):
        message = talker.hear()
        assert isinstance(message, Failed)
        assert message.why.startswith("rank 0 is at collective 3 and rank 1 at 4: ")


def test_what_waits_for_a_process_that_does_not_read_is_bounded(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_MOST_BYTES", 100_000)
    broker = run(in_thread=True)
    partner, deaf, group = broker.pair()
    partner.say(Join("long", 0, 2))
    assert isinstance(partner.hear(), Joined)
    partner.say(Failed("long", "x" * 1000))
    assert isinstance(partner.hear(), Failed)
    with contextlib.suppress(ConnectionError):
        for _ in range(5000):
            deaf.say(Join("long", 1, 2))
    assert partner.hear() == Failed(group, "rank 1 was disconnected by the broker: it does not read what it is told")


def test_idle_strangers_make_room_for_ranks(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_MOST_CLIENTS", 4)
    broker = run(in_thread=True)
    strangers = [broker.connect() for _ in range(4)]
    pair = broker.pair()
    for stranger in strangers[:2]:
        assert stranger.hear() == Refused("it has joined no group, and others want to be let in")
    exchange(pair, 0)
    broker.pair()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(broker.name)
        assert recv_from_broker(other) == (None, -1)  # all that are there have joined


def test_only_groups_that_were_left_are_looked_at_for_room() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        broker = Broker(server)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client = clients.Client(ours, broker._selector)
        broker._clients.add(client)
        with theirs:
            broker._dispatch(client, Join("left", 0, 64), -1)
            broker._dispatch(client, Join("kept", 0, 64), -1)
            assert broker._groups.abandoned == {}
            broker._dispatch(client, Leave("left"), -1)
            assert list(broker._groups.abandoned) == ["left"]
            broker._dispatch(client, Join("new", 0, 64), -1)
            assert (list(broker._groups.by_name), broker._groups.abandoned) == (["kept", "new"], {})
            broker._dispatch(client, Bye(), -1)
