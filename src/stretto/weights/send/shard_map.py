"""The shard map of a version: which rank holds which shards, and which copies of them fill a bucket."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import torch
from torch import Tensor

from stretto.execute.team import Team
from stretto.ir.errors import WeightsError
from stretto.weights.layout import Bucket
from stretto.weights.manifest import ITEM_BYTES, Manifest, TensorSpec
from stretto.weights.regions import Region, common, extent, inside, runs
from stretto.weights.sources.shard import Shard

_MESSAGE_ALIGNMENT = 16  # bytes of an element of the largest type


class _ShardSpec(msgspec.Struct, frozen=True, array_like=True):
    """A shard's description, as ranks exchange it."""

    entry: TensorSpec
    box: Region


class _RankShards(msgspec.Struct, frozen=True):
    """What one rank registers, as ranks exchange it."""

    parts: list[_ShardSpec]
    what: str
    on_device: bool


@dataclass(frozen=True, slots=True)
class ShardHolder:
    """The rank that holds a box of a tensor."""

    rank: int
    number: int
    """The shard's place among that rank's shards."""
    box: Region


@dataclass(frozen=True, slots=True)
class ShardMap:
    """A version, and the ranks that hold its shards."""

    manifest: Manifest
    holders: list[list[ShardHolder]]
    """For each entry of the manifest, holders whose boxes together cover the tensor exactly once."""
    on_device: bool
    """Whether all shards of all ranks are on devices."""


def gather_shard_map(
    version: str, shards: Sequence[Shard], team: Team, *, everywhere: bool, on_device: bool
) -> ShardMap:
    """Gather the shards of all ranks. If every rank holds everything (`everywhere`), only compare their structure."""
    specs = [_ShardSpec(shard.entry, shard.box) for shard in shards]
    digest = Manifest(version, tuple(shard.entry for shard in shards)).digest if everywhere else ""
    ranks = team.gather(_RankShards([] if everywhere else specs, f"{version} {digest}", on_device), _RankShards)
    for number, rank in enumerate(ranks):
        if rank.what != ranks[0].what:
            raise WeightsError(f"rank {number} registers another version, or other tensors, than rank 0")
    specs_by_rank = {team.rank: specs} if everywhere else {number: rank.parts for number, rank in enumerate(ranks)}
    manifest, holders = _merge(version, specs_by_rank)
    manifest.check()
    return ShardMap(manifest, holders, all(rank.on_device for rank in ranks))


def _merge(version: str, specs_by_rank: Mapping[int, list[_ShardSpec]]) -> tuple[Manifest, list[list[ShardHolder]]]:
    """Merge the shards of all ranks into one manifest, and choose each tensor's holders.

    Tensors are in the order in which ranks, one after the other, first name them. If several ranks hold the same box,
    the first one is its holder.
    """
    entries: dict[str, TensorSpec] = {}
    boxes_by_name: dict[str, dict[Region, ShardHolder]] = {}
    for rank, specs in specs_by_rank.items():
        for number, spec in enumerate(specs):
            entry = entries.setdefault(spec.entry.name, spec.entry)
            if entry != spec.entry:
                raise WeightsError(
                    f"rank {rank} has {spec.entry.name} as {spec.entry.dtype}{list(spec.entry.shape)}, "
                    f"another rank as {entry.dtype}{list(entry.shape)}"
                )
            boxes_by_name.setdefault(entry.name, {}).setdefault(spec.box, ShardHolder(rank, number, spec.box))
    holders = [_choose_holders(entry, boxes_by_name[name]) for name, entry in entries.items()]
    return Manifest(version, tuple(entries.values())), holders


def _choose_holders(entry: TensorSpec, boxes: Mapping[Region, ShardHolder]) -> list[ShardHolder]:
    """Return a holder of the whole tensor if there is one, otherwise the holders of all its parts.

    Raise WeightsError if a box does not fit the tensor, or if boxes overlap or leave elements out.
    """
    size = prod(entry.shape)
    for box in boxes:
        if not all(0 <= start <= stop <= length for (start, stop), length in zip(box, entry.shape, strict=True)):
            raise WeightsError(f"{entry.name} has shape {entry.shape}, and a rank holds {box} of it")
    largest = max(boxes, key=lambda box: prod(extent(box)))
    if prod(extent(largest)) == size:
        return [boxes[largest]]
    covered = sum(prod(extent(box)) for box in boxes)
    if covered != size or _overlap(list(boxes)):
        raise WeightsError(
            f"{entry.name} has {size} elements, of which ranks hold {covered}: parts are missing or overlap"
        )
    return list(boxes.values())


def _overlap(boxes: list[Region]) -> bool:
    """Return whether any two boxes overlap."""
    start, stop = np.moveaxis(np.array(boxes).reshape(len(boxes), -1, 2), -1, 0)  # each boxes × dimensions
    both = (np.maximum(start[:, None], start) < np.minimum(stop[:, None], stop)).all(-1)
    return bool(both.sum() > len(boxes))


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """The copy of a box of a tensor from its holder into a bucket."""

    holder: ShardHolder
    bucket: int
    offset: int
    """In the bucket, of the contiguous run of elements that the box is part of."""
    run: Region
    box: Region
    dtype: str

    @property
    def message_bytes(self) -> int:
        """Bytes that the box takes in a message, padded so that the next one is aligned for every type."""
        return -(-prod(extent(self.box)) * ITEM_BYTES[self.dtype] // _MESSAGE_ALIGNMENT) * _MESSAGE_ALIGNMENT

    def target(self, buffer: Tensor) -> Tensor:
        """Return the view of a bucket's buffer that the box belongs in."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        shape = extent(self.run)
        nbytes = prod(shape) * dtype.itemsize
        run = buffer[self.offset : self.offset + nbytes].view(dtype).view(shape)
        return run if self.box is self.run else run[inside(self.box, self.run)]


def shard_copies(number: int, bucket: Bucket, shard_map: ShardMap) -> Iterator[ShardCopy]:
    """Yield all copies that fill a bucket."""
    manifest = shard_map.manifest
    for piece in bucket.pieces:
        entry, holders = manifest.entries[piece.entry], shard_map.holders[piece.entry]
        if len(holders) == 1 and not piece.start and piece.nbytes == manifest.sizes[piece.entry]:
            box = holders[0].box  # the common case: one rank holds the whole tensor, and it is not split
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
