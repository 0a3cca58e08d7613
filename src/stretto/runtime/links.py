"""Moves values between devices: one group of two ranks for each directed link, and words ahead of every message."""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.lanes import HostLane, Ticket
from stretto.execute.streams import StreamTicket
from stretto.execute.supervise import Supervisor
from stretto.execute.team import Team
from stretto.execute.wires import Wire, wired
from stretto.ir.errors import told
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.runtime.descriptions import Description, describe, moved_as
from stretto.runtime.rooms import Lent
from stretto.runtime.structure import LEAF, Tree, demand_unchanged

Channel = tuple[Kind, int]
"""A kind of transfer and its stage: messages of one channel mostly look alike."""

_WORD = struct.Struct("<QQ")  # the length of the description that follows, 0 for none, and what the message belongs to
_KINDS = {kind: number for number, kind in enumerate(Kind)}


@dataclass(slots=True)
class _Link:
    group: dist.ProcessGroup
    wire: Wire | None
    """Where words travel, between the hosts; none where there is nobody to talk to."""
    peer: int
    """The other end, as a rank of the group."""
    lane: HostLane
    known: dict[Channel, Description] = field(default_factory=dict)
    """The last message of each channel."""
    lone: dict[Channel, tuple[Any, ...]] = field(default_factory=dict)
    """What it was if it was one contiguous tensor: by that most messages are known at a glance."""
    steady: set[Channel] = field(default_factory=set)
    """Channels whose last message had tensors like those of the one before."""
    last: Ticket | None = None
    """The last message that was asked for, on a host."""
    unheard: "Arrival | None" = None
    """The last one that was asked for on a device, until its word is heard."""

    def learn(self, channel: Channel, what: Description) -> None:
        """The last message of a channel was this."""
        before = self.known.get(channel)
        if before is None or before.metas == what.metas:
            self.steady.add(channel)
        else:
            self.steady.discard(channel)
        self.known[channel] = what
        self.lone.pop(channel, None)

    def guess(self, channel: Channel) -> Description | None:
        """What the next message is taken to be, so that nobody has to wait for its description; both ends take the
        same. None where it must be heard first.
        """
        return self.known[channel] if channel in self.steady else None

    def hear(self, channel: Channel, supervisor: Supervisor) -> Description:
        """What the next message is, once its word is there."""
        assert self.wire is not None
        length, mark = _WORD.unpack(self.wire.receive(_WORD.size, supervisor.check))
        if mark != _mark(channel, supervisor):
            raise told(
                f"a message came that does not belong to {supervisor.label}; all ranks must call step() and "
                "eval_step() in the same order, with the same record and accumulate"
            )
        if not length:
            return self.known[channel]
        return Description.decode(self.wire.receive(length, supervisor.check))

    def fill(self, lent: Lent) -> list[dist.Work]:
        return [self.group.recv([raw], self.peer, 0) for raw in lent.raws]


class Arrival:
    """A message that was asked for: there once its word is heard and its tickets are done."""

    __slots__ = ("channel", "lent", "link", "room", "tickets", "what")

    def __init__(self, link: _Link, channel: Channel, room: Callable[[Description], Lent]) -> None:
        self.link, self.channel, self.room = link, channel, room
        self.tickets: list[Ticket | StreamTicket] = []
        self.what: Description | None = None
        self.lent: Lent | None = None

    def tree(self) -> Tree:
        assert self.what is not None
        assert self.lent is not None
        return self.what.tree(self.lent.tensors)


