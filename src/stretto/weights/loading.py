"""What a receiver does with a bucket: hand whole tensors to a loader, or write into live tensors in place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.boxes import common, extent, inside, runs, slices_box
from stretto.weights.layout import Bucket, Piece
from stretto.weights.manifest import ITEM_BYTES, Entry, Manifest, differences

Load = Callable[[Sequence[tuple[str, Tensor]]], Iterable[str] | None]
"""Takes tensors by name; says which of the names it has taken care of, or None if it cannot say."""


class Loading(Protocol):
    """One update's way from buffers into an engine."""

    buckets: list[Bucket]
    skips: list[int]
    """Those of which nothing is needed."""

    def holds(self) -> bool:
        """Whether it can be used again, and need not be made anew."""

    def begin(self) -> None:
        """All is to be loaded again."""

    def load(self, number: int, buffer: Tensor) -> None: ...

    def missing(self) -> list[str] | None:
        """Tensors that nobody accounted for, once all buckets are loaded; None if nobody can say."""


class Handing:
    """Hands whole tensors to a loader."""

    def __init__(
        self, load: Load, manifest: Manifest, buckets: list[Bucket], *, retains: bool, expects: Iterable[Entry] = ()
    ) -> None:
        wrong = differences(expects, manifest)
        if wrong:
            raise WeightsError(_listed(wrong))
        self.skips: list[int] = []
        self.buckets = buckets
        self._load, self._manifest, self._retains = load, manifest, retains
        self._left: set[str] | None = set()
        self._coming: set[int] = set()

    def holds(self) -> bool:
        return True

    def begin(self) -> None:
        self._left = {entry.name for entry in self._manifest.entries}
        self._coming = set(range(len(self.buckets)))

    def load(self, number: int, buffer: Tensor) -> None:
        entries, views = self._manifest.entries, _Views(buffer)
        tensors = [
            (entries[piece.entry].name, views.of(piece, entries[piece.entry])) for piece in self.buckets[number].pieces
        ]
        if self._retains:
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
        taken = self._load(tensors)
        self._coming.discard(number)
        if taken is None:
            self._left = None
        elif self._left is not None:
            self._left.difference_update(taken)

    def missing(self) -> list[str] | None:
        if self._coming:
            return [self._manifest.entries[p.entry].name for k in sorted(self._coming) for p in self.buckets[k].pieces]
        return None if self._left is None else [e.name for e in self._manifest.entries if e.name in self._left]


