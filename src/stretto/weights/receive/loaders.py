"""What a receiver does with a bucket: hand whole tensors to a loader, or write into live tensors in place."""

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
"""Takes tensors by name; says which of the names it has taken care of, or None if it cannot say."""
Demands = Callable[[Sequence[TensorSpec]], list[str]]
"""What is wrong with the tensors of a version, in words; nothing if it can be taken."""
log = logging.getLogger(__name__)
_GROUP = 32 << 20  # bytes of which a copy is made to read them again, where they cannot be read in place


class Loader(Protocol):
    """One update's way from buffers into an engine."""

    buckets: list[Bucket]
    skips: list[int]
    """Those of which nothing is needed."""
    alike: list[list[int]]
    """Tensors, by their places in the manifest, that are one here, and so must be equal."""

    def holds(self) -> bool:
        """Whether it can be used again, and need not be made anew."""

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        """What takes its time when it is done first, before anybody pauses: buckets come in these buffers in turn."""

    def begin(self) -> None:
        """All is to be loaded again."""

    def load(self, number: int, buffer: Tensor, pool: ThreadPoolExecutor) -> None: ...

    def missing(self) -> list[str]:
        """Tensors that should have been accounted for, once all buckets are loaded, and were not."""

    def assurance(self) -> Assurance:
        """How sure it is that all was loaded, if nothing is missing."""

    def changed(self, pool: ThreadPoolExecutor) -> str:
        """Which live tensors are not what was written any more, in words; nothing if none is, or if nobody can see."""


class CallbackLoader:
    """Hands whole tensors to a loader."""

    def __init__(
        self,
        load: Load,
        manifest: Manifest,
        buckets: list[Bucket],
        *,
        retains: bool,
        expects: Iterable[TensorSpec] | Demands = (),
    ) -> None:
        wrong = expects(manifest.entries) if callable(expects) else differences(expects, manifest)
        if wrong:
            raise WeightsError(listed(wrong))
        self.skips: list[int] = []
        self.alike: list[list[int]] = []
        self.buckets = buckets
        self._load, self._manifest, self._retains = load, manifest, retains
        self._left, self._came, self._silent = set[str](), set[str](), False
        self._coming: set[int] = set()

    def holds(self) -> bool:
        return True

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        pass

    def begin(self) -> None:
        self._left, self._came = {entry.name for entry in self._manifest.entries}, set()
        self._silent = False
        self._coming = set(range(len(self.buckets)))

    def load(self, number: int, buffer: Tensor, pool: ThreadPoolExecutor) -> None:  # noqa: ARG002 (nothing to sum)
        entries, views = self._manifest.entries, _Views(buffer)
        tensors = [
            (entries[piece.entry].name, views.of(piece, entries[piece.entry])) for piece in self.buckets[number].pieces
        ]
        if self._retains:
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
        self._came.update(name for name, _ in tensors)  # before the list is the loader's
        taken = self._load(tensors)
        self._coming.discard(number)
        if taken is None:
            self._silent = True
        elif isinstance(taken, str) or not isinstance(taken, Iterable):
            raise TypeError(f"a loader returns the names that it took, or None (got {taken!r:.60})")
        else:
            self._left.difference_update(self._came.intersection(taken))

    def missing(self) -> list[str]:
        entries = self._manifest.entries
        if self._coming:
            return [entries[p.entry].name for k in sorted(self._coming) for p in self.buckets[k].pieces]
        return [] if self._silent else [it.name for it in entries if it.name in self._left]

    def assurance(self) -> Assurance:
        if self._left:
            some = [entry.name for entry in self._manifest.entries if entry.name in self._left]
            log.warning("the loader did not account for %s", listed(some, ", "))
        return "unaccounted" if self._left else "delivered"

    def changed(self, pool: ThreadPoolExecutor) -> str:  # noqa: ARG002 (it is the engine's)
        return ""


