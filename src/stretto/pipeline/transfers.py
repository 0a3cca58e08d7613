"""Moves values between devices: one group of two ranks for each directed link, and words ahead of messages."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.device_lanes import Begun, StreamTicket
from stretto.execute.host_lanes import HostLane, Work
from stretto.execute.side_channel import SideChannel, side_channels
from stretto.execute.supervisor import Supervisor
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError, told
from stretto.pipeline.descriptions import Description, describe, moved_as
from stretto.pipeline.pytree import LEAF, Tree, demand_unchanged
from stretto.pipeline.recv_buffers import RecvBuffer
from stretto.program.program import Program
from stretto.program.task import Kind, Lane

Channel = tuple[Kind, int]
"""A kind of transfer and its stage: messages of one channel mostly look alike."""

_WORD = struct.Struct("<QQ")  # the length of the description that follows, 0 for none, and what the message belongs to
_KINDS = {kind: number for number, kind in enumerate(Kind)}


@dataclass(slots=True)
class _Connection:
    group: dist.ProcessGroup
    wire: SideChannel | None
    """Where words travel, between the hosts; none where there is nobody to talk to."""
    peer: int
    """The other end, as a rank of the group."""
    known: dict[Channel, Description] = field(default_factory=dict)
    """The last message of each channel."""
    steady: set[Channel] = field(default_factory=set)
    """Channels whose last message had tensors like those of the one before."""
    last: "Arrival | None" = None
    """The last message that was asked for; its word may still have to be heard."""

    def learn(self, channel: Channel, what: Description) -> None:
        """The last message of a channel was this."""
        before = self.known.get(channel)
        if before is None or before.metas == what.metas:
            self.steady.add(channel)
        else:
            self.steady.discard(channel)
        self.known[channel] = what

    def guess(self, channel: Channel) -> Description | None:
        """What the next message is taken to be, so that nobody has to wait for its description; both ends take the
        same. None where it must be heard first.
        """
        return self.known[channel] if channel in self.steady else None

    def recv_description(self, channel: Channel, supervisor: Supervisor) -> Description:
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


class Arrival(Begun):
    """A message that was asked for, and is there once it was waited for: on the host by its lane, on a device by the
    stream that uses it.
    """

    def __init__(
        self,
        transfers: "Transfers",
        link: _Connection,
        channel: Channel,
        buffer_for: Callable[[Description], RecvBuffer],
        of: str,
    ) -> None:
        super().__init__()
        self._transfers, self._link, self._channel, self._buffer_for, self._of = (
            transfers,
            link,
            channel,
            buffer_for,
            of,
        )
        self.what: Description | None = None
        self._lent: RecvBuffer | None = None

    def taken(self) -> tuple[Tree, RecvBuffer]:
        """What has come, and the room that it is in."""
        assert self.what is not None, "a message is used that nobody has waited for"
        assert self._lent is not None
        return self.what.tree(self._lent.tensors), self._lent

    def instant(self, what: Description) -> None:
        """In a world that is not there, it is there at once."""
        self.what, self._lent = what, self._buffer_for(what)

    def come_as(self, what: Description) -> None:
        """Make its room ready for what is known to come."""
        self.what = what
        self._fill(what)

    def begin(self) -> None:
        """Make its room ready, if it can be known what is to come."""
        guess = self._link.guess(self._channel)
        if guess is not None:
            self._fill(guess)

    def recv_description(self) -> None:
        """Wait for its word, if it was not heard yet, and ask for what comes if it is something else."""
        if self.what is None:
            what = self._link.recv_description(self._channel, self._transfers.supervisor)
            if self._lent is None or self._lent.metas != what.metas:
                self._fill(what)
            self._link.learn(self._channel, what)
            self.what = what

    def _fill(self, what: Description) -> None:
        self._lent = self._buffer_for(what)
        self.tickets += [StreamTicket(self._link.group.recv([raw], self._link.peer, 0), raw) for raw in self._lent.raws]


class _ToHost(Arrival):
    """Its lane waits for the tensors that were guessed, for the word, and for what the word says."""

    _is_begun = False

    def come_as(self, what: Description) -> None:
        self._is_begun = True
        super().come_as(what)

    def ask(self, before: Arrival | None) -> None:
        """Now, if it is known what comes before; else its lane does."""
        if before is None or before.what is not None:
            self.begin()

    def begin(self) -> None:
        self._is_begun = True
        super().begin()

    def wait(self) -> None:
        if not self._is_begun:
            self.begin()
        self.follow()
        self.tickets.clear()
        self.recv_description()
        self.follow()


class _ToDevice(Arrival):
    """The host waits for the word, the stream for the tensors."""

    def ask(self, before: Arrival | None) -> None:
        """Only when the one before is heard it is known what this one is taken to be."""
        if before is not None:
            before.recv_description()
        self.begin()
        if self._lent is None:
            self.recv_description()

    def wait(self) -> None:
        self.recv_description()
        with self._transfers.supervisor.explaining(lambda: self._of):
            self.follow()

    def recv_description(self) -> None:
        if self.what is None:
            assert self._link.wire is not None
            self._transfers.supervisor.wait(self._link.wire, lambda: self._of)
            with self._transfers.supervisor.explaining(lambda: self._of):
                super().recv_description()


class Transfers:
    """This rank's ends of all links that a program uses.

    Both ends may know what a message looks like (`send_as`, `receive_as`). Otherwise a word goes ahead of it: that it
    looks like the one before of its channel, or how long the description is that follows. So what arrives is never
    taken for anything but what was sent. Where messages of a channel look alike, the next one's room is made ready
    before its word has come; if it looks otherwise then, its sender knows, and fills that room with anything first. On
    a device the host waits for the word when the message is used, and not for the tensors.
    """

    def __init__(self, team: Team, program: Program, device: torch.device) -> None:
        rank, rendezvous = team.rank, team.rendezvous
        self.supervisor, self.device = team.supervisor, device
        self._instant = rendezvous is None  # of a world that is not there, whose works have always ended
        self._sends: dict[int, _Connection] = {}
        self._receives: dict[int, _Connection] = {}
        self.lanes: dict[Lane, HostLane] = {}
        """Threads that wait for what was begun, where memory is the host's."""
        directed = sorted(
            {(lane.device, lane.peer) for lane in program.lanes if lane.name == "send" and lane.peer is not None}
        )
        to, of = ({}, {}) if rendezvous is None else side_channels(rendezvous, directed)
        for source, target in directed:
            pair = team.make((source, target))
            if pair is not None and rank == source:
                self._sends[target] = _Connection(pair, to.get(target), int(source < target))
            elif pair is not None:
                self._receives[source] = _Connection(pair, of.get(source), int(source > target))
        if device.type != "cuda":
            mine = [lane for lane in program.lanes if lane.device == rank and lane.name not in ("compute", "comm")]
            self.lanes = {lane: HostLane(str(lane)) for lane in mine}
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

    def send_as(self, what: Description, peer: int, tree: Tree, rows: int, of: str) -> Work | None:
        """Send a message that the other end knows to look like this; `of` says whose it is. What was begun."""
        lone = _lone(tree, rows)
        tensors = tree.leaves
        if lone is None or lone != what.lone:
            found, tensors = describe(tree, self.device, rows)
            if found != what:
                raise PipelineError(
                    f"{of} other shapes or values than in an earlier step that began alike ({found.unlike(what)}); "
                    "if it should, make the pipeline with dynamic_shapes=True"
                )
            what.lone = lone
        return self._start(self._sends[peer], tree, [moved_as(tensor) for tensor in tensors if tensor.numel()])

    def receive_as(
        self, what: Description, peer: int, channel: Channel, buffer_for: Callable[[Description], RecvBuffer], of: str
    ) -> tuple[Arrival, Work | None]:
        """Ask for a message that is known to look like this."""
        coming = self._arrival(self._receives[peer], channel, buffer_for, of)
        if self._instant:
            coming.instant(what)
            return coming, None
        with self.supervisor.explaining(lambda: f"rank {peer}"):
            coming.come_as(what)
        return coming, coming

    def _start(self, link: _Connection, tree: Tree, moved: list[Tensor]) -> Work | None:
        if self._instant:
            return None
        unchanged = partial(demand_unchanged, tree, tree.versions())
        with self.supervisor.explaining(lambda: "what it sent to be taken"):
            works = [link.group.send([part], link.peer, 0) for part in moved]
        if self.device.type == "cuda":
            return Begun([StreamTicket(work, raw) for work, raw in zip(works, moved, strict=True)], unchanged)
        return _Sent(works, moved, unchanged) if works else None

    def send(self, peer: int, channel: Channel, tree: Tree, rows: int = 0) -> tuple[Description, Work | None]:
        """Send a message, and say what it is; `rows` are those of the batch that it comes from. What it looks like, and
        what was begun, if anything was.
        """
        link = self._sends[peer]
        guess = link.guess(channel)
        before, lone = link.known.get(channel), _lone(tree, rows)
        if lone is not None and before is not None and before.lone == lone:
            what, said, tensors = before, None, tree.leaves
            link.steady.add(channel)
        else:
            what, tensors = describe(tree, self.device, rows)
            what.lone = lone
            said = None if before == what else what
            link.learn(channel, what)
        if self._instant:
            return what, None
        assert link.wire is not None
        text = b"" if said is None else said.encode()
        moved = [moved_as(tensor) for tensor in tensors if tensor.numel()]
        if guess is not None and said is not None and said.metas != guess.metas:
            # the room that was made ready is filled with anything
            moved = [*(moved_as(part) for part in guess.empty(self.device) if part.numel()), *moved]
        with self.supervisor.explaining(lambda: "what it sent to be taken"):
            link.wire.send(_WORD.pack(len(text), _mark(channel, self.supervisor)) + text, self.supervisor.check)
        return what, self._start(link, tree, moved)

    def receive(
        self, peer: int, channel: Channel, buffer_for: Callable[[Description], RecvBuffer], of: str
    ) -> tuple[Arrival, Work | None]:
        """Ask for a message, which comes into the room that is made for it, and say what was begun; `of` says what is
        waited for.
        """
        link = self._receives[peer]
        if self._instant:
            arrival = Arrival(self, link, channel, buffer_for, of)
            arrival.instant(link.known[channel])  # the same again
            return arrival, None
        coming = self._arrival(link, channel, buffer_for, of)
        before, link.last = link.last, coming
        with self.supervisor.explaining(lambda: f"rank {peer}"):
            coming.ask(before)
        return coming, coming

    def _arrival(
        self, link: _Connection, channel: Channel, buffer_for: Callable[[Description], RecvBuffer], of: str
    ) -> "_ToDevice | _ToHost":
        return (_ToDevice if self.device.type == "cuda" else _ToHost)(self, link, channel, buffer_for, of)

    def forget(self) -> None:
        """What was asked for last is over."""
        for link in self._receives.values():
            link.last = None

    def check(self) -> None:
        """Raise if a link has failed."""
        for link in (*self._sends.values(), *self._receives.values()):
            check_group(link.group)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        for link in (*self._sends.values(), *self._receives.values()):
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

    def __init__(self, works: list[dist.Work], moved: list[Tensor], unchanged: Callable[[], None]) -> None:
        self._works, self._moved, self._unchanged = works, moved, unchanged

    def wait(self) -> None:
        _wait(self._works)
        self._unchanged()


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
