"""Moves values between ranks: one process group of two for each directed link, and headers on a side channel."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.device_lanes import Begun, StreamFuture
from stretto.execute.host_lanes import HostLane, Work
from stretto.execute.side_channel import side_channels
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.pipeline.arrivals import HEADER, Arrival, Channel, DeviceArrival, HostArrival, LinkEnd, mark_of
from stretto.pipeline.descriptions import Description, describe, moved_as
from stretto.pipeline.pytree import LEAF, Tree, validate_unchanged
from stretto.pipeline.recv_buffers import RecvBuffer
from stretto.program.program import Program
from stretto.program.task import PHASE_LANES, Lane

"""The lanes whose tasks the caller's thread runs."""


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
        self._sends: dict[int, LinkEnd] = {}
        self._receives: dict[int, LinkEnd] = {}
        self.lanes: dict[Lane, HostLane] = {}
        """Threads that wait for transfers of host memory."""
        directed = sorted(
            {(lane.device, lane.peer) for lane in program.lanes if lane.name == "send" and lane.peer is not None}
        )
        outgoing, incoming = ({}, {}) if rendezvous is None else side_channels(rendezvous, directed)
        for source, target in directed:
            pair = team.make((source, target))
            if pair is not None and rank == source:
                self._sends[target] = LinkEnd(pair, outgoing.get(target), int(source < target))
            elif pair is not None:
                self._receives[source] = LinkEnd(pair, incoming.get(source), int(source > target))
        if device.type != "cuda":
            lanes = [lane for lane in program.lanes if lane.device == rank and lane.name not in PHASE_LANES]
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

    def _start(self, link: LinkEnd, tree: Tree, moved: list[Tensor]) -> Work | None:
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
                HEADER.pack(len(text), mark_of(channel, self.supervisor)) + text, self.supervisor.check
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
            arrival = Arrival(self.supervisor, link, channel, buffer_for, awaited)
            arrival.complete(link.known[channel])  # the last message again
            return arrival, None
        posted = self._arrival(link, channel, buffer_for, awaited)
        before, link.last = link.last, posted
        with self.supervisor.explaining(lambda: f"rank {peer}"):
            posted.post(before)
        return posted, posted

    def _arrival(
        self, link: LinkEnd, channel: Channel, buffer_for: Callable[[Description], RecvBuffer], awaited: str
    ) -> "DeviceArrival | HostArrival":
        return (DeviceArrival if self.device.type == "cuda" else HostArrival)(
            self.supervisor, link, channel, buffer_for, awaited
        )

    def forget(self) -> None:
        """Drop the last receive of every link, at the end of a step."""
        for link in self._receives.values():
            link.last = None

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


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
