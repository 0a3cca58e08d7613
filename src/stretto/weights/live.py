"""Live tensors of an engine: how they lie in memory, and which of them are one and the same."""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

Slices = tuple[slice, ...]
_WORK = 1_000_000  # steps in which it must be found out whether two tensors overlap
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Lay(NamedTuple):
    """Where a tensor lies, and how."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        steps = (stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address + self.dtype.itemsize * (1 + sum(steps))


def lay_of(tensor: Tensor) -> Lay:
    return Lay(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def plain(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that equal means equal to the bit; every type can be copied and joined then."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.itemsize])


def unfit(name: str, tensor: Any) -> str:
    """Why a tensor cannot be written in place, whatever comes; nothing if it can."""
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}, not a tensor"
    if isinstance(tensor, DTensor):
        return f"{name} is a DTensor; give its local tensor, and slices of what is pushed"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return f"{name} is not plain memory, and cannot be written in place"
    lay = lay_of(tensor)
    reach = 0  # of elements along dimensions with smaller strides
    for stride, size in sorted(zip(lay.strides, lay.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            return f"{name} is expanded or overlaps itself (strides {lay.strides}): it cannot hold what is pushed"
        reach += stride * max(0, size - 1)
    return ""


def shared(tensors: Mapping[str, Tensor], slices: Mapping[str, Slices]) -> tuple[list[str], list[list[str]]]:
    """Which tensors overlap, in words, and which are one and the same under several names."""
    wrong, alike = [], []
    lays = {name: lay_of(tensor) for name, tensor in tensors.items() if tensor.numel()}
    for cluster in _clusters(lays):
        ones: dict[tuple[Lay, str], list[str]] = {}
        for name in cluster:
            ones.setdefault((lays[name], str(slices.get(name, ()))), []).append(name)
        alike += [names for names in ones.values() if len(names) > 1]
        for (one, of), (other, also) in combinations(ones, 2):
            if _overlap(one, other):
                pair = f"{ones[one, of][0]} and {ones[other, also][0]}"
                wrong.append(f"{pair} overlap in memory, and are not one and the same tensor")
    return wrong, alike


def _clusters(lays: Mapping[str, Lay]) -> Iterator[list[str]]:
    """Tensors of which the first and last bytes lie between each other's; most tensors are alone."""
    cluster: list[str] = []
    end = 0
    for name in sorted(lays, key=lambda name: lays[name].address):
        if lays[name].address >= end and cluster:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(name)
        end = max(end, lays[name].end)
    if len(cluster) > 1:
        yield cluster


def _overlap(one: Lay, other: Lay) -> bool:
    """Whether any byte is in both; also if that cannot be found out."""
    first = min(one.address, other.address)
    room = mmap.mmap(-1, max(one.end, other.end) - first, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never touched
    try:
        return np.shares_memory(_array(room, first, one), _array(room, first, other), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _array(room: mmap.mmap, first: int, lay: Lay) -> NDArray[Any]:
    """A tensor's memory, moved to where nobody reads it."""
    item = lay.dtype.itemsize
    strides = [item * stride for stride in lay.strides]
    return np.ndarray(lay.shape, f"V{item}", room, lay.address - first, strides)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All in one, as they are now; one alone stays where it is."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([it.reshape(-1) for it in tensors])


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