class Links:
    """This rank's ends of all links that a program uses.

    Ahead of every message goes a word: that it looks like the one before of its channel, or how long the description
    is that follows. So what arrives is never taken for anything but what was sent. Where messages of a channel look
    alike, the next one's room is made ready before its word has come; if it looks otherwise then, its sender knows, and
    fills that room with anything first. On a device the host waits for the word when the message is used, and not for
    the tensors.
    """

    def __init__(self, team: Team, program: Program, device: torch.device) -> None:
        rank, meeting = team.rank, team.meeting
        self._supervisor, self.device = team.supervisor, device
        self._instant = meeting is None  # of a world that is not there, whose works have always ended
        self._sends: dict[int, _Link] = {}
        self._receives: dict[int, _Link] = {}
        self._flying: deque[tuple[Ticket | StreamTicket, Callable[[], None] | None]] = deque()
        self.started: list[Ticket | StreamTicket] | None = None
        """If given, all that is started is put there."""
        directed = sorted(
            {(lane.device, lane.peer) for lane in program.lanes if lane.name == "send" and lane.peer is not None}
        )
        to, of = ({}, {}) if meeting is None else wired(meeting, directed)
        for source, target in directed:
            pair = team.make((source, target))
            if pair is not None and rank == source:
                self._sends[target] = _Link(pair, to.get(target), int(source < target), HostLane(f"send→{target}"))
            elif pair is not None:
                self._receives[source] = _Link(pair, of.get(source), int(source > target), HostLane(f"recv←{source}"))
        self._warm_up(directed, team)

    def _warm_up(self, directed: list[tuple[int, int]], team: Team) -> None:
        """Connections are made now, not in the middle of a step; one after the other, in the same order everywhere."""
        nothing = torch.zeros(1, device=self.device)
        for source, target in directed:
            if team.rank == source:
                link = self._sends[target]
                team.settle(team.start(partial(link.group.send, [nothing], link.peer, 0)), nothing)
            elif team.rank == target:
                link = self._receives[source]
                team.settle(team.start(partial(link.group.recv, [nothing], link.peer, 0)), nothing)

    def send(self, peer: int, channel: Channel, tree: Tree, rows: int = 0) -> None:
        """Send a message; `rows` are those of the batch that it comes from."""
        link = self._sends[peer]
        guess = link.guess(channel)
        lone = _lone(tree, rows)
        if lone is not None and link.lone.get(channel) == lone:
            said, tensors = None, tree.leaves
            link.steady.add(channel)
        else:
            what, tensors = describe(tree, self.device, rows)
            said = None if link.known.get(channel) == what else what
            link.learn(channel, what)
            if lone is not None:
                link.lone[channel] = lone
        if self._instant:
            return
        assert link.wire is not None
        text = b"" if said is None else said.encode()
        moved = [moved_as(tensor) for tensor in tensors if tensor.numel()]
        if guess is not None and said is not None and said.metas != guess.metas:
            # the room that was made ready is filled with anything
            moved = [*(moved_as(part) for part in guess.empty(self.device) if part.numel()), *moved]
        unchanged = partial(demand_unchanged, tree, tree.versions())
        with self._supervisor.explaining(lambda: "what it sent to be taken"):
            link.wire.send(_WORD.pack(len(text), _mark(channel, self._supervisor)) + text, self._supervisor.check)
            works = [link.group.send([part], link.peer, 0) for part in moved]
            if self.device.type == "cuda":
                for work, raw in zip(works, moved, strict=True):
                    self._fly(StreamTicket(work, raw), unchanged)
            elif works:
                self._fly(link.lane.follow(_Sent(works, unchanged), moved))

    def receive(self, peer: int, channel: Channel, room: Callable[[Description], Lent]) -> Arrival:
        """Ask for a message, which comes into the room that is made for it."""
        link = self._receives[peer]
        arrival = Arrival(link, channel, room)
        if self._instant:
            arrival.what = link.known[channel]
            arrival.lent = room(arrival.what)
        elif self.device.type == "cuda":
            what = f"word from rank {peer} of what is to come"
            if link.unheard is not None:
                self.hear(link.unheard, lambda: what)  # only then it is known what this one is taken to be
            link.unheard = arrival
            guess = link.guess(channel)
            if guess is None:
                self.hear(arrival, lambda: what)
            else:
                self._fill(arrival, guess)
        else:
            coming = _Coming(arrival, self._supervisor)
            if link.last is None or link.last.done:
                with self._supervisor.explaining(lambda: f"rank {peer}"):
                    coming.begin()  # or else on the lane, when what comes before is known
            link.last = link.lane.follow(coming)
            arrival.tickets = [self._begun(link.last)]
        return arrival

    def hear(self, arrival: Arrival, what: Callable[[], str]) -> None:
        """Wait for the word of a message to a device, if it was not heard yet; `what` says what is waited for."""
        link = arrival.link
        if link.unheard is not arrival:
            return
        assert link.wire is not None
        self._supervisor.wait(link.wire, what)
        with self._supervisor.explaining(what):
            arrival.what = link.hear(arrival.channel, self._supervisor)
        if arrival.lent is None or arrival.lent.metas != arrival.what.metas:
            self._fill(arrival, arrival.what)
        link.learn(arrival.channel, arrival.what)
        link.unheard = None

    def _fill(self, arrival: Arrival, what: Description) -> None:
        """Ask for the tensors of a message to a device."""
        link, arrival.lent = arrival.link, arrival.room(what)
        with self._supervisor.explaining(lambda: "what is to come"):
            arrival.tickets += [
                self._begun(StreamTicket(link.group.recv([raw], link.peer, 0), raw)) for raw in arrival.lent.raws
            ]

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        while self._flying:
            self._land()

    def _fly(self, ticket: Ticket | StreamTicket, landed: Callable[[], None] | None = None) -> None:
        """Something is under way; `landed` is run when it is seen to have left."""
        while self._flying and self._flying[0][0].done:
            self._land()
        self._flying.append((self._begun(ticket), landed))

    def _land(self) -> None:
        ticket, landed = self._flying.popleft()
        self._supervisor.wait(ticket, lambda: "what it sent to be taken")
        if landed is not None:
            landed()

    def _begun(self, ticket: Ticket | StreamTicket) -> Ticket | StreamTicket:
        if self.started is not None:
            self.started.append(ticket)
        return ticket

    def check(self) -> None:
        """Raise if a link has failed."""
        for link in (*self._sends.values(), *self._receives.values()):
            check_group(link.group)

    def close(self) -> None:
        for link in (*self._sends.values(), *self._receives.values()):
            link.lane.close()
            if link.wire is not None:
                link.wire.close()


