"""Where weight gradients are summed: a flat tensor for each stage and type, and a place in it for each parameter."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64
"""Places begin at multiples of so many numbers, as kernels like it."""
_WHOLE = 1024
"""Flat tensors have multiples of so many, so that they can be cut into equal parts for many ranks."""
_HALVES = (torch.bfloat16, torch.float16)


class Sum:
    """The gradient of one parameter: what a step's microbatches have added up to so far."""

    __slots__ = ("dtype", "given_as", "is_summed", "parameter", "place", "stream", "value")

    def __init__(self, parameter: Tensor, dtype: torch.dtype, given_as: torch.dtype) -> None:
        self.parameter, self.dtype, self.given_as = parameter, dtype, given_as
        self.place: Tensor | None = None
        """Where it lies in a flat tensor; None for what is summed by itself: sparse gradients, DTensors."""
        self.value: Tensor | None = None
        """The sum: in its place, or what was added if that is sparse. None if nothing was."""
        self.stream: Any = None
        """The stream that added last, where several do."""
        self.is_summed = False
        """Whether it was summed over ranks in this step: then nothing more may be added."""

    def add(self, grad: Tensor, rows: slice | None = None) -> None:
        """Add a gradient, or that of some rows. It is copied: others may hold it too, or a view of it."""
        place, value = self.place, self.value
        if place is None or (grad.is_sparse and value is not place):
            self._add_loose(grad, rows)
        elif value is place:
            (place if rows is None else place[rows]).add_(grad)
        elif value is None and rows is None:
            self.value = place.copy_(grad)
        else:
            self.fill()
            self.add(grad, rows)

    def add_product(self, left: Tensor, right: Tensor, rows: slice | None = None) -> None:
        """Add the product of two matrices, by the product itself where PyTorch can."""
        place = self.place
        if place is None or (self.value is not None and self.value is not place) or not left.numel():
            self.add(left @ right, rows)
            return
        if rows is not None and self.value is None:
            self.fill()
        into = place if rows is None else place[rows]
        old = 0 if self.value is None else 1  # what is there is not read at first, and may be anything
        if left.dtype == into.dtype:
            torch.addmm(into, left, right, beta=old, out=into)
        elif left.dtype in _HALVES and into.dtype == torch.float32 and into.is_cuda and into.is_contiguous():
            torch.addmm(into, left, right, out_dtype=torch.float32, beta=old, out=into)
        else:
            self.add(left @ right, rows)
            return
        self.value = place

    def fill(self) -> None:
        """Put the sum so far into its place: zeros if there is none."""
        if self.place is not None and self.value is not self.place:
            self.place.zero_()
            if self.value is not None:
                self.place.add_(self.value)
            self.value = self.place

    def _add_loose(self, grad: Tensor, rows: slice | None) -> None:
        if rows is not None:
            whole = torch.zeros_like(self.parameter, dtype=self.dtype)
            whole[rows].add_(grad)
            grad = whole
        grad = grad.to(self.dtype, copy=self.value is None)
        if self.value is None:
            self.value = grad
        else:  # a sparse one is added to a dense one, not the other way round
            self.value = grad + self.value if self.value.is_sparse else self.value + grad


def add_all(grads: Iterable[tuple[Sum, Tensor]]) -> None:
    """Add gradients of different parameters, those whose sums are in their places with one kernel where PyTorch can."""
    places, added = [], []
    for sum_, grad in grads:
        if sum_.value is not None and sum_.value is sum_.place and not grad.is_sparse:
            places.append(sum_.place)
            added.append(grad)
        else:
            sum_.add(grad)
    if places:
        torch._foreach_add_(places, added)


class Block:
    """Sums that lie one behind the other. Those that other ranks hold too are one message."""

    def __init__(self, sums: Sequence[Sum], *, shared: bool) -> None:
        self.sums, self._shared = sums, shared
        sizes = [_up(sum_.parameter.numel(), _ALIGNED) for sum_ in sums]
        self.offsets = [0, *accumulate(sizes)]
        self.size = self.offsets[-1] + (_up(len(sums), _ALIGNED) if shared else 0)
        self._flat = torch.empty(0)
        self._used = [True] * len(sums)

    def lie_in(self, flat: Tensor) -> None:
        """From now on in this memory, whose contents do not matter."""
        self._flat = flat
        for sum_, offset in zip(self.sums, self.offsets, strict=False):
            sum_.place = _like(sum_.parameter, flat, offset)

    def message(self) -> Tensor:
        """What is to be summed over ranks. In the end each rank says which gradients it has."""
        assert self._shared
        self._used = [sum_.value is not None for sum_ in self.sums]
        for sum_ in self.sums:
            sum_.fill()
            sum_.is_summed = True
        if all(self._used):
            self._told.fill_(1)
        else:
            self._told.copy_(torch.tensor(self._used))
        return torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat

    @property
    def is_in_doubt(self) -> bool:
        """Whether only the sum tells which gradients there are."""
        return not all(self._used)

    def settle(self) -> None:
        """What no rank has used has no gradient."""
        for sum_, by in zip(self.sums, self._told.abs().tolist(), strict=True):
            if not by:
                sum_.value = None

    @property
    def _told(self) -> Tensor:
        return self._flat[self.offsets[-1] : self.offsets[-1] + len(self.sums)]


class Buffer:
    """The flat tensor of a stage's parameters whose gradients are summed in one type, and given out as one."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.sums = [sum_ for block in blocks for sum_ in block.sums]
        self.dtype, self.given_as = self.sums[0].dtype, self.sums[0].given_as
        self._device = self.sums[0].parameter.device
        self._offsets = [0, *accumulate(block.size for block in blocks)]
        self.flat: Tensor | None = None
        self.divisor: Tensor | None = None
        """What the sums are still to be divided by."""

    @property
    def size(self) -> int:
        return _up(self._offsets[-1], _WHOLE)

    def renew(self) -> None:
        """Lie in memory that nobody holds."""
        self.flat = torch.empty(self.size, dtype=self.dtype, device=self._device)
        for block, offset in zip(self.blocks, self._offsets, strict=False):
            block.lie_in(self.flat[offset : offset + block.size])

    def divide(self) -> None:
        if self.divisor is not None and self.flat is not None:
            self.flat.div_(self.divisor)
            self.divisor = None

    def cast(self) -> list[Tensor]:
        """The sums, divided, in the type that they are given out as."""
        assert self.flat is not None
        given = torch.empty(self.size, dtype=self.given_as, device=self._device)
        if self.divisor is not None:
            torch.div(self.flat, self.divisor, out=given)
        else:
            given.copy_(self.flat)
        return [
            _like(sum_.parameter, given, offset + within)
            for block, offset in zip(self.blocks, self._offsets, strict=False)
            for sum_, within in zip(block.sums, block.offsets, strict=False)
        ]


def _like(parameter: Tensor, flat: Tensor, offset: int) -> Tensor:
    """A tensor that looks like a parameter, in flat memory. It is no view: with one, others would change version."""
    strides = parameter.stride() if parameter.is_contiguous() else torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset).data


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