class InPlaceLoader:
    """Writes into live tensors, and reads them again."""

    def __init__(
        self,
        into: Mapping[str, Tensor],
        slices: Mapping[str, tuple[slice, ...]],
        manifest: Manifest,
        buckets: list[Bucket],
    ) -> None:
        given = {entry.name: entry for entry in manifest.entries}
        if wrong := [why for name, tensor in into.items() if (why := unfit(name, tensor))]:
            raise WeightsError(listed(wrong))
        fits = [name for name in slices if name in given and len(slices[name]) <= len(given[name].shape)]
        overlaps, alike = shared(into, {name: slices_box(given[name].shape, slices[name]) for name in fits})
        tied = {name for names in alike for name in names if any(it in given for it in names)}
        wrong = [
            why
            for name, tensor in into.items()
            if (name in given or name not in tied) and (why := _misfit(name, tensor, given.get(name), slices))
        ]
        if wrong or overlaps:
            raise WeightsError(listed(wrong or overlaps))
        places = {entry.name: place for place, entry in enumerate(manifest.entries)}
        self.alike = [there for names in alike if (there := [places[name] for name in names if name in places])]
        self._given, self._layouts = into, {name: layout_of(tensor) for name, tensor in into.items()}
        self._names, self._all = list(into), Layouts(into.values(), self._layouts.values())
        self._into = {name: tensor.detach() for name, tensor in into.items() if name in given}
        self.buckets = buckets
        self._slices, self._manifest = slices, manifest
        self._copies: dict[tuple[int, int], list[_Copies]] = {}
        self._parts_of: dict[int, tuple[list[str], Layouts]] = {}
        self._done: dict[int, list[tuple[_Copies, Tensor]]] = {}  # of each bucket, what was written, and its sums
        self.skips = [k for k, bucket in enumerate(buckets) if not any(map(self._wants, bucket.pieces))]

    def holds(self) -> bool:
        """Whether the live tensors are where they were: an engine may have put others in their place, or may see the
        same memory in another way."""
        return self._names == list(self._given) and self._as_before(self._all.hold)

    def _as_before(self, look: Callable[[list[Tensor]], bool], names: Iterable[str] | None = None) -> bool:
        try:
            with uncollected():
                return look(list(self._given.values()) if names is None else [self._given[name] for name in names])
        except (KeyError, TypeError, RuntimeError):
            return False  # what is there is no plain tensor any more, and is refused by name

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

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        with uncollected():
            for number in range(len(self.buckets)):
                self._copies_of(number, buffers[number % len(buffers)])

    @torch.no_grad()
    def _copies_of(self, number: int, buffer: Tensor) -> "list[_Copies]":
        key = number, buffer.data_ptr()
        if key not in self._copies:
            self._copies[key] = list(self._prepared(number, buffer))
            names = dict.fromkeys(name for some in self._copies[key] for name in some.names)
            layouts = [self._layouts[name] for name in names]
            self._parts_of[number] = list(names), Layouts([self._given[name] for name in names], layouts)
        return self._copies[key]

    def begin(self) -> None:
        self._done = {}

    @torch.no_grad()
    def load(self, number: int, buffer: Tensor, pool: ThreadPoolExecutor) -> None:
        copies = self._copies_of(number, buffer)
        names, layouts = self._parts_of[number]
        if not self._as_before(layouts.hold, names):  # or it would be written where there is no memory any more
            raise WeightsError(f"{next(filter(self._is_another, names), 'a tensor')} was replaced, or its memory cut")
        for some in copies:
            torch._foreach_copy_(some.targets, some.sources, non_blocking=True)
        self._done[number] = [(some, some.written.sums(pool)) for some in copies]
        for some, found in self._done[number]:
            row = first_change(some.given.sums(pool), found)
            if row is not None:
                raise WeightsError(f"{some.odd(row)} does not hold what was written into it")

    def _prepared(self, number: int, buffer: Tensor) -> Iterator["_Copies"]:
        """The copies of a bucket, in groups of one type that are small enough to be compared at once."""
        found: dict[tuple[torch.dtype, bool], list[tuple[str, Tensor, Tensor]]] = {}
        views = _Views(buffer)
        for piece in self.buckets[number].pieces:
            entry = self._manifest.entries[piece.entry]
            if entry.name in self._into and piece.nbytes:
                for into, source in self._parts(piece, entry, views):
                    target, source = plain(into, source)
                    in_place = is_readable(target) and is_readable(source)
                    found.setdefault((target.dtype, in_place), []).append((entry.name, target, source))
        for (_, in_place), pairs in found.items():
            for some in grouped((target.nbytes for _, target, _ in pairs), sys.maxsize if in_place else _GROUP):
                names, targets, sources = map(list, zip(*pairs[some], strict=True))
                yield _Copies(names, targets, sources, *(Rows(it, in_place=in_place) for it in (targets, sources)))

    def _parts(self, piece: Piece, entry: TensorSpec, views: "_Views") -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of a live tensor, and what is to be copied into them."""
        target = self._into[entry.name]
        if piece.nbytes == entry.nbytes and entry.name not in self._slices:
            yield target, views.of(piece, entry)
            return
        item, dtype = ITEM_BYTES[entry.dtype], target.dtype
        box = slices_box(entry.shape, self._slices.get(entry.name, ()))
        first = piece.start // item
        for start, part in runs(entry.shape, first, first + piece.nbytes // item):
            both = common(part, box)
            if both is None:
                continue
            shape = extent(part)
            begin = piece.offset + (start - first) * item
            count = item * torch.Size(shape).numel()
            run = views.buffer[begin : begin + count].view(dtype).view(shape)
            yield target[inside(both, box)], run[inside(both, part)]

    def missing(self) -> list[str]:
        left = set(range(len(self.buckets))) - self._done.keys() - set(self.skips)
        if not left:
            return []
        names = {self._manifest.entries[p.entry].name for k in left for p in self.buckets[k].pieces}
        return [name for name in self._into if name in names]

    def assurance(self) -> Assurance:
        return "verified"

    @torch.no_grad()
    def changed(self, pool: ThreadPoolExecutor) -> str:
        written = [it for bucket in self._done.values() for it in bucket]
        in_place = all(some.written.in_place for some, _ in written)
        found = [some.written.sums(pool) for some, _ in written] if in_place else []  # a GPU is at it meanwhile
        if self._names != list(self._given) or not self._as_before(self._all.are_same):
            return f"{next(filter(self._is_another, self._layouts), 'a tensor')} was replaced"
        found = found or [some.written.sums(pool) for some, _ in written]
        if not written or torch.equal(torch.cat(found), torch.cat([sums for _, sums in written])):
            return ""
        rows = ((some, first_change(before, now)) for (some, before), now in zip(written, found, strict=True))
        return next(f"{some.at(row)} changed" for some, row in rows if row is not None)

    def _is_another(self, name: str) -> bool:
        there = self._given.get(name)
        return bool(unfit(name, there)) or layout_of(cast("Tensor", there)) != self._layouts[name]


@dataclass(frozen=True, slots=True)
class _Copies:
    """Some of a bucket's, all of one type."""

    names: list[str]
    targets: list[Tensor]
    sources: list[Tensor]
    written: Rows
    given: Rows

    def odd(self, row: int) -> str:
        """The tensor that makes this row of sums be odd, while what was given is still there."""
        places = self.written.at(row)
        differ = (it for it in places if not torch.equal(self.targets[it], self.sources[it]))
        return self.names[next(differ, places[0])]

    def at(self, row: int) -> str:
        """Who has bytes in a row, in words."""
        names = [self.names[place] for place in self.written.at(row)]
        return f"{'one of ' if len(names) > 1 else ''}{listed(names, ', ')}"


class _Views:
    """Tensors where they lie in a buffer; each made in one step, since there can be many."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._typed: dict[str, tuple[Tensor, int, int]] = {}

    def of(self, piece: Piece, entry: TensorSpec) -> Tensor:
        if entry.dtype not in self._typed:
            made = self.buffer.view(getattr(torch, entry.dtype))
            self._typed[entry.dtype] = made, int(made.storage_offset()), made.itemsize
        typed, start, item = self._typed[entry.dtype]
        strides = [1] * len(entry.shape)
        for k in range(len(entry.shape) - 1, 0, -1):
            strides[k - 1] = strides[k] * max(1, entry.shape[k])
        return typed.as_strided(entry.shape, strides, start + piece.offset // item)


def _misfit(name: str, tensor: Tensor, entry: TensorSpec | None, slices: Mapping[str, tuple[slice, ...]]) -> str:
    """Why what comes under a name cannot go into a live tensor, in words; nothing if it can."""
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


def listed(some: list[str], between: str = "; ") -> str:
    """The first few of them."""
    return between.join([*some[:3], *([f"and {len(some) - 3} more"] if len(some) > 3 else [])])
