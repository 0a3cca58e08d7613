"""Moves values between ranks: one process group of two for each directed link, and headers on a side channel."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.device_lanes import Begun, StreamFuture
from stretto.execute.host_lanes import HostLane, Work
from stretto.execute.side_channel import SideChannel, side_channels
from stretto.execute.supervisor import Supervisor
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError, peer_failure
from stretto.pipeline.descriptions import Description, describe, moved_as
from stretto.pipeline.pytree import LEAF, Tree, validate_unchanged
from stretto.pipeline.recv_buffers import RecvBuffer
from stretto.program.program import Program
from stretto.program.task import Kind, Lane

Channel = tuple[Kind, int]
"""A kind of transfer and its stage. Messages of one channel usually have the same shapes."""

_HEADER = struct.Struct("<QQ")  # the length of the description that follows (0 for none), and the message's mark
_KINDS = {kind: number for number, kind in enumerate(Kind)}


@dataclass(slots=True)
class _Connection:
    """One end of a directed link to another rank."""

    group: dist.ProcessGroup
    side_channel: SideChannel | None
    """Carries headers between the hosts; None if there are no other processes."""
    peer: int
    """The other end's rank in the group."""
    known: dict[Channel, Description] = field(default_factory=dict)
    """The last message of each channel."""
    steady: set[Channel] = field(default_factory=set)
    """Channels whose last message had tensors of the same shapes and dtypes as the message before it."""
    last: "Arrival | None" = None
    """The last receive that was posted; its header may not have been read yet."""

    def learn(self, channel: Channel, description: Description) -> None:
        """Record the last message of a channel."""
        before = self.known.get(channel)
        if before is None or before.metas == description.metas:
            self.steady.add(channel)
        else:
            self.steady.discard(channel)
        self.known[channel] = description

    def guess(self, channel: Channel) -> Description | None:
        """Predict the next message, so that its receive can be posted before its header arrives.

        Both ends predict the same. Return None if the header must be read first.
        """
        return self.known[channel] if channel in self.steady else None

    def recv_description(self, channel: Channel, supervisor: Supervisor) -> Description:
        """Read the header of the next message, and return the message's description."""
        assert self.side_channel is not None
        length, mark = _HEADER.unpack(self.side_channel.receive(_HEADER.size, supervisor.check))
        if mark != _mark(channel, supervisor):
            raise peer_failure(
                f"a message came that does not belong to {supervisor.label}; all ranks must call step() and "
                "eval_step() in the same order, with the same record and accumulate"
            )
        if not length:
            return self.known[channel]
        return Description.decode(self.side_channel.receive(length, supervisor.check))


class Arrival(Begun):
    """A posted receive. The message has arrived once someone has waited for it: its lane on the host, the stream that
    uses it on a device.
    """

    def __init__(
        self,
        transfers: "Transfers",
        link: _Connection,
        channel: Channel,
        buffer_for: Callable[[Description], RecvBuffer],
        awaited: str,
    ) -> None:
        super().__init__()
        self._transfers, self._link, self._channel, self._buffer_for, self._awaited = (
            transfers,
            link,
            channel,
            buffer_for,
            awaited,
        )
        self.description: Description | None = None
        self._buffer: RecvBuffer | None = None

    def take(self) -> tuple[Tree, RecvBuffer]:
        """Return the message, and the receive buffer that holds it."""
        assert self.description is not None, "no task waited for this message"
        assert self._buffer is not None
        return self.description.tree(self._buffer.tensors), self._buffer

    def complete(self, description: Description) -> None:
        """Complete at once, without receiving anything, where there are no other processes."""
        self.description, self._buffer = description, self._buffer_for(description)

    def begin_as(self, description: Description) -> None:
        """Post the receive of a message whose description is known."""
        self.description = description
        self._fill(description)

    def begin(self) -> None:
        """Post the receive of the predicted message, if there is a prediction."""
        guess = self._link.guess(self._channel)
        if guess is not None:
            self._fill(guess)

    def recv_description(self) -> None:
        """Read the message's header, unless read already, and post another receive if the prediction was wrong."""
        if self.description is None:
            description = self._link.recv_description(self._channel, self._transfers.supervisor)
            if self._buffer is None or self._buffer.metas != description.metas:
                self._fill(description)
            self._link.learn(self._channel, description)
            self.description = description

    def _fill(self, description: Description) -> None:
        self._buffer = self._buffer_for(description)
        self.futures += [
            StreamFuture(self._link.group.recv([raw], self._link.peer, 0), raw) for raw in self._buffer.raws
        ]


