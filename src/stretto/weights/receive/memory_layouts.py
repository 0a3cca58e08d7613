"""Live tensors of an engine: how they lie in memory, and which of them are one and the same."""

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

_MANY = 32  # tensors that are compared each with each
_WORK = 1_000_000  # steps in which it must be found out whether two tensors overlap
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MemoryLayout(NamedTuple):
    """Where a tensor lies, and how."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: bool = False
    """Whether it is to be read as conjugate or negative."""

    @property
    def end(self) -> int:
        steps = (stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address + self.dtype.itemsize * (1 + sum(steps))


_T = TypeVar("_T")
_One = tuple[MemoryLayout, Region]


def layout_of(tensor: Tensor) -> MemoryLayout:
    return MemoryLayout(
        tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj() or tensor.is_neg()
    )


def _seen(layout: MemoryLayout) -> MemoryLayout:
    """Without strides along which there is nothing to go."""
    steps = tuple(stride if size > 1 else 0 for size, stride in zip(layout.shape, layout.strides, strict=True))
    return MemoryLayout(layout.address, layout.dtype, layout.shape, steps)


def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory as integers, so that equal means equal to the bit; every type can be copied and joined then.
    All are of one type and shape; in one piece, they become longer integers if they can, which are fewer.
    """
    found = [torch.view_as_real(it) if it.is_complex() else it for it in tensors]
    size = found[0].itemsize
    if all(it.is_contiguous() for it in found):
        found = [it if it.dim() == 1 else it.view(-1) for it in found]
        if size < 4 and not any(it.nbytes % 4 or it.storage_offset() * size % 4 for it in found):
            size = 4
    return tuple(it.view(_INTEGERS[size]) for it in found)


_NEAR = 256  # tensors that are asked all questions before the next are, as long as they are near


class Layouts:
    """How tensors lie, to be compared with how they lie later: quickly, since there can be many."""

    def __init__(self, tensors: Collection[Tensor], layouts: Collection[MemoryLayout]) -> None:
        self._few = [_Few(*some) for some in zip(_batches(tensors), _batches(layouts), strict=True)]
        self._count = len(tensors)

    def hold(self, tensors: Collection[Tensor]) -> bool:
        """Whether each lies as it did, in memory that is still there."""
        pairs = zip(self._few, _batches(tensors), strict=False)
        return len(tensors) == self._count and all(few.have_memory() and few.are_same(some) for few, some in pairs)

    def are_same(self, tensors: Collection[Tensor]) -> bool:
        """Whether each lies as it did; whether its memory was cut is not looked at."""
        pairs = zip(self._few, _batches(tensors), strict=False)
        return len(tensors) == self._count and all(few.are_same(some) for few, some in pairs)


def _batches(them: Collection[_T]) -> Iterator[list[_T]]:
    every = list(them)
    for at in range(0, len(every), _NEAR):
        yield every[at : at + _NEAR]


class _Few:
    def __init__(self, tensors: list[Tensor], layouts: list[MemoryLayout]) -> None:
        self._layouts, self._addresses = layouts, [layout.address for layout in layouts]
        self._look = _quick_look(tensors)
        self._storages = [it.untyped_storage() for it in tensors]
        self._sizes = list(map(torch.UntypedStorage.nbytes, self._storages))

    def are_same(self, tensors: list[Tensor]) -> bool:
        if list(map(Tensor.data_ptr, tensors)) != self._addresses:
            return False
        return self._look(*tensors) or list(map(layout_of, tensors)) == self._layouts

    def have_memory(self) -> bool:
        """As much as they had."""
        return list(map(torch.UntypedStorage.nbytes, self._storages)) == self._sizes


def _quick_look(tensors: list[Tensor]) -> Callable[..., bool]:
    """Tells of as many tensors whether all have the types, shapes and strides that these have now, and are read in the
    same way. It may say no although they do.
    """
    try:  # how compiled code is guarded: all tensors in one call
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, RuntimeError):  # none of it is promised
        return lambda *_: False
    return check


