"""Receives: a link's ends, and messages that are on their way to this rank."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from stretto.execute.device_lanes import Begun, StreamFuture
from stretto.execute.side_channel import SideChannel
from stretto.execute.supervisor import Supervisor
from stretto.ir.errors import peer_failure
from stretto.pipeline.agreement import IN_ORDER
from stretto.pipeline.descriptions import Description
from stretto.pipeline.pytree import Tree
from stretto.pipeline.recv_buffers import RecvBuffer
from stretto.program.task import Kind

Channel = tuple[Kind, int]
"""A kind of transfer and its stage. Messages of one channel usually have the same shapes."""

HEADER = struct.Struct("<QQ")  # the length of the description that follows (0 for none), and the message's mark
_KINDS = {kind: number for number, kind in enumerate(Kind)}


@dataclass(slots=True)
class LinkEnd:
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
        length, mark = HEADER.unpack(self.side_channel.receive(HEADER.size, supervisor.check))
        if mark != mark_of(channel, supervisor):
            raise peer_failure(f"a message came that does not belong to {supervisor.label}; {IN_ORDER}")
        if not length:
            return self.known[channel]
        return Description.decode(self.side_channel.receive(length, supervisor.check))


class Arrival(Begun):
    """A posted receive. The message has arrived once someone has waited for it: its lane on the host, the stream that
    uses it on a device.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        link: LinkEnd,
        channel: Channel,
        buffer_for: Callable[[Description], RecvBuffer],
        awaited: str,
    ) -> None:
        super().__init__()
        self._supervisor, self._link, self._channel = supervisor, link, channel
        self._buffer_for, self._awaited = buffer_for, awaited
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
            description = self._link.recv_description(self._channel, self._supervisor)
            if self._buffer is None or self._buffer.metas != description.metas:
                self._fill(description)
            self._link.learn(self._channel, description)
            self.description = description

    def _fill(self, description: Description) -> None:
        self._buffer = self._buffer_for(description)
        self.futures += [
            StreamFuture(self._link.group.recv([raw], self._link.peer, 0), raw) for raw in self._buffer.raws
        ]


class HostArrival(Arrival):
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


class DeviceArrival(Arrival):
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
        with self._supervisor.explaining(lambda: self._awaited):
            self.follow()

    def recv_description(self) -> None:
        if self.description is None:
            assert self._link.side_channel is not None
            self._supervisor.wait(self._link.side_channel, lambda: self._awaited)
            with self._supervisor.explaining(lambda: self._awaited):
                super().recv_description()


def mark_of(channel: Channel, supervisor: Supervisor) -> int:
    """Return a number that identifies a message's step and channel."""
    kind, stage = channel
    return (supervisor.mark + (_KINDS[kind] << 32) + stage) % 2**64