class _ToHost(Arrival):
    """A receive into host memory: its lane waits for the predicted tensors, the header, and any further tensors."""

    _is_begun = False

    def begin_as(self, description: Description) -> None:
        self._is_begun = True
        super().begin_as(description)

    def post(self, before: Arrival | None) -> None:
        """Begin now if the previous message's header has been read; otherwise the lane begins it."""
        if before is None or before.description is not None:
            self.begin()

    def begin(self) -> None:
        self._is_begun = True
        super().begin()

    def wait(self) -> None:
        if not self._is_begun:
            self.begin()
        self.follow()
        self.futures.clear()
        self.recv_description()
        self.follow()


class _ToDevice(Arrival):
    """A receive into device memory: the host waits for the header, the stream for the tensors."""

    def post(self, before: Arrival | None) -> None:
        """Begin after reading the previous message's header, on which this one's prediction depends."""
        if before is not None:
            before.recv_description()
        self.begin()
        if self._buffer is None:
            self.recv_description()

    def wait(self) -> None:
        self.recv_description()
        with self._transfers.supervisor.explaining(lambda: self._awaited):
            self.follow()

    def recv_description(self) -> None:
        if self.description is None:
            assert self._link.side_channel is not None
            self._transfers.supervisor.wait(self._link.side_channel, lambda: self._awaited)
            with self._transfers.supervisor.explaining(lambda: self._awaited):
                super().recv_description()


