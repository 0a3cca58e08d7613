"""Registering: what ranks hold becomes one manifest, and every bucket comes to the rank that will send it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stretto.execute.groups import all_to_all
from stretto.execute.team import Team
from stretto.ir.errors import WeightsError, one_line
from stretto.weights.host_memory import Copy, copy_in_parallel, threads
from stretto.weights.layout import Bucket
from stretto.weights.manifest import ITEM_BYTES, Manifest, TensorSpec
from stretto.weights.regions import Region, common, extent, inside, runs
from stretto.weights.sources.shard import Shard, Stored, flat, has_memory

_STEP = 16  # bytes of the largest type


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A Held, as others hear of it."""

    entry: TensorSpec
    box: Region


class _Word(msgspec.Struct, frozen=True):
    parts: list[_Part]
    what: str
    on_device: bool


@dataclass(frozen=True, slots=True)
class ShardHolder:
    """Who has a box of a tensor."""

    rank: int
    number: int
    """Of what that rank holds."""
    box: Region


@dataclass(frozen=True, slots=True)
class ShardMap:
    """A version as all ranks together have it."""

    manifest: Manifest
    holders: list[list[ShardHolder]]
    """Of each of the manifest's entries; together they are all of it."""
    on_device: bool
    """Whether all that anybody holds is on a device."""


def agree(version: str, held: Sequence[Shard], team: Team, *, everywhere: bool, on_device: bool) -> ShardMap:
    """Hear what all ranks hold. If every rank holds everything, only its structure is compared."""
    parts = [_Part(it.entry, it.box) for it in held]
    digest = Manifest(version, tuple(it.entry for it in held)).digest if everywhere else ""
    words = team.gather(_Word([] if everywhere else parts, f"{version} {digest}", on_device), _Word)
    for rank, word in enumerate(words):
        if word.what != words[0].what:
            raise WeightsError(f"rank {rank} registers another version, or other tensors, than rank 0")
    known = {team.rank: parts} if everywhere else {rank: word.parts for rank, word in enumerate(words)}
    manifest, holders = _joined(version, known)
    manifest.check()
    return ShardMap(manifest, holders, all(word.on_device for word in words))


def _joined(version: str, ranks: Mapping[int, list[_Part]]) -> tuple[Manifest, list[list[ShardHolder]]]:
    """In the order in which ranks, one after the other, first name them. Of what several hold, the first's counts."""
    entries: dict[str, TensorSpec] = {}
    holders: dict[str, dict[Region, ShardHolder]] = {}
    for rank, parts in ranks.items():
        for number, part in enumerate(parts):
            entry = entries.setdefault(part.entry.name, part.entry)
            if entry != part.entry:
                raise WeightsError(
                    f"rank {rank} has {part.entry.name} as {part.entry.dtype}{list(part.entry.shape)}, "
                    f"another rank as {entry.dtype}{list(entry.shape)}"
                )
            holders.setdefault(entry.name, {}).setdefault(part.box, ShardHolder(rank, number, part.box))
    found = []
    for name, entry in entries.items():
        whole = prod(entry.shape)
        for box in holders[name]:
            if not all(0 <= start <= stop <= size for (start, stop), size in zip(box, entry.shape, strict=True)):
                raise WeightsError(f"{name} has shape {entry.shape}, and a rank holds {box} of it")
        largest = max(holders[name], key=lambda box: prod(extent(box)))
        if prod(extent(largest)) == whole:  # who has all of it gives all of it
            found.append([holders[name][largest]])
            continue
        there = sum(prod(extent(box)) for box in holders[name])
        if there != whole or _overlap(list(holders[name])):
            raise WeightsError(
                f"{name} has {whole} elements, of which ranks hold {there}: parts are missing or overlap"
            )
        found.append(list(holders[name].values()))
    return Manifest(version, tuple(entries.values())), found


