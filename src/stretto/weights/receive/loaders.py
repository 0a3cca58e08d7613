"""Loaders of a receiver: pass whole tensors to a callback, or write into live tensors in place."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.host_memory import uncollected
from stretto.weights.layout import Bucket, Piece
from stretto.weights.manifest import ITEM_BYTES, Manifest, TensorSpec, differences
from stretto.weights.messages import Assurance
from stretto.weights.receive.memory_layouts import Layouts, grouped, layout_of, plain, shared, unfit
from stretto.weights.receive.rows import Rows, first_change, is_readable
from stretto.weights.regions import common, extent, inside, runs, slices_box

Load = Callable[[Sequence[tuple[str, Tensor]]], Iterable[str] | None]
"""Takes tensors by name; returns the names that it has loaded, or None if it cannot say."""
Validator = Callable[[Sequence[TensorSpec]], list[str]]
"""Describes the problems with the tensors of a version; returns an empty list if there are none."""
log = logging.getLogger(__name__)
_GROUP_BYTES = 32 << 20  # bytes concatenated at a time to checksum them, where they cannot be read in place


class Loader(Protocol):
    """Loads the buckets of an update from the buffers into an engine."""

    buckets: list[Bucket]
    skips: list[int]
    """Buckets that are not needed."""
    alike: list[list[int]]
    """Groups of tensors, by their index in the manifest, that share one live tensor here and so must be equal."""

    def holds(self) -> bool:
        """Return whether this loader is still valid for another update."""

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        """Do slow work before the engine pauses. Buckets will arrive in these buffers in turn."""

    def begin(self) -> None:
        """Start an update: all buckets will be loaded again."""

    def load(self, number: int, buffer: Tensor, pool: ThreadPoolExecutor) -> None: ...

    def missing(self) -> list[str]:
        """Return the names of the tensors that are not accounted for after the last bucket."""

    def assurance(self) -> Assurance:
        """Return how certain it is that everything was loaded, given that nothing is missing."""

    def changed(self, pool: ThreadPoolExecutor) -> str:
        """Describe the live tensors that changed since they were written; empty if none did, or if it cannot tell."""


class CallbackLoader:
    """Passes whole tensors to the engine's `load` function."""

    def __init__(
        self,
        load: Load,
        manifest: Manifest,
        buckets: list[Bucket],
        *,
        retains: bool,
        expects: Iterable[TensorSpec] | Validator = (),
    ) -> None:
        problems = expects(manifest.entries) if callable(expects) else differences(expects, manifest)
        if problems:
            raise WeightsError(listed(problems))
        self.skips: list[int] = []
        self.alike: list[list[int]] = []
        self.buckets = buckets
        self._load, self._manifest, self._retains = load, manifest, retains
        self._unaccounted, self._received, self._returned_none = set[str](), set[str](), False
        self._pending: set[int] = set()

    def holds(self) -> bool:
        return True

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        pass

    def begin(self) -> None:
        self._unaccounted, self._received = {entry.name for entry in self._manifest.entries}, set()
        self._returned_none = False
        self._pending = set(range(len(self.buckets)))

    def load(self, number: int, buffer: Tensor, pool: ThreadPoolExecutor) -> None:  # noqa: ARG002 (no checksums to compute)
        entries, views = self._manifest.entries, _Views(buffer)
        tensors = [
            (entries[piece.entry].name, views.of(piece, entries[piece.entry])) for piece in self.buckets[number].pieces
        ]
        if self._retains:
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
        self._received.update(name for name, _ in tensors)  # first: the callback may change the list
        loaded = self._load(tensors)
        self._pending.discard(number)
        if loaded is None:
            self._returned_none = True
        elif isinstance(loaded, str) or not isinstance(loaded, Iterable):
            raise TypeError(f"a loader returns the names that it took, or None (got {loaded!r:.60})")
        else:
            self._unaccounted.difference_update(self._received.intersection(loaded))

    def missing(self) -> list[str]:
        entries = self._manifest.entries
        if self._pending:
            return [entries[p.entry].name for k in sorted(self._pending) for p in self.buckets[k].pieces]
        return [] if self._returned_none else [entry.name for entry in entries if entry.name in self._unaccounted]

    def assurance(self) -> Assurance:
        if self._unaccounted:
            names = [entry.name for entry in self._manifest.entries if entry.name in self._unaccounted]
            log.warning("the loader did not account for %s", listed(names, ", "))
        return "unaccounted" if self._unaccounted else "delivered"

    def changed(self, pool: ThreadPoolExecutor) -> str:  # noqa: ARG002 (the live tensors are the engine's)
        return ""