class Writing:
    """Writes into live tensors, whose addresses stay the same."""

    def __init__(
        self,
        into: Mapping[str, Tensor],
        slices: Mapping[str, tuple[slice, ...]],
        manifest: Manifest,
        buckets: list[Bucket],
    ) -> None:
        given = {entry.name: entry for entry in manifest.entries}
        wrong = [why for name, tensor in into.items() if (why := _misfit(name, tensor, given.get(name), slices))]
        if wrong:
            raise WeightsError(_listed(wrong))
        self._given, self._addresses = into, list(map(Tensor.data_ptr, into.values()))
        self._into = {name: tensor.detach() for name, tensor in into.items()}
        self.buckets = buckets
        self._slices, self._manifest = slices, manifest
        self._copies: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self.skips = [k for k, bucket in enumerate(buckets) if not any(map(self._wants, bucket.pieces))]
        self._done: set[int] = set()

    def holds(self) -> bool:
        """Whether the live tensors are where they were: an engine may have put others in their place."""
        there = self._given.keys() == self._into.keys()
        return there and list(map(Tensor.data_ptr, self._given.values())) == self._addresses

    def _wants(self, piece: Piece) -> bool:
        entry = self._manifest.entries[piece.entry]
        if entry.name not in self._into:
            return False
        if entry.name not in self._slices:
            return True
        box = slices_box(entry.shape, self._slices.get(entry.name, ()))
        item = ITEM_BYTES[entry.dtype]
        parts = runs(entry.shape, piece.start // item, (piece.start + piece.nbytes) // item)
        return any(common(part, box) is not None for _, part in parts)

    def begin(self) -> None:
        self._done = set()

    @torch.no_grad()
    def load(self, number: int, buffer: Tensor) -> None:
        key = number, buffer.data_ptr()
        copies = self._copies.get(key)
        if copies is None:
            copies, views = ([], []), _Views(buffer)
            for piece in self.buckets[number].pieces:
                entry = self._manifest.entries[piece.entry]
                if entry.name in self._into and piece.nbytes:
                    self._add(piece, entry, views, copies)
            self._copies[key] = copies
        if copies[0]:
            torch._foreach_copy_(copies[0], copies[1], non_blocking=True)
        self._done.add(number)

    def _add(self, piece: Piece, entry: Entry, views: "_Views", copies: tuple[list[Tensor], list[Tensor]]) -> None:
        target = self._into[entry.name]
        if piece.nbytes == entry.nbytes and entry.name not in self._slices:
            copies[0].append(_raw(target))
            copies[1].append(_raw(views.of(piece, entry)))
            return
        item, dtype = ITEM_BYTES[entry.dtype], target.dtype
        box = slices_box(entry.shape, self._slices.get(entry.name, ()))
        first = piece.start // item
        for start, part in runs(entry.shape, first, first + piece.nbytes // item):
            shared = common(part, box)
            if shared is None:
                continue
            shape = extent(part)
            begin = piece.offset + (start - first) * item
            count = item * torch.Size(shape).numel()
            run = views.buffer[begin : begin + count].view(dtype).view(shape)
            copies[0].append(_raw(target[inside(shared, box)]))
            copies[1].append(_raw(run[inside(shared, part)]))

    def missing(self) -> list[str]:
        left = set(range(len(self.buckets))) - self._done - set(self.skips)
        names = {self._manifest.entries[p.entry].name for k in left for p in self.buckets[k].pieces}
        return [name for name in self._into if name in names]


class _Views:
    """Tensors where they lie in a buffer; each made in one step, since there can be many."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._typed: dict[str, tuple[Tensor, int, int]] = {}

    def of(self, piece: Piece, entry: Entry) -> Tensor:
        if entry.dtype not in self._typed:
            made = self.buffer.view(getattr(torch, entry.dtype))
            self._typed[entry.dtype] = made, int(made.storage_offset()), made.itemsize
        typed, start, item = self._typed[entry.dtype]
        strides = [1] * len(entry.shape)
        for k in range(len(entry.shape) - 1, 0, -1):
            strides[k - 1] = strides[k] * max(1, entry.shape[k])
        return typed.as_strided(entry.shape, strides, start + piece.offset // item)


def _misfit(name: str, tensor: Tensor, entry: Entry | None, slices: Mapping[str, tuple[slice, ...]]) -> str:
    """Why what comes under a name cannot go into a live tensor, in words; nothing if it can."""
    if entry is None:
        return f"{name} is missing"
    if tensor.dtype != getattr(torch, entry.dtype):
        return f"{name} is {entry.dtype}, not {str(tensor.dtype).removeprefix('torch.')}"
    if name not in slices:
        fits, asked = tensor.shape == entry.shape, "it"
    elif len(slices[name]) > len(entry.shape):
        return f"{name} has {len(entry.shape)} dimensions, and slices of {len(slices[name])} are asked for"
    else:
        fits, asked = extent(slices_box(entry.shape, slices[name])) == tensor.shape, f"the slice {slices[name]} of it"
    return "" if fits else f"{name} has shape {entry.shape}, and {asked} does not fit {tuple(tensor.shape)}"


def _raw(tensor: Tensor) -> Tensor:
    """A tensor of a type that copies of many tensors at once do not know, as one that they do."""
    raw = _RAW.get(tensor.dtype)
    return tensor if raw is None else tensor.view(raw)


_RAW = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def _listed(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(wrong[:3]) + more
