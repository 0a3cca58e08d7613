"""Moves values between devices: one group of two ranks for each directed link."""

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.program.program import Program
from stretto.runtime.groups import Groups
from stretto.runtime.structure import Value, describe, make_room, tensors_of

_LENGTH = 1  # numbers in the first message of a header


@dataclass(slots=True)
class Arrival:
    """Something that was asked for; there once `take` returns it."""

    value: Value
    works: list[dist.Work]

    def take(self) -> Value:
        for work in self.works:
            work.wait()
        return self.value


@dataclass(slots=True)
class _Link:
    group: dist.ProcessGroup
    peer: int
    """The other end, as a rank of all processes."""
    known: dict[int, bytes] = field(default_factory=dict)
    """What travels between two stages, by the stage it comes from, once it was described."""


class Links:
    """This rank's ends of all links that a program uses.

    What a stage hands on is described once, in front of its first message, or in front of each where shapes vary.
    """

    def __init__(self, groups: Groups, program: Program, rank: int, device: torch.device, *, varying: bool) -> None:
        self._device, self._varying = device, varying
        self._sends: dict[int, _Link] = {}
        self._receives: dict[int, _Link] = {}
        self._flying: deque[tuple[dist.Work, Tensor]] = deque()
        directed = sorted(
            {(lane.device, lane.peer) for lane in program.lanes if lane.name == "send" and lane.peer is not None}
        )
        for source, target in directed:
            pair = groups.make((source, target))
            if pair is not None and rank == source:
                self._sends[target] = _Link(pair, groups.process(target))
            elif pair is not None:
                self._receives[source] = _Link(pair, groups.process(source))
        self._warm_up(directed, rank)

    def _warm_up(self, directed: list[tuple[int, int]], rank: int) -> None:
        """Connections are made now, not in the middle of a step; one after the other, in the same order everywhere."""
        nothing = torch.zeros(1, device=self._device)
        for source, target in directed:
            if rank == source:
                link = self._sends[target]
                dist.send(nothing, link.peer, group=link.group)
            elif rank == target:
                link = self._receives[source]
                dist.recv(nothing, link.peer, group=link.group)

    def send(self, peer: int, value: Value, stage: int) -> None:
        """Send what a stage hands on."""
        link = self._sends[peer]
        if self._varying or stage not in link.known:
            link.known[stage] = text = describe(value)
            header = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
            self._fly(torch.tensor([len(text)], device=self._device), link)
            self._fly(header, link)
        self.send_tensors(peer, tensors_of(value))

    def send_tensors(self, peer: int, tensors: list[Tensor]) -> None:
        link = self._sends[peer]
        for tensor in tensors:
            self._fly(_raw(tensor.contiguous()), link)

    def receive(self, peer: int, stage: int) -> Arrival:
        """Make room for what a stage hands on, and ask for it."""
        link = self._receives[peer]
        if self._varying or stage not in link.known:
            length = torch.zeros(_LENGTH, dtype=torch.int64, device=self._device)
            dist.recv(length, link.peer, group=link.group)
            header = torch.empty(int(length), dtype=torch.uint8, device=self._device)
            dist.recv(header, link.peer, group=link.group)
            link.known[stage] = bytes(header.tolist())
        value = make_room(link.known[stage], self._device)
        return self.receive_tensors(peer, tensors_of(value), value)

    def receive_tensors(self, peer: int, tensors: list[Tensor], value: Value) -> Arrival:
        link = self._receives[peer]
        works = [dist.irecv(_raw(tensor), link.peer, group=link.group) for tensor in tensors]
        return Arrival(value, [work for work in works if work is not None])

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        while self._flying:
            work, _ = self._flying.popleft()
            work.wait()

    def _fly(self, tensor: Tensor, link: _Link) -> None:
        work = dist.isend(tensor, link.peer, group=link.group)
        if work is not None:
            self._flying.append((work, tensor))


def _raw(tensor: Tensor) -> Tensor:
    """The tensor as a process group can move it: some know no bfloat16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
