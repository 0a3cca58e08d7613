"""Moves values between devices: one group of two ranks for each directed link."""

import contextlib
from collections import deque
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.lanes import HostLane, Ticket
from stretto.execute.streams import StreamTicket
from stretto.execute.supervise import Supervisor
from stretto.ir.errors import PipelineError
from stretto.program.program import Program
from stretto.runtime.groups import Groups
from stretto.runtime.structure import DESCRIPTIONS, Description, Value, describe, tensors_of

_LENGTH = 1  # numbers in the first message of a header


@dataclass(slots=True)
class _Link:
    group: dist.ProcessGroup
    peer: int
    """The other end, as a rank of the group."""
    lane: HostLane
    known: dict[int, Description] = field(default_factory=dict)
    """What travels between two stages, by the stage it comes from, once it was described."""
    shapes: dict[int, list[torch.Size]] = field(default_factory=dict)


class Links:
    """This rank's ends of all links that a program uses.

    What a stage hands on is described once, in front of its first message, or in front of each where shapes vary.
    """

    def __init__(
        self,
        groups: Groups,
        program: Program,
        supervisor: Supervisor,
        device: torch.device,
        *,
        varying: bool,
    ) -> None:
        rank = supervisor.rank
        self._supervisor, self.device, self.varying = supervisor, device, varying
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
            if pair is not None and rank == source:
                self._sends[target] = _Link(pair, int(source < target), HostLane(f"send→{target}"))
            elif pair is not None:
                self._receives[source] = _Link(pair, int(source > target), HostLane(f"recv←{source}"))
        self._warm_up(directed, rank)

    def _warm_up(self, directed: list[tuple[int, int]], rank: int) -> None:
        """Connections are made now, not in the middle of a step; one after the other, in the same order everywhere."""
        nothing = torch.zeros(1, device=self.device)
        for source, target in directed:
            if rank == source:
                link = self._sends[target]
                link.group.send([nothing], link.peer, 0).wait()
            elif rank == target:
                link = self._receives[source]
                link.group.recv([nothing], link.peer, 0).wait()

    def send(self, peer: int, value: Value, stage: int) -> None:
        """Send what a stage hands on."""
        link, tensors = self._sends[peer], tensors_of(value)
        shapes = [tensor.shape for tensor in tensors]
        if self.varying or stage not in link.known:
            link.shapes[stage] = shapes
            link.known[stage] = description = describe(value)
            text = msgspec.json.encode(description)
            header = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
            self._fly(torch.tensor([len(text)], device=self.device), link)
            self._fly(header, link)
        elif shapes != link.shapes[stage]:
            raise PipelineError(
                f"stage {stage} hands on shapes {_listed(shapes)}, but {_listed(link.shapes[stage])} before; "
                "if shapes vary, make the pipeline with varying_shapes=True"
            )
        self.send_tensors(peer, tensors)

    def send_tensors(self, peer: int, tensors: list[Tensor]) -> None:
        link = self._sends[peer]
        for tensor in tensors:
            self._fly(_raw(tensor.contiguous()), link, tensor)

    def expect(self, peer: int, stage: int) -> Description:
        """What a stage hands on, heard of first if need be."""
        link = self._receives[peer]
        if self.varying or stage not in link.known:
            length = torch.zeros(_LENGTH, dtype=torch.int64, device=self.device)
            self._now(length, link, peer)
            header = torch.empty(int(length), dtype=torch.uint8, device=self.device)
            self._now(header, link, peer)
            link.known[stage] = DESCRIPTIONS.decode(bytes(header.tolist()))
        return link.known[stage]

    def receive(self, peer: int, tensors: list[Tensor]) -> list[Ticket | StreamTicket]:
        """Ask for tensors, to be there once the tickets are done."""
        link = self._receives[peer]
        tickets = [self._started(link.group.recv([_raw(tensor)], link.peer, 0), link, tensor) for tensor in tensors]
        return [ticket for ticket in tickets if ticket is not None]

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        while self._flying:
            self._supervisor.wait(self._flying.popleft(), lambda: "what it sent to be taken")

    def _fly(self, tensor: Tensor, link: _Link, source: Tensor | None = None) -> None:
        ticket = self._started(link.group.send([tensor], link.peer, 0), link, (tensor, source))
        while self._flying and self._flying[0].done and self._flying[0].error is None:
            self._flying.popleft()
        if ticket is not None:
            self._flying.append(ticket)

    def _now(self, tensor: Tensor, link: _Link, peer: int) -> None:
        ticket = self._started(link.group.recv([tensor], link.peer, 0), link, tensor)
        if ticket is not None:
            self._supervisor.wait(ticket, lambda: f"word from rank {peer} of what is to come")

    def _started(self, work: dist.Work | None, link: _Link, held: object) -> Ticket | StreamTicket | None:
        """A ticket for what a process group has started, None if it has ended already."""
        if work is None or self._instant:
            return None
        if self.device.type == "cpu" and work.is_completed():
            work.wait()  # which tells of an error
            return None
        ticket = StreamTicket(work, held) if self.device.type == "cuda" else link.lane.follow(work, held)
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


def check_group(group: dist.ProcessGroup) -> None:
    """Raise if a group that does not block has failed."""
    if hasattr(group, "check"):
        group.check()


def _listed(shapes: list[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)


def _raw(tensor: Tensor) -> Tensor:
    """The tensor as a process group can move it: some know no bfloat16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
