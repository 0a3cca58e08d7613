"""Collectives made of messages. They reduce in the order of the ranks, so that all ranks get the same bits."""

from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import named
from stretto.onegpu import memory
from stretto.onegpu.engine import Engine
from stretto.onegpu.member import Member
from stretto.onegpu.messages import Message
from stretto.onegpu.reduce import reduced
from stretto.onegpu.runner import Runner
from stretto.onegpu.work import MessageWork, Work, settle

_SMALL = 65536  # elements up to which an all-reduce is an all-gather and a local sum


class Collectives:
    """The collectives of one rank, with separate channels for those that only move and those that also reduce."""

    def __init__(self, engine: Engine, rank: int, size: int, *, moving: Member, reducing: Member) -> None:
        self._rank, self._size, self._moving, self._reducing = rank, size, moving, reducing
        self._runner = Runner(engine, reducing)
        self.turn = 0
        """How many collectives were begun."""

    # Collectives that only move: all messages are posted at once.

    def broadcast(self, tensors: list[Tensor], root: int) -> Work:
        if self._rank == root:
            return self._move([(peer, tensor) for tensor in tensors for peer in self._peers()], [], tensors)
        return self._move([], [(root, tensor) for tensor in tensors], tensors)

    def all_gather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """Gather each input into its own list of outputs, one for each rank."""
        whole = [memory.plain(mine) for mine in inputs]
        for parts, mine in zip(outputs, whole, strict=True):
            self.validate_parts(parts, mine)
            for part in parts:  # also this rank's own, so that all ranks raise alike
                memory.validate_target(part)
        for parts, mine in zip(outputs, whole, strict=True):
            parts[self._rank].copy_(mine.view_as(parts[self._rank]))
        return self._move(
            [(peer, mine) for mine in whole for peer in self._peers()],
            [(peer, parts[peer]) for parts in outputs for peer in self._peers()],
            [part for parts in outputs for part in parts],
        )

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Work:
        self.validate_parts(outputs)
        self.validate_parts(inputs)
        outputs[self._rank].copy_(inputs[self._rank])
        peers = self._peers()
        return self._move([(peer, inputs[peer]) for peer in peers], [(peer, outputs[peer]) for peer in peers], outputs)

    def gather(self, outputs: list[Tensor], tensor: Tensor, root: int) -> Work:
        """Gather a tensor of each rank; only the root has outputs."""
        if self._rank != root:
            return self._move([(root, tensor)], [], [])
        self.validate_parts(outputs, tensor)
        outputs[self._rank].copy_(tensor)
        return self._move([], [(peer, outputs[peer]) for peer in self._peers()], outputs)

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int, result: list[Tensor]) -> Work:
        """Scatter a tensor to each rank; only the root has inputs."""
        if self._rank != root:
            return self._move([], [(root, output)], result)
        self.validate_parts(inputs, output)
        output.copy_(inputs[self._rank])
        return self._move([(peer, inputs[peer]) for peer in self._peers()], [], result)

    # Collectives that reduce: they run on the group's stream or in its thread.

    def all_reduce(self, tensors: list[Tensor], op: Any) -> Work:
        def run() -> None:
            for tensor in tensors:
                self._all_reduce(tensor, op)

        return self._runner.start(run, tensors, turn=self.turn)

    def reduce(self, tensors: list[Tensor], root: int, op: Any) -> Work:
        def run() -> None:
            for tensor in tensors:
                whole = memory.plain(tensor)
                if self._rank == root:
                    parts = self._buffers(whole)
                    self._exchange({}, {peer: parts[peer] for peer in self._peers()})
                    parts[self._rank] = whole
                    tensor.copy_(reduced(parts, op).view_as(tensor))
                else:
                    self._exchange({root: whole}, {})

        return self._runner.start(run, tensors, turn=self.turn)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any) -> Work:
        for output, parts in zip(outputs, inputs, strict=True):
            self.validate_parts(parts, output)

        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                buffers = self._buffers(output)
                self._exchange(
                    {peer: parts[peer] for peer in self._peers()}, {peer: buffers[peer] for peer in self._peers()}
                )
                buffers[self._rank] = parts[self._rank]
                output.copy_(reduced(buffers, op).view_as(output))

        return self._runner.start(run, outputs, turn=self.turn)

    def rows(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Split a tensor into the rows of each rank; without sizes, evenly."""
        if sizes:
            return list(torch.split(tensor, sizes))
        if len(tensor) % self._size:
            raise ValueError(f"{len(tensor)} rows cannot be shared evenly among {self._size} ranks")
        return list(tensor.chunk(self._size)) if len(tensor) else [tensor] * self._size

    def validate_parts(self, parts: list[Tensor], like: Tensor | None = None) -> None:
        """Raise ValueError unless there is a tensor for each rank, each of the same size and dtype as `like`."""
        if len(parts) != self._size:
            raise ValueError(f"a collective of {self._size} ranks needs a tensor for each (got {len(parts)})")
        for part in parts:
            if like is not None and (part.numel(), part.dtype) != (like.numel(), like.dtype):
                raise ValueError(
                    f"the tensors of a collective must be alike (got {part.numel()} of {part.dtype} "
                    f"and {like.numel()} of {like.dtype})"
                )

    def close(self) -> None:
        self._runner.close()

    def _peers(self) -> list[int]:
        """Return the other ranks, starting after this one, so that not all ranks start with the same peer."""
        return [(self._rank + k) % self._size for k in range(1, self._size)]

    def _buffers(self, like: Tensor) -> list[Tensor]:
        """Return a flat receive buffer for each rank."""
        return list(like.new_empty((self._size, like.numel())))

    def _all_gather(self, buffers: list[Tensor], mine: Tensor) -> None:
        mine = memory.plain(mine)
        self._exchange(dict.fromkeys(self._peers(), mine), {peer: buffers[peer] for peer in self._peers()})
        buffers[self._rank].copy_(mine.view_as(buffers[self._rank]))

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce a small tensor on every rank; of a large one, each rank reduces a shard and sends it to all."""
        flat = memory.plain(tensor).view(-1)
        if flat.numel() <= _SMALL:
            parts = self._buffers(flat)
            self._all_gather(parts, flat)
            tensor.copy_(reduced(parts, op).view_as(tensor))
            return
        shards = list(flat.tensor_split(self._size))
        mine = shards[self._rank]
        buffers = self._buffers(mine)
        self._exchange({peer: shards[peer] for peer in self._peers()}, {peer: buffers[peer] for peer in self._peers()})
        buffers[self._rank] = mine
        mine.copy_(reduced(buffers, op))
        self._exchange(dict.fromkeys(self._peers(), mine), {peer: shards[peer] for peer in self._peers()})
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _move(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], result: list[Tensor]) -> Work:
        """Begin to send and receive; the caller waits for the work."""
        self._moving.turn = self.turn
        return MessageWork(self._moving, self._post(self._moving, sends, receives), result)

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """Send and receive, and wait for all of it, on the current stream or on the host."""
        settle(self._reducing, self._post(self._reducing, list(sends.items()), list(receives.items())))

    def _post(
        self, member: Member, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
    ) -> list[Message]:
        """Post all messages of a collective or none; if only some can be posted, fail the group."""
        for _, tensor in receives:
            memory.validate_target(tensor)
        for _, tensor in sends:
            memory.validate_source(tensor)
        member.check()
        try:
            messages = [member.receive(tensor, peer) for peer, tensor in receives]
            return messages + [member.send(tensor, peer) for peer, tensor in sends]
        except BaseException as error:
            member.fail(f"rank {self._rank} failed within collective {self.turn}: {named(error)}")
            raise