def unfit(name: str, tensor: Any) -> str:
    """Why a tensor cannot be written in place, whatever comes; nothing if it can."""
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}, not a tensor"
    if isinstance(tensor, DTensor):
        return f"{name} is a DTensor; give its local tensor, and slices of what is pushed"
    lazily = is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    if not lazily and tensor.numel() and 0 <= _stored(tensor) < _needed(tensor):
        return f"{name} has no memory of its size any more"
    if lazily or not has_memory(tensor):
        return f"{name} is not plain memory, and cannot be written in place"
    layout = layout_of(tensor)
    reach = 0  # of elements along dimensions with smaller strides
    for stride, size in sorted(zip(layout.strides, layout.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            return f"{name} is expanded or overlaps itself (strides {layout.strides}): it cannot hold what is pushed"
        reach += stride * max(0, size - 1)
    return ""


def _needed(tensor: Tensor) -> int:
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (int(tensor.storage_offset()) + 1 + sum(steps))


def _stored(tensor: Tensor) -> int:
    """Bytes of the memory that it is in; below 0 if there is none of its own."""
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError:
        return -1


def shared(tensors: Mapping[str, Tensor], boxes: Mapping[str, Region]) -> tuple[list[str], list[list[str]]]:
    """Which tensors overlap, in words, and which are one and the same under several names; `boxes` are of those that
    take a part of what is pushed.
    """
    wrong, alike = [], []
    layouts = {name: _seen(layout_of(tensor)) for name, tensor in tensors.items() if tensor.numel()}
    for cluster in _clusters(layouts):
        ones: dict[_One, list[str]] = {}
        for name in cluster:
            ones.setdefault((layouts[name], boxes.get(name, ())), []).append(name)
        alike += [names for names in ones.values() if len(names) > 1]
        pairs: Iterable[tuple[_One, ...]] = combinations(ones, 2)
        if len(ones) > _MANY:
            every = list(ones)
            odd = _odd_one([layout for layout, _ in every])
            pairs = [] if odd is None else [(it, every[odd]) for it in every[:odd]]
        for one, other in pairs:
            if _overlap(one[0], other[0]):
                pair = f"{ones[one][0]} and {ones[other][0]}"
                wrong.append(f"{pair} overlap in memory, and are not one and the same tensor")
    return wrong, alike


def _clusters(layouts: Mapping[str, MemoryLayout]) -> Iterator[list[str]]:
    """Tensors of which the first and last bytes lie between each other's; most tensors are alone."""
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


def _odd_one(layouts: Sequence[MemoryLayout]) -> int | None:
    """The first of many that has a byte in common with one before it; to compare each with each would take long."""
    first = min(layout.address for layout in layouts)
    steps = (layout.dtype.itemsize * stride for layout in layouts for stride in layout.strides)
    step = gcd(*steps, *(it for layout in layouts for it in (layout.dtype.itemsize, layout.address - first)))
    taken = np.zeros((max(layout.end for layout in layouts) - first) // step, bool)
    for number, layout in enumerate(layouts):
        item = layout.dtype.itemsize
        strides = [item * stride // step for stride in layout.strides]
        place = np.lib.stride_tricks.as_strided(
            taken[(layout.address - first) // step :], (*layout.shape, item // step), (*strides, 1)
        )
        if place.any():
            return number
        place[...] = True
    return None


def _overlap(one: MemoryLayout, other: MemoryLayout) -> bool:
    """Whether any byte is in both; also if that cannot be found out."""
    first = min(one.address, other.address)
    room = mmap.mmap(-1, max(one.end, other.end) - first, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never touched
    try:
        return np.shares_memory(_array(room, first, one), _array(room, first, other), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _array(room: mmap.mmap, first: int, layout: MemoryLayout) -> NDArray[Any]:
    """A tensor's memory, moved to where nobody reads it."""
    item = layout.dtype.itemsize
    strides = [item * stride for stride in layout.strides]
    return np.ndarray(layout.shape, f"V{item}", room, layout.address - first, strides)


def grouped(sizes: Iterable[int], most: int) -> Iterator[slice]:
    """Consecutive ones that are so large together at most, or one.

    >>> [(it.start, it.stop) for it in grouped([3, 3, 9, 1], 6)]
    [(0, 2), (2, 3), (3, 4)]
    """
    begin = held = at = 0
    for at, size in enumerate(sizes):
        if held and held + size > most:
            yield slice(begin, at)
            begin, held = at, 0
        held += size
    if held:
        yield slice(begin, at + 1)
