"""Moves values between devices: one group of two ranks for each directed link, and words ahead of every message."""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.lanes import HostLane, Ticket
from stretto.execute.streams import StreamTicket
from stretto.execute.supervise import Supervisor
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.runtime.descriptions import Description, as_it_lies, describe
from stretto.runtime.groups import Groups
from stretto.runtime.rooms import Lent
from stretto.runtime.structure import Tree

Channel = tuple[Kind, int]
"""A kind of transfer and its stage: messages of one channel mostly look alike."""

_SAME = torch.zeros(1, dtype=torch.int64)  # what is said ahead of a message like the one before; no length
_MOVED_AS_THEY_ARE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
)


@dataclass(slots=True)
class _Link:
    group: dist.ProcessGroup
    words: dist.ProcessGroup
    """Where words travel, between the hosts."""
    peer: int
    """The other end, as a rank of both groups."""
    lane: HostLane
    known: dict[Channel, Description] = field(default_factory=dict)
    """The last message of each channel."""


class Arrival:
    """A message that was asked for: there once its tickets are done."""

    __slots__ = ("lent", "tickets", "what")

    def __init__(self) -> None:
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
    is that follows. So what arrives is never taken for anything but what was sent. Where tensors move on a device,
    words go from host to host beside them.
    """

    def __init__(self, groups: Groups, program: Program, supervisor: Supervisor, device: torch.device) -> None:
        rank = supervisor.rank
        self._supervisor, self.device = supervisor, device
        self._instant = dist.get_backend() == "fake"  # its works have always ended, but do not say so
        self._sends: dict[int, _Link] = {}
        self._receives: dict[int, _Link] = {}
        self._flying: deque[Ticket | StreamTicket] = deque()
        self.started: list[Ticket | StreamTicket] | None = None
        """If given, all that is started is put there."""
        directed = sorted(
            {(lane.device, lane.peer) for lane in program.lanes if lane.name == "send" and lane.peer is not None}
        )
        for source, target in directed:
            pair = groups.make((source, target))
            words = pair if device.type == "cpu" else groups.make((source, target), backend="gloo")
            if pair is not None and words is not None and rank == source:
                self._sends[target] = _Link(pair, words, int(source < target), HostLane(f"send→{target}"))
            elif pair is not None and words is not None:
                self._receives[source] = _Link(pair, words, int(source > target), HostLane(f"recv←{source}"))
        self._warm_up(directed, rank)

    def _warm_up(self, directed: list[tuple[int, int]], rank: int) -> None:
        """Connections are made now, not in the middle of a step; one after the other, in the same order everywhere."""
        nothing = torch.zeros(1, device=self.device)
        for source, target in directed:
            if rank == source:
                link = self._sends[target]
                link.group.send([nothing], link.peer, 0).wait()
                link.words.send([_SAME], link.peer, 0).wait()
            elif rank == target:
                link = self._receives[source]
                link.group.recv([nothing], link.peer, 0).wait()
                link.words.recv([torch.zeros_like(_SAME)], link.peer, 0).wait()

    def send(self, peer: int, channel: Channel, tree: Tree, rows: int = 0) -> None:
        """Send a message; `rows` are those of the batch that it comes from."""
        link = self._sends[peer]
        what, tensors = describe(tree, self.device, rows)
        works: list[dist.Work | None] = []
        if link.known.get(channel) == what:
            works.append(link.words.send([_SAME], link.peer, 0))
        else:
            text = bytearray(what.encode())
            works.append(link.words.send([torch.tensor([len(text)])], link.peer, 0))
            works.append(link.words.send([torch.frombuffer(text, dtype=torch.uint8)], link.peer, 0))
            link.known[channel] = what
        moved = [_moved(tensor) for tensor in tensors if tensor.numel()]
        if self.device.type == "cuda":
            self._fly(link.lane.follow(_All(works)))
            for raw in moved:
                self._fly(StreamTicket(link.group.send([raw], link.peer, 0), (raw, tree)))
        elif not self._instant:
            works += [link.group.send([raw], link.peer, 0) for raw in moved]
            self._fly(link.lane.follow(_All(works), (moved, tree)))

    def receive(self, peer: int, channel: Channel, room: Callable[[Description], Lent]) -> Arrival:
        """Ask for a message, which comes into the room that is made for it."""
        link, arrival = self._receives[peer], Arrival()
        if self._instant:
            arrival.what = link.known[channel]
            arrival.lent = room(arrival.what)
        elif self.device.type == "cuda":
            heard = _Done(lambda: self._hear(link, channel))
            said = f"word from rank {peer} of what is to come"
            self._supervisor.wait(link.lane.follow(heard), lambda: said)
            arrival.what = link.known[channel]
            arrival.lent = room(arrival.what)
            arrival.tickets = [
                self._begun(StreamTicket(link.group.recv([raw], link.peer, 0), raw)) for raw in _raws(arrival.lent)
            ]
        else:

            def arrive() -> None:
                self._hear(link, channel)
                arrival.what = link.known[channel]
                arrival.lent = room(arrival.what)
                for work in [link.group.recv([raw], link.peer, 0) for raw in _raws(arrival.lent)]:
                    work.wait()

            arrival.tickets = [self._begun(link.lane.follow(_Done(arrive)))]
        return arrival

    def _hear(self, link: _Link, channel: Channel) -> None:
        """Wait for the word ahead of a message, on a lane."""
        length = torch.zeros_like(_SAME)
        link.words.recv([length], link.peer, 0).wait()
        if length.item():
            text = torch.empty(int(length), dtype=torch.uint8)
            link.words.recv([text], link.peer, 0).wait()
            link.known[channel] = Description.decode(text.numpy().tobytes())

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        while self._flying:
            self._supervisor.wait(self._flying.popleft(), lambda: "what it sent to be taken")

    def _fly(self, ticket: Ticket | StreamTicket) -> None:
        while self._flying and self._flying[0].done and self._flying[0].error is None:
            self._flying.popleft()
        self._flying.append(self._begun(ticket))

    def _begun(self, ticket: Ticket | StreamTicket) -> Ticket | StreamTicket:
        if self.started is not None:
            self.started.append(ticket)
        return ticket

    def check(self) -> None:
        """Raise if a link has failed."""
        for link in (*self._sends.values(), *self._receives.values()):
            check_group(link.group)

    def abort(self) -> None:
        """Give up on all that is under way, so that no stream waits for it."""
        for link in (*self._sends.values(), *self._receives.values()):
            with contextlib.suppress(RuntimeError):
                link.group.abort()

    def close(self) -> None:
        for link in (*self._sends.values(), *self._receives.values()):
            link.lane.close()


class _All:
    """Several works as one."""

    def __init__(self, works: list[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()


class _Done:
    """Work that is done by the lane that waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.wait = run


def check_group(group: dist.ProcessGroup) -> None:
    """Raise if a group that does not block has failed."""
    if hasattr(group, "check"):
        group.check()


def _raws(lent: Lent) -> list[Tensor]:
    return [_moved(as_it_lies(tensor)) for tensor in lent.tensors if tensor.numel()]


def _moved(tensor: Tensor) -> Tensor:
    """A contiguous tensor as any process group can move it: most know few types."""
    return tensor if tensor.dtype in _MOVED_AS_THEY_ARE else tensor.reshape(-1).view(torch.uint8)