def _overlap(boxes: list[Region]) -> bool:
    """Whether two of them have anything in common."""
    start, stop = np.moveaxis(np.array(boxes).reshape(len(boxes), -1, 2), -1, 0)  # each boxes × dimensions
    both = (np.maximum(start[:, None], start) < np.minimum(stop[:, None], stop)).all(-1)
    return bool(both.sum() > len(boxes))


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A box of a tensor, from who holds it to the bucket that it belongs to."""

    holder: ShardHolder
    bucket: int
    offset: int
    """In the bucket, of the run of elements that the box is part of."""
    run: Region
    box: Region
    dtype: str

    @property
    def room(self) -> int:
        """Bytes that it takes in a message, in which all begin where any type may."""
        return -(-prod(extent(self.box)) * ITEM_BYTES[self.dtype] // _STEP) * _STEP


def shard_copies(number: int, bucket: Bucket, holdings: ShardMap) -> Iterator[ShardCopy]:
    """All that makes up a bucket."""
    for piece in bucket.pieces:
        entry, holders = holdings.manifest.entries[piece.entry], holdings.holders[piece.entry]
        if len(holders) == 1 and not piece.start and piece.nbytes == holdings.manifest.sizes[piece.entry]:
            box = holders[0].box  # a tensor that somebody has and that is not split: nearly all are
            if piece.nbytes:
                yield ShardCopy(holders[0], number, piece.offset, box, box, entry.dtype)
            continue
        item = ITEM_BYTES[entry.dtype]
        first = piece.start // item
        for start, run in runs(entry.shape, first, first + piece.nbytes // item):
            offset = piece.offset + (start - first) * item
            for holder in holders:
                shared = common(run, holder.box)
                if shared is not None:
                    yield ShardCopy(holder, number, offset, run, shared, entry.dtype)


def spread(
    buckets: Sequence[Bucket],
    holdings: ShardMap,
    held: Sequence[Shard],
    room: Callable[[int], Tensor],
    team: Team,
    group: dist.ProcessGroup | None,
    device: torch.device,
    arrived: Callable[[int], None],
) -> None:
    """Bring every bucket to its sender's `room` for it, a round of one bucket for each rank at a time. A sender's that
    has `arrived` is complete.

    What cannot be read is left out while all ranks go on, and raised by all in the end.
    """
    reading = _Reading(held)
    with threads() as pool:
        for begin in range(0, len(buckets), team.size):
            here = range(begin, min(begin + team.size, len(buckets)))
            moves = [list(shard_copies(k, buckets[k], holdings)) for k in here]
            mine = [m for row in moves for m in row if m.holder.rank == m.bucket % team.size == team.rank]
            try:
                copy_in_parallel((_local(room(move.bucket), move, reading) for move in mine), pool)
            except Exception as wrong:
                reading.error = reading.error or one_line(wrong)
            others = [[m for m in row if m.holder.rank != m.bucket % team.size] for row in moves]
            if any(others) and group is not None:
                _exchange(others, begin, reading, room, team, group, device)
            if begin + team.rank in here:
                arrived(begin + team.rank)
    for rank, error in enumerate(team.gather(reading.error, str)):
        if error:
            raise WeightsError(f"rank {rank}: {error}")


def _exchange(
    moves: list[list[ShardCopy]],
    begin: int,
    reading: "_Reading",
    room: Callable[[int], Tensor],
    team: Team,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """All ranks give all others what those are to send, in one all-to-all."""
    size, rank = team.size, team.rank
    outgoing: list[list[ShardCopy]] = [[] for _ in range(size)]
    incoming: list[list[ShardCopy]] = [[] for _ in range(size)]
    for k, row in enumerate(moves, begin):
        for move in row:
            if move.holder.rank == rank:
                outgoing[k % size].append(move)
            if k % size == rank:
                incoming[move.holder.rank].append(move)
    bytes_out, bytes_in = ([sum(m.room for m in row) for row in rows] for rows in (outgoing, incoming))
    packed = [_bytes(reading(move).to(device), move.room) for row in outgoing for move in row]
    sent = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=device)
    taken = torch.empty(sum(bytes_in), dtype=torch.uint8, device=device)
    work = team.start(lambda: all_to_all(group, taken, sent, bytes_in, bytes_out))
    team.settle(work, taken)
    team.catch_up("the other senders")
    ordered = [move for row in incoming for move in row]
    for part, move in zip(torch.split(taken, [move.room for move in ordered]), ordered, strict=True):
        into = target(room(move.bucket), move)
        into.copy_(part[: into.nbytes].view(into.dtype).view(into.shape), non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _local(room: Tensor, move: ShardCopy, reading: "_Reading") -> Copy:
    """Where to copy to, and what; a whole tensor as its bytes, which is quicker."""
    stored = reading.stored(move)
    if stored is not None:
        return room[move.offset : move.offset + stored.nbytes], stored
    tensor = reading(move)
    if move.box is move.run and tensor.is_contiguous():
        return room[move.offset : move.offset + tensor.nbytes], flat(tensor).view(torch.uint8)
    return target(room, move), tensor


def target(room: Tensor, move: ShardCopy) -> Tensor:
    """Where a box goes, in the room of its bucket."""
    dtype: torch.dtype = getattr(torch, move.dtype)
    shape = extent(move.run)
    count = prod(shape) * dtype.itemsize
    run = room[move.offset : move.offset + count].view(dtype).view(shape)
    return run if move.box is move.run else run[inside(move.box, move.run)]


def _bytes(tensor: Tensor, room: int) -> Tensor:
    raw = flat(tensor).view(torch.uint8)
    return functional.pad(raw, (0, room - len(raw)))


def read_bucket(number: int, bucket: Bucket, holdings: ShardMap, held: Sequence[Shard]) -> Tensor:
    """A bucket of a version that this rank holds all of, with zeros between its tensors."""
    reading, made = _Reading(held), torch.zeros(bucket.nbytes, dtype=torch.uint8, device="cpu")
    for move in shard_copies(number, bucket, holdings):
        target(made, move).copy_(reading(move))
    if reading.error:
        raise WeightsError(reading.error)
    return made


class _Reading:
    """Reads what this rank holds; the last is remembered, since a tensor can be in several buckets."""

    def __init__(self, held: Sequence[Shard]) -> None:
        self._held, self._last = held, (-1, torch.empty(0))
        self.error = ""

    def stored(self, move: ShardCopy) -> Stored | None:
        """Where its bytes lie, if it is a whole tensor that lies in one piece."""
        return self._held[move.holder.number].stored if move.box is move.run is move.holder.box else None

    def __call__(self, move: ShardCopy) -> Tensor:
        number = move.holder.number
        if self._last[0] != number:
            self._last = number, self._read(self._held[number])
        tensor = self._last[1]
        return tensor if move.box is move.holder.box else tensor[inside(move.box, move.holder.box)]

    def _read(self, held: Shard) -> Tensor:
        wanted: torch.dtype = getattr(torch, held.entry.dtype)
        shape = extent(held.box)
        try:
            tensor = held.read().detach()
            if tensor.is_meta or tensor.layout != torch.strided or not has_memory(tensor):
                raise WeightsError(f"is a {tensor.layout} tensor on {tensor.device}, and has no values to push")
            tensor = tensor.resolve_conj().resolve_neg()
            if tensor.dtype == wanted and tuple(tensor.shape) == shape:
                return tensor
            raise WeightsError(f"was {wanted}{list(shape)}, and has become {tensor.dtype}{list(tensor.shape)}")
        except Exception as error:
            self.error = self.error or f"{held.entry.name}: {error}"
        return torch.zeros(shape, dtype=wanted, device="cpu")
