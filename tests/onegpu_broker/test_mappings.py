"""What the broker keeps open of the ranks' memory, over a driver that only counts."""

from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import cuda
from stretto.onegpu_broker.mappings import KEPT, Mappings

GIB = 2**30


class Driver:
    """Opens allocations at addresses that no other has had."""

    def __init__(self) -> None:
        self.open: dict[int, bytes] = {}
        self.opens = 0

    def open_shared(self, handle: bytes) -> int:
        if handle == b"garbage":
            raise cuda.DriverError("invalid argument")
        self.opens += 1
        self.open[self.opens] = handle
        return self.opens

    def close_shared(self, address: int) -> None:
        del self.open[address]


class World:
    """Mappings, and which messages have arrived on each channel."""

    def __init__(self, fake: Driver) -> None:
        self.driver, self.arrived, self.waiting = fake, dict[int, int](), False
        self.mappings = Mappings(lambda block, number: self.arrived.get(block, 0) <= number, lambda: self.waiting)
        self.mappings.is_short = True

    def use(self, handle: bytes, size: int = GIB, *, owner: object = "rank 0", block: int = 0, number: int = 0) -> int:
        return self.mappings.open(owner, handle, size, block=block, number=number)

    @property
    def open(self) -> list[bytes]:
        return sorted(self.driver.open.values())


@pytest.fixture
def world() -> Iterator[World]:
    fake = Driver()
    with mock.patch.multiple(cuda, open_shared=fake.open_shared, close_shared=fake.close_shared):
        yield World(fake)


def test_memory_is_opened_once_and_kept(world: World) -> None:
    assert world.use(b"a", number=0) == world.use(b"a", number=1)
    world.arrived[0] = 2
    world.mappings.trim()
    assert world.open == [b"a"]


def test_what_was_used_longest_ago_is_closed_beyond_the_bound(world: World) -> None:
    for number, handle in enumerate((b"a", b"b", b"c", b"d", b"a", b"e")):
        world.use(handle, number=number)
        world.arrived[0] = number + 1
    world.mappings.trim()
    assert world.open == [b"a", b"c", b"d", b"e"]
    world.use(b"b", number=6)  # and is opened again
    assert (b"b" in world.open, world.driver.opens) == (True, 6)


def test_what_a_message_in_flight_uses_is_never_closed(world: World) -> None:
    for number in range(8):
        world.use(b"%d" % number, number=number)
    assert len(world.open) == 8
    world.mappings.freed("rank 0", b"7")
    world.mappings.forget("rank 0")
    assert len(world.open) == 8
    world.arrived[0] = 7
    world.mappings.trim()
    assert world.open == [b"7"]
    world.arrived[0] = 8
    world.mappings.trim()
    assert world.open == []


def test_more_than_the_bound_is_kept_only_while_it_is_used(world: World) -> None:
    world.use(b"large", KEPT + 1)
    world.use(b"small", 1, block=1)
    world.arrived.update({0: 1, 1: 1})
    world.mappings.trim()
    assert world.open == [b"small"]


def test_where_memory_is_not_short_all_that_is_there_stays_open(world: World) -> None:
    world.mappings.is_short = False
    for number in range(8):
        world.use(b"%d" % number, number=number)
        world.arrived[0] = number + 1
    world.mappings.trim()
    assert len(world.open) == 8
    world.mappings.freed("rank 0", b"3")
    assert len(world.open) == 7
    world.mappings.is_short = True
    world.mappings.trim()
    assert world.open == [b"4", b"5", b"6", b"7"]


def test_nothing_is_closed_while_a_stream_waits_which_none_begins_to_until_then(world: World) -> None:
    world.use(b"a")
    world.arrived[0], world.waiting = 1, True
    world.mappings.freed("rank 0", b"a")
    assert (world.open, world.mappings.has_work) == ([b"a"], True)
    world.waiting = False
    world.mappings.trim()
    assert (world.open, world.mappings.has_work) == ([], False)


def test_what_its_owner_has_freed_is_closed_at_once(world: World) -> None:
    for owner in ("rank 0", "rank 1"):
        world.use(b"a", owner=owner)
    world.arrived[0] = 1
    world.mappings.freed("rank 0", b"unknown")
    world.mappings.freed("rank 0", b"a")
    assert world.open == [b"a"]  # rank 1's
    world.mappings.forget("rank 1")
    assert world.open == []


def test_numbers_of_a_group_that_has_ended_say_nothing_of_the_next(world: World) -> None:
    world.use(b"a", block=5, number=9)
    world.arrived[5] = 10
    world.mappings.ended(range(4, 8))
    world.arrived[5] = 0  # the block is another channel's now
    world.mappings.forget("rank 0")
    assert world.open == []


def test_a_handle_that_cannot_be_opened_leaves_nothing(world: World) -> None:
    with pytest.raises(cuda.DriverError):
        world.use(b"garbage")
    world.mappings.forget("rank 0")
    assert world.open == []


STEP = st.tuples(
    st.sampled_from(("use", "use", "use", "arrive", "free", "gone", "end", "trim", "wait")), *[st.integers(0, 5)] * 3
)


@given(st.lists(STEP, max_size=60), st.lists(st.integers(1, 3 * GIB), min_size=6, max_size=6))
def test_whatever_happens_the_bound_holds_and_nothing_used_is_closed(
    steps: list[tuple[str, int, int, int]], sizes: list[int]
) -> None:
    """Each channel's messages arrive in order; a message has one allocation at either end."""
    fake = Driver()
    with mock.patch.multiple(cuda, open_shared=fake.open_shared, close_shared=fake.close_shared):
        world = World(fake)
        begun = dict.fromkeys(range(6), 0)
        used: dict[tuple[int, int], list[int]] = {}  # by message, where its bytes lie
        for what, a, b, c in steps:
            handle = b"%d" % b
            match what:
                case "use":
                    number, ends = begun[c], ((a % 2, handle), (2, b"%d" % a))
                    begun[c] += 1
                    used[c, number] = []
                    for owner, it in ends:
                        used[c, number].append(world.use(it, sizes[int(it)], owner=owner, block=c, number=number))
                case "arrive":
                    world.arrived[c] = min(begun[c], world.arrived.get(c, 0) + a)
                case "free":
                    world.mappings.freed(a % 3, handle)
                case "gone":
                    world.mappings.forget(a % 3)
                case "end":
                    world.arrived[c] = begun[c]
                    world.mappings.ended(range(c, c + 1))
                    used = {key: places for key, places in used.items() if key[0] != c}
                    begun[c] = world.arrived[c] = 0
                case "wait":
                    world.waiting = bool(a % 2)
                case "trim":
                    world.mappings.trim()
            used = {key: places for key, places in used.items() if world.arrived.get(key[0], 0) <= key[1]}
            in_use = {place for places in used.values() for place in places}
            assert in_use <= set(fake.open)
            if what in ("free", "gone", "trim") and not world.waiting:
                idle = [(place, handle) for place, handle in fake.open.items() if place not in in_use]
                assert sum(sizes[int(handle)] for _, handle in idle) <= KEPT
                assert world.mappings._bytes == sum(sizes[int(handle)] for handle in fake.open.values())
        world.arrived, world.waiting = dict.fromkeys(range(6), 10**6), False
        for owner in range(3):
            world.mappings.forget(owner)
        assert (fake.open, world.mappings._bytes) == ({}, 0)
