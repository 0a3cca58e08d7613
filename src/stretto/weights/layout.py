"""Buckets: the bytes of a model, in model order, grouped to fit a buffer."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import ITEM_BYTES, Manifest

ALIGNMENT = 256
_MAX_BUCKETS = 1 << 22


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A tensor, or a part of one, in a bucket."""

    entry: int
    """The index of the tensor in the manifest."""
    start: int
    """The offset of the first byte in the tensor; 0 unless the tensor is split."""
    nbytes: int
    offset: int
    """The offset of the first byte in the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that are sent together."""

    nbytes: int
    pieces: tuple[Piece, ...]

    def clear_gaps(self, memory: Tensor) -> None:
        """Write zeros between the tensors: the checksum of a bucket covers the gaps."""
        ends = [piece.offset + piece.nbytes for piece in self.pieces]
        for end, start in zip(ends, [*(piece.offset for piece in self.pieces[1:]), self.nbytes], strict=True):
            if end < start:
                memory[end:start] = 0


def aligned(count: int) -> int:
    """Round a number of bytes up to the next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def validate_bucket_bytes(count: object) -> None:
    """Raise WeightsError if buckets cannot have this size."""
    if not isinstance(count, int) or count < ALIGNMENT or count % ALIGNMENT:
        raise WeightsError(f"bucket_bytes is a multiple of {ALIGNMENT} (got {count!r:.40})")


def lay_out(manifest: Manifest, bucket_bytes: int, *, split: bool = False) -> list[Bucket]:
    """Fill buckets in model order, with every tensor at a multiple of 256 bytes.

    With `split`, a tensor larger than a bucket is cut into parts; all others stay whole.

    >>> from stretto.weights.manifest import TensorSpec
    >>> model = Manifest("", tuple(TensorSpec(name, "uint8", (size,)) for name, size in zip("abc", (300, 10, 600))))
    >>> [[(p.entry, p.start, p.nbytes, p.offset) for p in bucket.pieces] for bucket in lay_out(model, 1024)]
    [[(0, 0, 300, 0), (1, 0, 10, 512)], [(2, 0, 600, 0)]]
    """
    validate_bucket_bytes(bucket_bytes)
    if manifest.nbytes // bucket_bytes > _MAX_BUCKETS:
        raise WeightsError(f"{manifest.nbytes:,} bytes are more than {_MAX_BUCKETS:,} buckets of {bucket_bytes:,}")
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


def _parts(manifest: Manifest, bucket_bytes: int, *, split: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the tensor, first byte, number of bytes) for each tensor, or for each part of a split one."""
    for number, nbytes in enumerate(manifest.sizes):
        if nbytes <= bucket_bytes:
            yield number, 0, nbytes
            continue
        entry = manifest.entries[number]
        if not split:
            raise WeightsError(
                f"{entry.name} has {nbytes:,} bytes, more than a bucket of {bucket_bytes:,}; "
                "in parts (split=True, --split) only receivers that write in place (into=…) take it"
            )
        step = bucket_bytes // ITEM_BYTES[entry.dtype] * ITEM_BYTES[entry.dtype]
        for start in range(0, nbytes, step):
            yield number, start, min(step, nbytes - start)


def least_bucket(manifest: Manifest) -> int:
    """Return the size of the smallest bucket that holds every tensor whole."""
    return aligned(max(manifest.sizes) or 1)
