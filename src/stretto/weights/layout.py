"""Buckets: the bytes of a model cut into pieces that fit a buffer, in model order."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import ITEM_BYTES, Manifest

ALIGNMENT = 256
_MOST = 1 << 22  # buckets


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one tensor, and where they lie in their bucket."""

    entry: int
    """The tensor, by its place in the manifest."""
    start: int
    """Of these bytes in the tensor; not 0 only where tensors are split."""
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels together."""

    nbytes: int
    pieces: tuple[Piece, ...]

    def clear_gaps(self, room: Tensor) -> None:
        """What lies between its tensors counts in its sum, and is zero."""
        ends = [piece.offset + piece.nbytes for piece in self.pieces]
        for end, start in zip(ends, [*(piece.offset for piece in self.pieces[1:]), self.nbytes], strict=True):
            if end < start:
                room[end:start] = 0


def aligned(count: int) -> int:
    """As many bytes, up to the next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def demand_bucket_bytes(count: object) -> None:
    if not isinstance(count, int) or count < ALIGNMENT or count % ALIGNMENT:
        raise WeightsError(f"bucket_bytes is a multiple of {ALIGNMENT} (got {count!r:.40})")


def lay_out(manifest: Manifest, bucket_bytes: int, *, split: bool = False) -> list[Bucket]:
    """Fill buckets in model order, every tensor at a multiple of 256 bytes.

    Tensors stay whole, unless they may be split: then only a tensor larger than a bucket is.

    >>> from stretto.weights.manifest import TensorSpec
    >>> model = Manifest("", tuple(TensorSpec(name, "uint8", (size,)) for name, size in zip("abc", (300, 10, 600))))
    >>> [[(it.entry, it.start, it.nbytes, it.offset) for it in bucket.pieces] for bucket in lay_out(model, 1024)]
    [[(0, 0, 300, 0), (1, 0, 10, 512)], [(2, 0, 600, 0)]]
    """
    demand_bucket_bytes(bucket_bytes)
    if manifest.nbytes // bucket_bytes > _MOST:
        raise WeightsError(f"{manifest.nbytes:,} bytes are more than {_MOST:,} buckets of {bucket_bytes:,}")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for entry, start, nbytes in _parts(manifest, bucket_bytes, split=split):
        if used + nbytes > bucket_bytes:
            buckets.append(Bucket(used, tuple(pieces)))
            pieces, used = [], 0
        pieces.append(Piece(entry, start, nbytes, used))
        used = aligned(used + nbytes)
    if pieces:
        buckets.append(Bucket(used, tuple(pieces)))
    return buckets


def _parts(manifest: Manifest, most: int, *, split: bool) -> Iterator[tuple[int, int, int]]:
    for number, whole in enumerate(manifest.sizes):
        if whole <= most:
            yield number, 0, whole
            continue
        entry = manifest.entries[number]
        if not split:
            raise WeightsError(
                f"{entry.name} has {whole:,} bytes, more than a bucket of {most:,}; "
                "in parts (split=True, --split) only receivers that write in place (into=…) take it"
            )
        step = most // ITEM_BYTES[entry.dtype] * ITEM_BYTES[entry.dtype]
        for start in range(0, whole, step):
            yield number, start, min(step, whole - start)


def least_bucket(manifest: Manifest) -> int:
    """The smallest bucket that holds every tensor whole."""
    return aligned(max(manifest.sizes) or 1)
