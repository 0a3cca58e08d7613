"""The memory layout of an engine's live tensors: changes, aliases and overlaps."""

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import gcd
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from stretto.weights.regions import Region
from stretto.weights.sources.shard import has_memory

_MAX_PAIRWISE = 32  # the most tensors to compare pairwise
_MAX_WORK = 1_000_000  # steps numpy may take to decide whether two tensors overlap
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MemoryLayout(NamedTuple):
    """The address, dtype, shape and strides of a tensor."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: bool = False
    """Whether the tensor is a lazy conjugate or negation of its memory."""

    @property
    def end(self) -> int:
        steps = (stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address + self.dtype.itemsize * (1 + sum(steps))


_T = TypeVar("_T")
_Target = tuple[MemoryLayout, Region]
"""The memory of a live tensor, and the region of the pushed tensor that it takes."""


def layout_of(tensor: Tensor) -> MemoryLayout:
    return MemoryLayout(
        tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj() or tensor.is_neg()
    )


def _normalised(layout: MemoryLayout) -> MemoryLayout:
    """Zero the strides of dimensions of size 1, where they have no meaning."""
    steps = tuple(stride if size > 1 else 0 for size, stride in zip(layout.shape, layout.strides, strict=True))
    return MemoryLayout(layout.address, layout.dtype, layout.shape, steps)


def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the same memory as integers: equality is then bitwise, and every dtype can be copied and concatenated.

    All tensors have one dtype and shape. If contiguous, small elements are viewed as 32-bit integers where possible.
    """
    views = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    size = views[0].itemsize
    if all(view.is_contiguous() for view in views):
        views = [view if view.dim() == 1 else view.view(-1) for view in views]
        if size < 4 and not any(view.nbytes % 4 or view.storage_offset() * size % 4 for view in views):
            size = 4
    return tuple(view.view(_INTEGERS[size]) for view in views)


_BATCH = 256  # tensors that go through all checks before the next do, while they are in the CPU's cache


class Layouts:
    """The layouts of many tensors, to be compared quickly with their layouts later."""

    def __init__(self, tensors: Collection[Tensor], layouts: Collection[MemoryLayout]) -> None:
        self._batches = [_Batch(*batch) for batch in zip(_batches(tensors), _batches(layouts), strict=True)]
        self._count = len(tensors)

    def hold(self, tensors: Collection[Tensor]) -> bool:
        """Return whether every tensor has its old layout and its storage its old size."""
        pairs = zip(self._batches, _batches(tensors), strict=False)
        return len(tensors) == self._count and all(old.have_memory() and old.are_same(new) for old, new in pairs)

    def are_same(self, tensors: Collection[Tensor]) -> bool:
        """Return whether every tensor has its old layout; the sizes of the storages are not checked."""
        pairs = zip(self._batches, _batches(tensors), strict=False)
        return len(tensors) == self._count and all(old.are_same(new) for old, new in pairs)


def _batches(items: Collection[_T]) -> Iterator[list[_T]]:
    every = list(items)
    for at in range(0, len(every), _BATCH):
        yield every[at : at + _BATCH]


class _Batch:
    def __init__(self, tensors: list[Tensor], layouts: list[MemoryLayout]) -> None:
        self._layouts, self._addresses = layouts, [layout.address for layout in layouts]
        self._look = _quick_look(tensors)
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._sizes = list(map(torch.UntypedStorage.nbytes, self._storages))

    def are_same(self, tensors: list[Tensor]) -> bool:
        if list(map(Tensor.data_ptr, tensors)) != self._addresses:
            return False
        return self._look(*tensors) or list(map(layout_of, tensors)) == self._layouts

    def have_memory(self) -> bool:
        """Return whether the storages have their old sizes."""
        return list(map(torch.UntypedStorage.nbytes, self._storages)) == self._sizes


