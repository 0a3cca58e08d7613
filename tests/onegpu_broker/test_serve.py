"""The broker over a device that is not there: its streams are queues, its copies are written down."""

import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stretto import cuda
from stretto.onegpu_broker.clients import Client
from stretto.onegpu_broker.flags import EVER, Flags
from stretto.onegpu_broker.groups import GroupState
from stretto.onegpu_broker.link_model import SimulatedLink
from stretto.onegpu_broker.serve import Broker
from stretto.onegpu_broker.wire import (
    Bye,
    Failed,
    Freed,
    FromBroker,
    FromRank,
    Join,
    Joined,
    Leave,
    Place,
    SetLink,
    ShareFate,
    recv_from_broker,
)
from stretto.wire.frames import MalformedMessage


class Device:
    """Streams that do what is next on them when they can. Allocations are known by their handles."""

    def __init__(self, flags: Callable[[], Flags]) -> None:
        self._flags, self._streams = flags, dict[int, deque[Any]]()
        self.copies: list[tuple[int, int, int]] = []
        self.opened: set[int] = set()
        self.free = 4000

    def make_streams(self, device: int, count: int) -> list[int]:
        assert device == 0
        self._streams = {k + 1: deque() for k in range(count)}
        return list(self._streams)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._streams[stream].append(lambda: self._flags().read(address // 4) >= value)

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._streams[stream].append(lambda: self._written(address // 4, value))

    def copy(self, stream: int, target: int, source: int, count: int) -> None:
        self._streams[stream].append(lambda: self._copied(source, target, count))

    def synchronize(self, stream: int) -> None:
        self.run()
        assert not self._streams[stream], "a stream would wait for good"

    def open_shared(self, handle: bytes) -> int:
        self.opened.add(int.from_bytes(handle))
        return int.from_bytes(handle)

    def close_shared(self, address: int) -> None:
        """As the driver does, behind all that is queued."""
        self.run()
        assert not any(self._streams.values()), "the broker would wait for a rank"
        self.opened.remove(address)

    def memory(self) -> tuple[int, int]:
        return self.free, 8000

    def run(self, order: random.Random | None = None) -> None:
        """All that can be done, stream after stream, in any order."""
        moved = True
        while moved:
            moved = False
            streams = list(self._streams.values())
            if order is not None:
                order.shuffle(streams)
            for stream in streams:
                while stream and stream[0]():
                    stream.popleft()
                    moved = True

    def _written(self, word: int, value: int) -> bool:
        assert self._flags().read(word) < value, "a count went back"
        self._flags().write(word, value)
        return True

    def _copied(self, source: int, target: int, count: int) -> bool:
        assert {source, target} <= self.opened, "it was closed too soon"
        self.copies.append((source, target, count))
        return True


class World:
    """A broker and ranks that speak for themselves."""

    def __init__(self, broker: Broker, device: Device, ranks: int) -> None:
        self.broker, self.device, self.ranks = broker, device, ranks
        self.clients, self.ends = list[Client](), list[socket.socket]()
        for rank in range(ranks):
            self.connect()
            self.say(rank, Join("g", rank, ranks))
            self.hear(rank)
        self.group = broker._groups.by_name["g"]

    def connect(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.clients.append(Client(ours, self.broker._selector))
        self.broker._clients.add(self.clients[-1])
        theirs.settimeout(30)
        self.ends.append(theirs)

    def say(self, rank: int, message: FromRank) -> None:
        self.broker._dispatch(self.clients[rank], message, -1)

    def hear(self, rank: int) -> FromBroker | None:
        return recv_from_broker(self.ends[rank])[0]

    def look(self) -> None:
        for group, why in self.broker._copies.poll():
            self.broker._groups.fail(group, why)

    def place(self, rank: int, peer: int, number: int, *, sends: bool, count: int = 8) -> None:
        handle = (1000 * rank + number + 1).to_bytes(cuda.HANDLE_BYTES)
        self.say(rank, Place("g", peer, number, sends, count, 0, handle, 0, count))

    def flag(self, source: int, target: int, number: int, *, sender: bool) -> None:
        flags, block = self.broker._flags, self.block(source, target)
        flags.write(flags.ready(block, number, sender=sender), number + 1)

    def block(self, source: int, target: int) -> int:
        return self.group.first + source * self.ranks + target

    def done(self, source: int, target: int) -> int:
        return self.broker._flags.read(self.broker._flags.done(self.block(source, target)))

    def close(self) -> None:
        for client in self.broker._clients:
            client.close()
        self.broker._server.close()
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("cores", [2, 3])
def test_it_stays_awake_while_messages_flow_only_where_cores_are_free(
    world: "Callable[[int], World]", monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    made = world(2)
    assert not made.broker._is_awake()
    made.say(0, Place("g", 1, 0, False, 8))  # on the host
    assert not made.broker._is_awake()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made.say(1, Place("g", 0, 0, True, 8, 0, (1).to_bytes(cuda.HANDLE_BYTES), 0, 8))
    assert made.broker._is_awake() == (cores > 2)
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    assert not made.broker._is_awake()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], World]]:
    made: list[World] = []

    def make(ranks: int) -> World:
        broker = Broker(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        device = Device(lambda: broker._flags)
        for name in ("make_streams", "wait_value", "write_value", "copy", "synchronize"):
            monkeypatch.setattr(cuda, name, getattr(device, name))
        for name in ("open_shared", "close_shared", "memory"):
            monkeypatch.setattr(cuda, name, getattr(device, name))
        monkeypatch.setattr(cuda, "register_host", lambda *_: 0)
        made.append(World(broker, device, ranks))
        return made[-1]

    yield make
    for it in made:
        it.close()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_first_every_message_is_copied_once_and_in_order(
    world: Callable[[int], World], seed: int
) -> None:
    """With more channels than may wait, sides and flags in any order that a rank's own order allows."""
    order = random.Random(seed)
    it = world(order.choice((2, 4, 7)))
    channels = [(a, b) for a in range(it.ranks) for b in range(it.ranks) if a != b]
    per = 8
    todo: dict[Any, list[Callable[[], None]]] = {}
    for a, b in channels:
        for number in range(per):
            for sends in (True, False):
                rank, peer = (a, b) if sends else (b, a)
                todo.setdefault(("place", a, b, sends), []).append(
                    lambda rank=rank, peer=peer, number=number, sends=sends: it.place(rank, peer, number, sends=sends)
                )
                todo.setdefault(("flag", a, b, sends), []).append(
                    lambda a=a, b=b, number=number, sends=sends: it.flag(a, b, number, sender=sends)
                )
    while todo:
        key = order.choice(sorted(todo))
        what, *rest = key
        if what == "flag" and len(todo.get(("place", *rest), [])) >= len(todo[key]):
            continue  # a rank says where its bytes lie before its stream can get there
        todo[key].pop(0)()
        if not todo[key]:
            del todo[key]
        if order.random() < 0.3:
            it.look()
        if order.random() < 0.1:
            it.device.run(order)
    for _ in range(per):
        it.look()
        it.device.run(order)
    assert all(it.done(a, b) == per for a, b in channels)
    expected = [(1000 * a + n + 1, 1000 * b + n + 1, 8) for a, b in channels for n in range(per)]
    assert sorted(it.device.copies) == sorted(expected)
    for a, b in channels:
        copies = [source for source, target, _ in it.device.copies if (source // 1000, target // 1000) == (a, b)]
        assert copies == sorted(copies)
    assert not it.broker._copies.watched


def test_nothing_is_copied_before_both_sides_are_ready(world: Callable[[int], World]) -> None:
    it = world(2)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    it.flag(0, 1, 0, sender=True)
    it.device.run()
    assert not it.device.copies
    it.flag(0, 1, 0, sender=False)
    it.device.run()
    assert (it.device.copies, it.done(0, 1)) == ([(1, 1001, 8)], 1)


def test_a_link_takes_its_time_and_one_message_after_the_other(world: Callable[[int], World]) -> None:
    it = world(2)
    it.say(0, SetLink("g", SimulatedLink(1e-6, 0)))  # a kilobyte a second
    for number in range(2):
        it.place(0, 1, number, sends=True, count=50)
        it.place(1, 0, number, sends=False, count=50)
        it.flag(0, 1, number, sender=True)
        it.flag(0, 1, number, sender=False)
    start, seen = time.perf_counter(), {}
    while it.done(0, 1) < 2 and time.perf_counter() - start < 10:
        it.look()
        it.device.run()
        seen.setdefault(it.done(0, 1), time.perf_counter() - start)
    assert seen.get(1, seen[2]) >= 0.05  # which nobody looked for, if this process had to wait in between
    assert seen[2] >= 0.1


def test_when_a_rank_dies_nobody_waits(world: Callable[[int], World]) -> None:
    it = world(3)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    it.flag(0, 1, 0, sender=True)
    it.broker._remove(it.clients[1], "died")
    assert all(it.done(a, b) == EVER for a in range(3) for b in range(3))
    for rank in (0, 2):
        assert it.hear(rank) == Failed("g", "rank 1 died")


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_a_group_that_fails_is_marked_before_a_stream_goes_on_without_its_data(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    it = world(ranks)
    channels = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    for a, b in channels:  # what has been sent is awaited, but its sender's stream has not got there
        it.place(a, b, 0, sends=True)
        it.place(b, a, 0, sends=False)
        it.flag(a, b, 0, sender=False)
    it.device.run()
    seen: list[tuple[bool, bool]] = []
    write = it.broker._flags.write

    def and_the_device_runs(word: int, number: int) -> None:
        write(word, number)
        if number == EVER:
            it.device.run()
        seen.append((any(it.done(a, b) for a, b in channels), it.done(0, 0) == EVER))

    monkeypatch.setattr(it.broker._flags, "write", and_the_device_runs)
    it.broker._remove(it.clients[1], "died")
    assert (True, True) in seen
    assert (True, False) not in seen


def together(it: World, names: str) -> list[GroupState]:
    """More groups of the same ranks, with the first of its fate."""
    for name in names:
        for rank in range(it.ranks):
            it.say(rank, Join(name, rank, it.ranks))
            it.hear(rank)
            it.say(rank, ShareFate(name, "g"))
    it.say(0, ShareFate("g", "g"))
    return [it.broker._groups.by_name[name] for name in names]


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_groups_of_one_fate_are_all_marked_before_a_stream_of_any_goes_on(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Else it might send what it makes of nothing through another one, whose ranks would find no fault with it."""
    it = world(2)
    first, second = together(it, "hi")
    it.say(0, Join("alone", 0, 2))
    it.hear(0)
    done, fates = it.broker._flags.done, (it.group, first, second)
    unblocked: list[list[bool]] = []
    unblock = it.broker._copies.unblock

    def noted(group: GroupState) -> None:
        unblocked.append([it.broker._flags.read(done(one.first)) == EVER for one in fates])
        unblock(group)

    monkeypatch.setattr(it.broker._copies, "unblock", noted)
    if how == "dies":
        it.broker._remove(it.clients[1], "died")
    else:
        it.say(0, Failed("h", "no memory"))
    assert unblocked == [[True] * 3] * 3
    why = "rank 1 died" if how == "dies" else "no memory"
    assert [it.hear(0) for _ in fates] == [Failed(name, why) for name in "ghi"]
    assert not it.broker._groups.by_name["alone"].failed
    it.say(0, ShareFate("alone", "g"))  # too late to be spared
    assert it.hear(0) == Failed("alone", why)


def test_a_group_that_failed_before_its_fate_was_known_takes_the_others_with_it(
    world: Callable[[int], World],
) -> None:
    it = world(2)
    together(it, "h")
    it.say(0, Join("alone", 0, 2))
    it.hear(0)
    it.say(0, Failed("alone", "no memory"))
    assert it.hear(0) == Failed("alone", "no memory")
    it.say(0, ShareFate("alone", "g"))
    for rank in range(2):
        assert [it.hear(rank) for _ in "gh"] == [Failed(name, "no memory") for name in "gh"]


def test_blocks_are_used_again_once_all_have_left(world: Callable[[int], World]) -> None:
    it = world(2)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    for sender in (True, False):
        it.flag(0, 1, 0, sender=sender)
    it.device.run()
    for rank in range(2):
        it.broker._groups.leave(it.group, rank)
    it.say(0, Join("h", 0, 2))
    assert it.broker._groups.by_name["h"].first == it.group.first
    assert it.done(0, 1) == 0


def test_whoever_is_no_member_cannot_leave(world: Callable[[int], World]) -> None:
    it = world(2)
    it.connect()
    for _ in range(2):
        it.say(2, Leave("g"))
    it.say(0, Leave("g"))
    assert "g" in it.broker._groups.by_name


def test_a_peer_that_is_not_there_is_refused(world: Callable[[int], World]) -> None:
    it = world(2)
    with pytest.raises(MalformedMessage, match="a message for rank 7 of a group of 2"):
        it.place(0, 7, 0, sends=True)
    assert not it.group.channels


def test_a_channel_gets_a_stream_to_wait_on_only_when_all_before_it_was_copied(world: Callable[[int], World]) -> None:
    """Two streams would otherwise count its messages, and the count could go back."""
    it = world(6)
    *others, (a, b) = [(a, b) for a in range(6) for b in range(6) if a != b][:25]
    for source, target in others:  # all streams that may wait are taken
        it.place(source, target, 0, sends=True)
        it.place(target, source, 0, sends=False)
    for number in range(2):
        it.place(a, b, number, sends=True)
        if number:
            block = it.block(*others[0])
            it.broker._flags.write(it.broker._flags.done(block), 1)  # one of them is free again
        it.place(b, a, number, sends=False)
        for sender in (True, False):
            it.flag(a, b, number, sender=sender)
        it.look()
    assert it.block(a, b) not in it.broker._copies.streams.armed
    it.device.run()
    assert it.done(a, b) == 2


def test_a_failure_ends_though_streams_were_given_on(world: Callable[[int], World]) -> None:
    """A stream that one channel gave back waits for another's flags by then."""
    it = world(6)
    channels = [(a, b) for a in range(6) for b in range(6) if a != b][:25]
    for k, (source, target) in enumerate(channels):
        it.place(source, target, 0, sends=True)
        it.place(target, source, 0, sends=False)
        if k == 0:  # the first is done, so the last gets its stream
            for sender in (True, False):
                it.flag(source, target, 0, sender=sender)
            it.device.run()
    assert it.block(*channels[-1]) in it.broker._copies.streams.armed
    it.broker._remove(it.clients[0], "died")
    assert all(it.done(a, b) == EVER for a, b in channels)


def test_a_link_may_be_timed_from_some_message_on(world: Callable[[int], World]) -> None:
    it = world(2)
    for number in range(3):
        if number == 1:
            it.say(0, SetLink("g", SimulatedLink(1.0)))
        it.place(0, 1, number, sends=True)
        it.place(1, 0, number, sends=False)
    for number in range(3):
        for sender in (True, False):
            it.flag(0, 1, number, sender=sender)
    deadline = time.perf_counter() + 10
    while it.done(0, 1) < 3 and time.perf_counter() < deadline:
        it.look()
        it.device.run()
    assert [source for source, _, _ in it.device.copies] == [1, 2, 3]
    assert it.done(0, 1) == 3


def test_a_copy_that_fails_ends_the_group_for_good(world: Callable[[int], World], monkeypatch: Any) -> None:
    it = world(2)
    it.say(0, SetLink("g", SimulatedLink(1.0)))

    def fails(*_: int) -> None:
        raise cuda.DriverError("out of luck")

    monkeypatch.setattr(cuda, "copy", fails)
    for number in range(3):
        it.place(0, 1, number, sends=True)
        it.place(1, 0, number, sends=False)
        for sender in (True, False):
            it.flag(0, 1, number, sender=sender)
    for _ in range(3):
        it.look()
        it.device.run()
    assert it.done(0, 1) == EVER
    found = it.hear(0)
    assert isinstance(found, Failed)
    assert "out of luck" in found.why


def test_whoever_leaves_when_all_is_done_fails_nobody(world: Callable[[int], World]) -> None:
    it = world(3)
    it.say(0, Leave("g"))
    assert not it.group.failed
    it.place(1, 0, 0, sends=True)
    assert it.group.failed == "rank 0 has left"
    assert it.done(1, 2) == EVER


def test_memory_that_a_rank_has_freed_is_closed_when_its_last_message_has_arrived(
    world: Callable[[int], World],
) -> None:
    it = world(2)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    assert it.device.opened == {1, 1001}
    it.say(0, Freed((1).to_bytes(cuda.HANDLE_BYTES)))
    assert it.device.opened == {1, 1001}
    for sender in (True, False):
        it.flag(0, 1, 0, sender=sender)
    it.device.run()
    it.broker._tidy()
    assert it.device.opened == {1001}


def test_memory_is_closed_only_when_no_stream_waits_for_a_rank(world: Callable[[int], World]) -> None:
    """From when some is freed no stream begins to wait, and messages arrive all the same."""
    it = world(3)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    for sender in (True, False):
        it.flag(0, 1, 0, sender=sender)
    it.device.run()
    it.place(1, 2, 0, sends=True)  # a stream waits for its flags
    it.place(2, 1, 0, sends=False)
    it.say(0, Freed((1).to_bytes(cuda.HANDLE_BYTES)))
    it.place(0, 2, 0, sends=True)
    it.place(2, 0, 0, sends=False)
    it.broker._tidy()
    assert 1 in it.device.opened
    for source, target in ((1, 2), (0, 2)):
        for sender in (True, False):
            it.flag(source, target, 0, sender=sender)
        it.look()
        it.device.run()
        assert it.done(source, target) == 1
    it.broker._tidy()
    assert it.device.opened == {1001, 2001}
    it.place(0, 1, 1, sends=True)  # and then they may wait again
    it.place(1, 0, 1, sends=False)
    assert it.broker._copies.streams.is_waiting()


@pytest.mark.parametrize("why", ["died", ""])
def test_memory_of_a_rank_that_is_gone_is_closed(world: Callable[[int], World], why: str) -> None:
    it = world(2)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    if not why:  # in peace, all its messages were copied before
        for sender in (True, False):
            it.flag(0, 1, 0, sender=sender)
        it.device.run()
    it.broker._remove(it.clients[0], why)
    assert it.device.opened == {1001}


def test_a_message_on_a_timed_link_holds_its_memory_until_it_arrives(world: Callable[[int], World]) -> None:
    it = world(2)
    it.say(0, SetLink("g", SimulatedLink(1e-6, 0)))  # a kilobyte a second
    it.place(0, 1, 0, sends=True, count=50)
    it.place(1, 0, 0, sends=False, count=50)
    for sender in (True, False):
        it.flag(0, 1, 0, sender=sender)
    it.look()
    it.device.run()
    it.say(0, Freed((1).to_bytes(cuda.HANDLE_BYTES)))
    assert (len(it.device.copies), it.device.opened) == (1, {1, 1001})
    deadline = time.perf_counter() + 10
    while not it.done(0, 1) and time.perf_counter() < deadline:
        it.look()
        it.device.run()
    it.broker._tidy()
    assert it.device.opened == {1001}


def test_a_channel_that_has_waited_on_a_stream_may_be_timed(world: Callable[[int], World]) -> None:
    """Its one message arrives though no other comes behind it."""
    it = world(2)
    for number in range(2):
        if number == 1:
            it.say(0, SetLink("g", SimulatedLink(1.0)))
        it.place(0, 1, number, sends=True)
        it.place(1, 0, number, sends=False)
        for sender in (True, False):
            it.flag(0, 1, number, sender=sender)
        deadline = time.perf_counter() + 10
        while it.done(0, 1) <= number and time.perf_counter() < deadline:
            it.look()
            it.device.run()
    assert it.done(0, 1) == 2


def test_ranks_that_end_before_their_streams_come_to_a_message_leave_no_stream_waiting(
    world: Callable[[int], World],
) -> None:
    it = world(2)
    it.place(0, 1, 0, sends=True)
    it.place(1, 0, 0, sends=False)
    for rank in range(2):
        it.say(rank, Bye())
    assert not it.broker._groups.by_name
    assert it.device.opened == set()


def test_groups_that_some_never_joined_make_room_for_others(world: Callable[[int], World]) -> None:
    it = world(2)
    for name, size in (("large", 90), ("small", 3), ("large again", 90)):
        it.connect()
        it.say(-1, Join(name, 0, size))
        assert isinstance(it.hear(-1), Joined)
        it.say(-1, Bye())
    it.say(0, Join("too large", 0, 91))
    assert it.hear(0) == Failed("too large", "too many groups: the broker has no room for more")
    assert list(it.broker._groups.by_name) == ["g", "large again"]
