"""A process dies or stops at any moment of a push: nobody hangs, nothing is mixed, and the next push repairs."""

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from weights_victims import Team, Worker

BOUND = 15.0  # seconds in which all others have ended: one silence of 8 s, and not a second one
FEW, MANY = 6, 50


@dataclass(frozen=True)
class Point:
    """Where a process falls: of two senders and two receivers one, at a place in the course of its events."""

    sender: bool
    number: int
    how: signal.Signals
    place: float
    """Of the events of a push, 0 the first and 1 the last."""
    pushes: int
    """That go well before."""
    same: bool
    """Whether, if it is a receiver, the same senders push again."""

    def __str__(self) -> str:
        who = f"{'sender' if self.sender else 'receiver'}-{self.number}"
        return f"{who}-{self.how.name}-at-{self.place:.2f}-after-{self.pushes}"


def points(count: int) -> list[Point]:
    """Every second one is a sender's, every third one stops."""
    choose = random.Random(6)
    found = []
    for number in range(count):
        sender, how = number % 2 == 0, signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
        found.append(
            Point(sender, choose.randrange(2), how, choose.random(), choose.randrange(2), choose.random() < 0.5)
        )
    return found


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, int]:
    """How many a push has, at a sender and at a receiver."""
    with Team(tmp_path_factory.mktemp("counted"), senders=2, troubles=("in place", "")) as team:
        for worker in (*team.receivers, *team.senders.ranks):
            worker.arm("", 0, signal.SIGKILL)
        team.senders.push("v2", team.addresses)
        counts = {
            True: min(it.ask("count") for it in team.senders.ranks),
            False: min(it.ask("count") for it in team.receivers),
        }
    assert counts[True] > 20
    assert counts[False] > 20
    return counts


def _slow(point: Point) -> object:
    return pytest.param(point, marks=pytest.mark.slow)


@pytest.mark.parametrize("point", [*points(FEW), *map(_slow, points(FEW + MANY)[FEW:])], ids=str)
def test_a_push_in_which_one_falls(tmp_path: Path, events: dict[bool, int], point: Point) -> None:
    with Team(tmp_path, senders=2, troubles=("in place", "")) as team:
        versions = ["v1", *(f"v{2 + n}" for n in range(point.pushes + 1))]
        old, new = versions[-2:]
        for version in versions[1:-1]:
            assert all(isinstance(told, dict) for told in team.senders.push(version, team.addresses).values())
        victim: Worker = (team.senders.ranks if point.sender else team.receivers)[point.number]
        victim.arm("", 1 + int(point.place * events[point.sender]), point.how)
        team.senders.begin(new, team.addresses)
        gone = [point.number] if point.sender else []
        fell = team.fall_of(victim, over=lambda: _said(team, gone))
        late = not victim.fallen()
        if late:  # the push has gone well before it was its turn
            os.kill(victim.pid, point.how)
        dead = [] if point.sender else [point.number]
        for told in team.senders.heard(fell + BOUND, but=gone).values():
            if isinstance(told, str):
                assert not late
                assert (f"rank {point.number} " if point.sender else team.addresses[point.number]) in told
            else:
                assert told == dict.fromkeys(team.addresses, "delivered")
        for number, receiver in enumerate(team.receivers):
            if number not in dead:
                left = receiver.settled(fell + BOUND)
                assert left.state == "dirty" or left.version in (old, new)
        if point.sender or not point.same:
            team.senders.close(but=gone)
        again = team.senders if point.same and not point.sender else team.fresh(2)
        team.repaired("v9", again, but=dead, busy_until=fell + BOUND)


def _said(team: Team, gone: list[int]) -> bool:
    """Whether all senders have ended the push, so that it is too late for the victim's fall."""
    return all(rank.has_said() for number, rank in enumerate(team.senders.ranks) if number not in gone)