def _quick_look(tensors: list[Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether tensors have the dtypes, shapes, strides and dispatch keys that these have
    now. It may return False although they do.
    """
    try:  # the guards of compiled code, which check all tensors in one call
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, RuntimeError):  # a private API, which may change
        return lambda *_: False
    return check


def unfit(name: str, tensor: Any) -> str:
    """Say why a tensor can never be written in place; return an empty string if it can."""
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}, not a tensor"
    if isinstance(tensor, DTensor):
        return f"{name} is a DTensor; give its local tensor, and slices of what is pushed"
    indirect = (
        is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    )
    if not indirect and tensor.numel() and 0 <= _stored(tensor) < _needed(tensor):
        return f"{name} has no memory of its size any more"
    if indirect or not has_memory(tensor):
        return f"{name} is not plain memory, and cannot be written in place"
    layout = layout_of(tensor)
    reach = 0  # of the dimensions with smaller strides, in elements
    for stride, size in sorted(zip(layout.strides, layout.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            return f"{name} is expanded or overlaps itself (strides {layout.strides}): it cannot hold what is pushed"
        reach += stride * max(0, size - 1)
    return ""


def _needed(tensor: Tensor) -> int:
    """Return the bytes of storage that a tensor needs."""
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (int(tensor.storage_offset()) + 1 + sum(steps))


def _stored(tensor: Tensor) -> int:
    """Return the bytes of a tensor's storage; -1 if it has none."""
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError:
        return -1


def shared(tensors: Mapping[str, Tensor], regions: Mapping[str, Region]) -> tuple[list[str], list[list[str]]]:
    """Describe the tensors that overlap, and return the groups of names that share one tensor.

    `regions` has the regions of the pushed tensors for live tensors that take only a part.
    """
    overlaps, alike = [], []
    layouts = {name: _normalised(layout_of(tensor)) for name, tensor in tensors.items() if tensor.numel()}
    for cluster in _clusters(layouts):
        targets: dict[_Target, list[str]] = {}
        for name in cluster:
            targets.setdefault((layouts[name], regions.get(name, ())), []).append(name)
        alike += [names for names in targets.values() if len(names) > 1]
        pairs: Iterable[tuple[_Target, ...]] = combinations(targets, 2)
        if len(targets) > _MAX_PAIRWISE:
            every = list(targets)
            clash = _first_overlap([layout for layout, _ in every])
            pairs = [] if clash is None else [(target, every[clash]) for target in every[:clash]]
        for one, other in pairs:
            if _overlap(one[0], other[0]):
                pair = f"{targets[one][0]} and {targets[other][0]}"
                overlaps.append(f"{pair} overlap in memory, and are not one and the same tensor")
    return overlaps, alike


def _clusters(layouts: Mapping[str, MemoryLayout]) -> Iterator[list[str]]:
    """Yield groups of tensors whose address ranges overlap; most tensors are in none."""
    cluster: list[str] = []
    end = 0
    for name in sorted(layouts, key=lambda name: layouts[name].address):
        if layouts[name].address >= end and cluster:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(name)
        end = max(end, layouts[name].end)
    if len(cluster) > 1:
        yield cluster


def _first_overlap(layouts: Sequence[MemoryLayout]) -> int | None:
    """Return the index of the first layout that shares a byte with an earlier one; for many, faster than pairwise."""
    first = min(layout.address for layout in layouts)
    steps = (layout.dtype.itemsize * stride for layout in layouts for stride in layout.strides)
    step = gcd(*steps, *(size for layout in layouts for size in (layout.dtype.itemsize, layout.address - first)))
    used = np.zeros((max(layout.end for layout in layouts) - first) // step, bool)
    for number, layout in enumerate(layouts):
        item = layout.dtype.itemsize
        strides = [item * stride // step for stride in layout.strides]
        own = np.lib.stride_tricks.as_strided(
            used[(layout.address - first) // step :], (*layout.shape, item // step), (*strides, 1)
        )
        if own.any():
            return number
        own[...] = True
    return None


def _overlap(one: MemoryLayout, other: MemoryLayout) -> bool:
    """Return whether two layouts share a byte, or whether that takes too long to decide."""
    first = min(one.address, other.address)
    # An address range of the same size, never read or written: numpy compares only addresses.
    memory = mmap.mmap(-1, max(one.end, other.end) - first, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        return np.shares_memory(_array(memory, first, one), _array(memory, first, other), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _array(memory: mmap.mmap, first: int, layout: MemoryLayout) -> NDArray[Any]:
    """Return an array with a tensor's layout in other memory."""
    item = layout.dtype.itemsize
    strides = [item * stride for stride in layout.strides]
    return np.ndarray(layout.shape, f"V{item}", memory, layout.address - first, strides)


def grouped(sizes: Iterable[int], limit: int) -> Iterator[slice]:
    """Group consecutive sizes so that each group adds up to `limit` at most, or has one member.

    >>> [(group.start, group.stop) for group in grouped([3, 3, 9, 1], 6)]
    [(0, 2), (2, 3), (3, 4)]
    """
    begin = total = at = 0
    for at, size in enumerate(sizes):
        if total and total + size > limit:
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if total:
        yield slice(begin, at + 1)