def _lone(tree: Tree, rows: int) -> tuple[Any, ...] | None:
    """All that makes two messages of one plain contiguous tensor alike, None for other messages."""
    leaf = tree.leaves[0] if tree.spec is LEAF else None
    if type(leaf) is not Tensor or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
        return None
    return leaf.shape, leaf.dtype, leaf.device, tree.needs[0], rows


class _Sent:
    """The tensors of a message as one work. If they were changed in place meanwhile, nobody knows what was sent."""

    def __init__(self, works: list[dist.Work], unchanged: Callable[[], None]) -> None:
        self._works, self._unchanged = works, unchanged

    def wait(self) -> None:
        _wait(self._works)
        self._unchanged()
        del self._works, self._unchanged  # what they keep alive may go


class _Coming:
    """A message of the host, which a lane waits for, one after the other."""

    def __init__(self, arrival: Arrival, supervisor: Supervisor) -> None:
        self._link, self._channel, self._room, self._arrival = arrival.link, arrival.channel, arrival.room, arrival
        self._supervisor = supervisor
        self._works: list[dist.Work] | None = None

    def begin(self) -> None:
        guess = self._link.guess(self._channel)
        self._filled = None if guess is None else self._room(guess)
        self._works = [] if self._filled is None else self._link.fill(self._filled)

    def wait(self) -> None:
        if self._works is None:
            self.begin()
        assert self._works is not None
        _wait(self._works)
        what = self._link.hear(self._channel, self._supervisor)
        if self._filled is None or self._filled.metas != what.metas:
            self._filled = self._room(what)
            _wait(self._link.fill(self._filled))
        self._link.learn(self._channel, what)
        self._arrival.what, self._arrival.lent = what, self._filled


def _mark(channel: Channel, supervisor: Supervisor) -> int:
    """What a message belongs to: a step and a channel."""
    kind, stage = channel
    return (supervisor.mark + (_KINDS[kind] << 32) + stage) % 2**64


def check_group(group: dist.ProcessGroup) -> None:
    """Raise if a group that does not block has failed."""
    if hasattr(group, "check"):
        group.check()


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
