"""Resharding: brings every bucket of a version from the ranks that hold its shards to the sender that will send it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stretto.execute.groups import all_to_all
from stretto.execute.host_memory import threads
from stretto.execute.team import Team
from stretto.ir.errors import WeightsError, one_line
from stretto.weights.host_memory import Copy, copy_in_parallel
from stretto.weights.layout import Bucket
from stretto.weights.send.shard_map import ShardCopy, ShardMap, shard_copies
from stretto.weights.send.shard_reader import ShardReader
from stretto.weights.sources.shard import Shard, flat


@dataclass(frozen=True, slots=True)
class ExchangeGroup:
    """The process group that senders exchange shards in, and the device that their messages are on."""

    group: dist.ProcessGroup | None
    """None if nothing is exchanged."""
    device: torch.device


def reshard(
    buckets: Sequence[Bucket],
    shard_map: ShardMap,
    shards: Sequence[Shard],
    host_buffer: Callable[[int], Tensor],
    team: Team,
    exchange: ExchangeGroup,
    arrived: Callable[[int], None],
) -> None:
    """Fill the `host_buffer` of each of this sender's buckets, in rounds of one bucket for each rank. Call `arrived`
    for each bucket when it is complete.

    If a rank cannot read a shard, all ranks go on without it, and all raise at the end.
    """
    reader = ShardReader(shards)
    with threads() as pool:
        for begin in range(0, len(buckets), team.size):
            numbers = range(begin, min(begin + team.size, len(buckets)))
            copies = [list(shard_copies(number, buckets[number], shard_map)) for number in numbers]
            local = [c for row in copies for c in row if c.holder.rank == c.bucket % team.size == team.rank]
            try:
                copy_in_parallel((_local_copy(host_buffer(copy.bucket), copy, reader) for copy in local), pool)
            except Exception as error:
                reader.error = reader.error or one_line(error)
            remote = [[c for c in row if c.holder.rank != c.bucket % team.size] for row in copies]
            if any(remote) and exchange.group is not None:
                _exchange(remote, begin, reader, host_buffer, team, exchange)
            if begin + team.rank in numbers:
                arrived(begin + team.rank)
    for rank, text in enumerate(team.gather(reader.error, str)):
        if text:
            raise WeightsError(f"rank {rank}: {text}")


def _exchange(
    copies: list[list[ShardCopy]],
    begin: int,
    reader: ShardReader,
    host_buffer: Callable[[int], Tensor],
    team: Team,
    exchange: ExchangeGroup,
) -> None:
    """Send the shards of one round to the ranks that need them, in one all-to-all. `begin` is the first bucket."""
    group, device = exchange.group, exchange.device
    assert group is not None
    size, rank = team.size, team.rank
    outgoing: list[list[ShardCopy]] = [[] for _ in range(size)]
    incoming: list[list[ShardCopy]] = [[] for _ in range(size)]
    for number, row in enumerate(copies, begin):
        for copy in row:
            if copy.holder.rank == rank:
                outgoing[number % size].append(copy)
            if number % size == rank:
                incoming[copy.holder.rank].append(copy)
    bytes_out, bytes_in = ([sum(c.message_bytes for c in row) for row in rows] for rows in (outgoing, incoming))
    packed = [_padded_bytes(reader.read(copy).to(device), copy.message_bytes) for row in outgoing for copy in row]
    sent = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=device)
    received = torch.empty(sum(bytes_in), dtype=torch.uint8, device=device)
    work = team.start(lambda: all_to_all(group, received, sent, bytes_in, bytes_out))
    team.settle(work, received)
    team.catch_up("the other senders")
    ordered = [copy for row in incoming for copy in row]
    for part, copy in zip(torch.split(received, [copy.message_bytes for copy in ordered]), ordered, strict=True):
        target = copy.target(host_buffer(copy.bucket))
        target.copy_(part[: target.nbytes].view(target.dtype).view(target.shape), non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _local_copy(buffer: Tensor, copy: ShardCopy, reader: ShardReader) -> Copy:
    """Return the target and the source of a copy; of a whole tensor as bytes, which copy faster."""
    stored = reader.stored(copy)
    if stored is not None:
        return buffer[copy.offset : copy.offset + stored.nbytes], stored
    tensor = reader.read(copy)
    if copy.box is copy.run and tensor.is_contiguous():
        return buffer[copy.offset : copy.offset + tensor.nbytes], flat(tensor).view(torch.uint8)
    return copy.target(buffer), tensor


def _padded_bytes(tensor: Tensor, nbytes: int) -> Tensor:
    data = flat(tensor).view(torch.uint8)
    return functional.pad(data, (0, nbytes - len(data)))