class InPlaceLoader:
    """Writes into live tensors, and reads them back to verify them."""

    def __init__(
        self,
        into: Mapping[str, Tensor],
        slices: Mapping[str, tuple[slice, ...]],
        manifest: Manifest,
        buckets: list[Bucket],
    ) -> None:
        pushed = {entry.name: entry for entry in manifest.entries}
        if problems := [why for name, tensor in into.items() if (why := unfit(name, tensor))]:
            raise WeightsError(listed(problems))
        sliced = [name for name in slices if name in pushed and len(slices[name]) <= len(pushed[name].shape)]
        overlaps, alike = shared(into, {name: slices_box(pushed[name].shape, slices[name]) for name in sliced})
        tied = {name for names in alike for name in names if any(other in pushed for other in names)}
        problems = [
            why
            for name, tensor in into.items()
            if (name in pushed or name not in tied) and (why := _misfit(name, tensor, pushed.get(name), slices))
        ]
        if problems or overlaps:
            raise WeightsError(listed(problems or overlaps))
        indices = {entry.name: index for index, entry in enumerate(manifest.entries)}
        self.alike = [group for names in alike if (group := [indices[name] for name in names if name in indices])]
        self._live, self._layouts = into, {name: layout_of(tensor) for name, tensor in into.items()}
        self._names, self._all_layouts = list(into), Layouts(into.values(), self._layouts.values())
        self._targets = {name: tensor.detach() for name, tensor in into.items() if name in pushed}
        self.buckets = buckets
        self._slices, self._manifest = slices, manifest
        self._copies: dict[tuple[int, int], list[_Copies]] = {}  # by bucket and address of the buffer
        self._bucket_layouts: dict[int, tuple[list[str], Layouts]] = {}
        self._written: dict[int, list[tuple[_Copies, Tensor]]] = {}  # by bucket: the copies made, and their row sums
        self.skips = [k for k, bucket in enumerate(buckets) if not any(map(self._wants, bucket.pieces))]

    def holds(self) -> bool:
        """Return whether the live tensors are unchanged: the engine may have replaced some, or view their memory
        differently."""
        return self._names == list(self._live) and self._unchanged(self._all_layouts.hold)

    def _unchanged(self, compare: Callable[[list[Tensor]], bool], names: Iterable[str] | None = None) -> bool:
        try:
            with uncollected():
                return compare(list(self._live.values()) if names is None else [self._live[name] for name in names])
        except (KeyError, TypeError, RuntimeError):
            return False  # a name is gone or no longer a plain tensor; the error raised later names it

    def _wants(self, piece: Piece) -> bool:
        entry = self._manifest.entries[piece.entry]
        if entry.name not in self._targets:
            return False
        if entry.name not in self._slices:
            return True
        target_region = slices_box(entry.shape, self._slices.get(entry.name, ()))
        item = ITEM_BYTES[entry.dtype]
        regions = runs(entry.shape, piece.start // item, (piece.start + piece.nbytes) // item)
        return any(common(region, target_region) is not None for _, region in regions)

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        with uncollected():
            for number in range(len(self.buckets)):
                self._copies_of(number, buffers[number % len(buffers)])

    @torch.no_grad()
    def _copies_of(self, number: int, buffer: Tensor) -> "list[_Copies]":
        """Return the copies that load a bucket from a buffer, prepared once and reused."""
        key = number, buffer.data_ptr()
        if key not in self._copies:
            self._copies[key] = list(self._prepared(number, buffer))
            names = dict.fromkeys(name for copies in self._copies[key] for name in copies.names)
            layouts = [self._layouts[name] for name in names]
            self._bucket_layouts[number] = list(names), Layouts([self._live[name] for name in names], layouts)
        return self._copies[key]

    def begin(self) -> None:
        self._written = {}

    @torch.no_grad()
    def load(self, number: int, buffer: Tensor, pool: ThreadPoolExecutor) -> None:
        groups = self._copies_of(number, buffer)
        names, layouts = self._bucket_layouts[number]
        if not self._unchanged(layouts.hold, names):  # or the copies would write into freed memory
            raise WeightsError(f"{next(filter(self._is_replaced, names), 'a tensor')} was replaced, or its memory cut")
        for copies in groups:
            torch._foreach_copy_(copies.targets, copies.sources, non_blocking=True)
        self._written[number] = [(copies, copies.target_rows.sums(pool)) for copies in groups]
        for copies, target_sums in self._written[number]:
            row = first_change(copies.source_rows.sums(pool), target_sums)
            if row is not None:
                raise WeightsError(f"{copies.differing(row)} does not hold what was written into it")

    def _prepared(self, number: int, buffer: Tensor) -> Iterator["_Copies"]:
        """Yield the copies of a bucket in groups of one dtype, small enough to checksum at once."""
        by_kind: dict[tuple[torch.dtype, bool], list[tuple[str, Tensor, Tensor]]] = {}
        views = _Views(buffer)
        for piece in self.buckets[number].pieces:
            entry = self._manifest.entries[piece.entry]
            if entry.name in self._targets and piece.nbytes:
                for into, source in self._parts(piece, entry, views):
                    target, source = plain(into, source)
                    in_place = is_readable(target) and is_readable(source)
                    by_kind.setdefault((target.dtype, in_place), []).append((entry.name, target, source))
        for (_, in_place), pairs in by_kind.items():
            for group in grouped((target.nbytes for _, target, _ in pairs), sys.maxsize if in_place else _GROUP_BYTES):
                names, targets, sources = map(list, zip(*pairs[group], strict=True))
                yield _Copies(names, targets, sources, *(Rows(side, in_place=in_place) for side in (targets, sources)))

    def _parts(self, piece: Piece, entry: TensorSpec, views: "_Views") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a live tensor that a piece fills, each with its source in the buffer."""
        target = self._targets[entry.name]
        if piece.nbytes == entry.nbytes and entry.name not in self._slices:
            yield target, views.of(piece, entry)
            return
        item, dtype = ITEM_BYTES[entry.dtype], target.dtype
        target_region = slices_box(entry.shape, self._slices.get(entry.name, ()))
        first = piece.start // item
        for start, region in runs(entry.shape, first, first + piece.nbytes // item):
            both = common(region, target_region)
            if both is None:
                continue
            shape = extent(region)
            begin = piece.offset + (start - first) * item
            count = item * torch.Size(shape).numel()
            source = views.buffer[begin : begin + count].view(dtype).view(shape)
            yield target[inside(both, target_region)], source[inside(both, region)]

    def missing(self) -> list[str]:
        pending = set(range(len(self.buckets))) - self._written.keys() - set(self.skips)
        if not pending:
            return []
        names = {self._manifest.entries[p.entry].name for k in pending for p in self.buckets[k].pieces}
        return [name for name in self._targets if name in names]

    def assurance(self) -> Assurance:
        return "verified"

    @torch.no_grad()
    def changed(self, pool: ThreadPoolExecutor) -> str:
        written = [pair for pairs in self._written.values() for pair in pairs]
        in_place = all(copies.target_rows.in_place for copies, _ in written)
        # A GPU computes the sums while the layouts are compared.
        sums_now = [copies.target_rows.sums(pool) for copies, _ in written] if in_place else []
        if self._names != list(self._live) or not self._unchanged(self._all_layouts.are_same):
            return f"{next(filter(self._is_replaced, self._layouts), 'a tensor')} was replaced"
        sums_now = sums_now or [copies.target_rows.sums(pool) for copies, _ in written]
        if not written or torch.equal(torch.cat(sums_now), torch.cat([sums for _, sums in written])):
            return ""
        rows = ((copies, first_change(before, now)) for (copies, before), now in zip(written, sums_now, strict=True))
        return next(f"{copies.tensors_in(row)} changed" for copies, row in rows if row is not None)

    def _is_replaced(self, name: str) -> bool:
        tensor = self._live.get(name)
        return bool(unfit(name, tensor)) or layout_of(cast("Tensor", tensor)) != self._layouts[name]


@dataclass(frozen=True, slots=True)
class _Copies:
    """A group of a bucket's copies, all of one dtype."""

    names: list[str]
    targets: list[Tensor]
    sources: list[Tensor]
    target_rows: Rows
    source_rows: Rows

    def differing(self, row: int) -> str:
        """Return the name of a tensor in this row that differs from its source, which must still be in the buffer."""
        indices = self.target_rows.at(row)
        differ = (k for k in indices if not torch.equal(self.targets[k], self.sources[k]))
        return self.names[next(differ, indices[0])]

    def tensors_in(self, row: int) -> str:
        """Name the tensors that have bytes in a row."""
        names = [self.names[index] for index in self.target_rows.at(row)]
        return f"{'one of ' if len(names) > 1 else ''}{listed(names, ', ')}"


class _Views:
    """Views of tensors in a buffer, each made in one step, since there can be many."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._typed: dict[str, tuple[Tensor, int, int]] = {}

    def of(self, piece: Piece, entry: TensorSpec) -> Tensor:
        if entry.dtype not in self._typed:
            view = self.buffer.view(getattr(torch, entry.dtype))
            self._typed[entry.dtype] = view, int(view.storage_offset()), view.itemsize
        typed, start, item = self._typed[entry.dtype]
        strides = [1] * len(entry.shape)
        for k in range(len(entry.shape) - 1, 0, -1):
            strides[k - 1] = strides[k] * max(1, entry.shape[k])
        return typed.as_strided(entry.shape, strides, start + piece.offset // item)


def _misfit(name: str, tensor: Tensor, entry: TensorSpec | None, slices: Mapping[str, tuple[slice, ...]]) -> str:
    """Say why a pushed tensor does not fit its live tensor; return an empty string if it does."""
    if entry is None:
        return f"{name} is not in what is pushed"
    if tensor.dtype != getattr(torch, entry.dtype):
        return f"{name} is pushed as {entry.dtype}, and is {str(tensor.dtype).removeprefix('torch.')} here"
    if name not in slices:
        fits, asked = tensor.shape == entry.shape, "it"
    elif len(slices[name]) > len(entry.shape):
        return f"{name} has {len(entry.shape)} dimensions, and slices of {len(slices[name])} are asked for"
    else:
        fits, asked = extent(slices_box(entry.shape, slices[name])) == tensor.shape, f"the slice {slices[name]} of it"
    return "" if fits else f"{name} is pushed with shape {entry.shape}, and {asked} does not fit {tuple(tensor.shape)}"


def listed(items: list[str], separator: str = "; ") -> str:
    """Join the first three items and count the rest."""
    return separator.join([*items[:3], *([f"and {len(items) - 3} more"] if len(items) > 3 else [])])