class Transfers:
    """This rank's ends of all links that a program uses.

    If both ends know a message's description, `send_as` and `receive_as` send only its tensors. Otherwise a header goes
    ahead: the message looks like the previous one of its channel, or a description of this length follows. So the
    receiver never misinterprets a message. While the messages of a channel look alike, the receiver posts the next
    receive before its header arrives. The sender knows that prediction; if it is wrong, it first sends filler tensors
    that complete the posted receive. On a device the host waits for the header when the message is used, and never for
    the tensors.
    """

    def __init__(self, team: Team, program: Program, device: torch.device) -> None:
        rank, rendezvous = team.rank, team.rendezvous
        self.supervisor, self.device = team.supervisor, device
        self._instant = rendezvous is None  # no other processes: every transfer completes at once
        self._sends: dict[int, _Connection] = {}
        self._receives: dict[int, _Connection] = {}
        self.lanes: dict[Lane, HostLane] = {}
        """Threads that wait for transfers of host memory."""
        directed = sorted(
            {(lane.device, lane.peer) for lane in program.lanes if lane.name == "send" and lane.peer is not None}
        )
        outgoing, incoming = ({}, {}) if rendezvous is None else side_channels(rendezvous, directed)
        for source, target in directed:
            pair = team.make((source, target))
            if pair is not None and rank == source:
                self._sends[target] = _Connection(pair, outgoing.get(target), int(source < target))
            elif pair is not None:
                self._receives[source] = _Connection(pair, incoming.get(source), int(source > target))
        if device.type != "cuda":
            lanes = [lane for lane in program.lanes if lane.device == rank and lane.name not in ("compute", "comm")]
            self.lanes = {lane: HostLane(str(lane)) for lane in lanes}
        self._warm_up(directed, team)

    def _warm_up(self, directed: list[tuple[int, int]], team: Team) -> None:
        """Open all connections now rather than during a step, one by one, in the same order on all ranks."""
        nothing = torch.zeros(1, device=self.device)
        for source, target in directed:
            if team.rank == source:
                link = self._sends[target]
                team.settle(team.start(partial(link.group.send, [nothing], link.peer, 0)), nothing)
            elif team.rank == target:
                link = self._receives[source]
                team.settle(team.start(partial(link.group.recv, [nothing], link.peer, 0)), nothing)

    def send_as(self, description: Description, peer: int, tree: Tree, rows: int, sender: str) -> Work | None:
        """Send a message whose description the receiver knows. Return the work, if any was started.

        Raise PipelineError, starting with `sender`, if the message does not match the description.
        """
        lone = _lone(tree, rows)
        tensors = tree.leaves
        if lone is None or lone != description.lone:
            actual, tensors = describe(tree, self.device, rows)
            if actual != description:
                raise PipelineError(
                    f"{sender} other shapes or values than in an earlier step that began alike "
                    f"({actual.unlike(description)}); if it should, make the pipeline with dynamic_shapes=True"
                )
            description.lone = lone
        return self._start(self._sends[peer], tree, [moved_as(tensor) for tensor in tensors if tensor.numel()])

    def receive_as(
        self,
        description: Description,
        peer: int,
        channel: Channel,
        buffer_for: Callable[[Description], RecvBuffer],
        awaited: str,
    ) -> tuple[Arrival, Work | None]:
        """Post the receive of a message whose description is known. Return it, and the work to wait for."""
        arrival = self._arrival(self._receives[peer], channel, buffer_for, awaited)
        if self._instant:
            arrival.complete(description)
            return arrival, None
        with self.supervisor.explaining(lambda: f"rank {peer}"):
            arrival.begin_as(description)
        return arrival, arrival

    def _start(self, link: _Connection, tree: Tree, moved: list[Tensor]) -> Work | None:
        if self._instant:
            return None
        unchanged = partial(validate_unchanged, tree, tree.versions())
        with self.supervisor.explaining(lambda: "what it sent to be taken"):
            works = [link.group.send([part], link.peer, 0) for part in moved]
        if self.device.type == "cuda":
            return Begun([StreamFuture(work, raw) for work, raw in zip(works, moved, strict=True)], unchanged)
        return _Sent(works, moved, unchanged) if works else None

    def send(self, peer: int, channel: Channel, tree: Tree, rows: int = 0) -> tuple[Description, Work | None]:
        """Send a message with its header. Return its description, and the work if any was started.

        `rows` is the number of rows of the batch that the message comes from.
        """
        link = self._sends[peer]
        guess = link.guess(channel)
        before, lone = link.known.get(channel), _lone(tree, rows)
        if lone is not None and before is not None and before.lone == lone:
            description, new, tensors = before, None, tree.leaves
            link.steady.add(channel)
        else:
            description, tensors = describe(tree, self.device, rows)
            description.lone = lone
            new = None if before == description else description
            link.learn(channel, description)
        if self._instant:
            return description, None
        assert link.side_channel is not None
        text = b"" if new is None else new.encode()
        moved = [moved_as(tensor) for tensor in tensors if tensor.numel()]
        if guess is not None and new is not None and new.metas != guess.metas:
            # the receiver has posted receives for the prediction: complete them with filler
            moved = [*(moved_as(part) for part in guess.empty(self.device) if part.numel()), *moved]
        with self.supervisor.explaining(lambda: "what it sent to be taken"):
            link.side_channel.send(
                _HEADER.pack(len(text), _mark(channel, self.supervisor)) + text, self.supervisor.check
            )
        return description, self._start(link, tree, moved)

    def receive(
        self, peer: int, channel: Channel, buffer_for: Callable[[Description], RecvBuffer], awaited: str
    ) -> tuple[Arrival, Work | None]:
        """Post the receive of a message into the buffer that `buffer_for` returns. Return it, and the work to wait for.

        `awaited` describes the message in errors.
        """
        link = self._receives[peer]
        if self._instant:
            arrival = Arrival(self, link, channel, buffer_for, awaited)
            arrival.complete(link.known[channel])  # the last message again
            return arrival, None
        posted = self._arrival(link, channel, buffer_for, awaited)
        before, link.last = link.last, posted
        with self.supervisor.explaining(lambda: f"rank {peer}"):
            posted.post(before)
        return posted, posted

    def _arrival(
        self, link: _Connection, channel: Channel, buffer_for: Callable[[Description], RecvBuffer], awaited: str
    ) -> "_ToDevice | _ToHost":
        return (_ToDevice if self.device.type == "cuda" else _ToHost)(self, link, channel, buffer_for, awaited)

    def forget(self) -> None:
        """Drop the last receive of every link, at the end of a step."""
        for link in self._receives.values():
            link.last = None

    def check(self) -> None:
        """Raise if a link's process group has failed."""
        for link in (*self._sends.values(), *self._receives.values()):
            check_group(link.group)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        for link in (*self._sends.values(), *self._receives.values()):
            if link.side_channel is not None:
                link.side_channel.close()


def _lone(tree: Tree, rows: int) -> tuple[Any, ...] | None:
    """Return a key that identifies the description of a single plain contiguous tensor; None for other messages."""
    leaf = tree.leaves[0] if tree.spec is LEAF else None
    if type(leaf) is not Tensor or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
        return None
    return leaf.shape, leaf.dtype, leaf.device, tree.needs[0], rows


class _Sent:
    """The sends of a message's tensors as one work. `wait` raises if a tensor was changed in place meanwhile."""

    def __init__(self, works: list[dist.Work], moved: list[Tensor], unchanged: Callable[[], None]) -> None:
        self._works, self._moved, self._unchanged = works, moved, unchanged

    def wait(self) -> None:
        _wait(self._works)
        self._unchanged()


def _mark(channel: Channel, supervisor: Supervisor) -> int:
    """Return a number that identifies a message's step and channel."""
    kind, stage = channel
    return (supervisor.mark + (_KINDS[kind] << 32) + stage) % 2**64


def check_group(group: dist.ProcessGroup) -> None:
    """Raise if a nonblocking group has failed."""
    if hasattr(group, "check"):
        group.check()


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
