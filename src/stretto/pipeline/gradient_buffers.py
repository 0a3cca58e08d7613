"""Flat buffers in which weight gradients are summed: one per stage and dtype, with a slice for each parameter."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stretto.moe.kernels import has_kernels

_ALIGNMENT = 64
"""Each parameter's slice starts at a multiple of this many elements, for the kernels' alignment."""
_FLAT_MULTIPLE = 1024
"""Flat tensors have a multiple of this many elements, so that they divide evenly over many ranks."""
_HALVES = (torch.bfloat16, torch.float16)
_LARGE = 2**20
"""Gradients of so many elements are worth a kernel of their own."""


class Sum:
    """The gradient of one parameter, summed over the microbatches of a step so far."""

    __slots__ = ("dtype", "grad_dtype", "is_summed", "parameter", "place", "stream", "value")

    def __init__(self, parameter: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        self.parameter, self.dtype, self.grad_dtype = parameter, dtype, grad_dtype
        self.place: Tensor | None = None
        """The parameter's slice of the flat tensor; None for gradients summed on their own (sparse ones, DTensors)."""
        self.value: Tensor | None = None
        """The sum: `place` itself, or a separate tensor (a sparse sum, say). None if nothing was added."""
        self.stream: Any = None
        """The stream that added last, if several streams compute."""
        self.is_summed = False
        """Whether it was already summed over ranks in this step; nothing more may be added then."""

    def add(self, grad: Tensor, rows: slice | None = None) -> None:
        """Add a gradient, or the gradient of some rows. Copies it, since others may hold it or a view of it."""
        place, value = self.place, self.value
        if place is None or (grad.is_sparse and value is not place):
            self._add_loose(grad, rows)
        elif value is place:
            _add(place if rows is None else place[rows], grad)
        elif value is None and rows is None:
            self.value = place.copy_(grad)
        else:
            self.fill()
            self.add(grad, rows)

    def add_product(self, left: Tensor, right: Tensor, rows: slice | None = None) -> None:
        """Add the product of two matrices, with a single addmm where PyTorch supports it."""
        place = self.place
        if place is None or (self.value is not None and self.value is not place) or not left.numel():
            self.add(left @ right, rows)
            return
        if rows is not None and self.value is None:
            self.fill()
        into = place if rows is None else place[rows]
        beta = 0 if self.value is None else 1  # with 0, addmm does not read the uninitialised memory
        if left.dtype == into.dtype:
            torch.addmm(into, left, right, beta=beta, out=into)
        elif left.dtype in _HALVES and into.dtype == torch.float32 and into.is_cuda and into.is_contiguous():
            torch.addmm(into, left, right, out_dtype=torch.float32, beta=beta, out=into)
        else:
            self.add(left @ right, rows)
            return
        self.value = place

    def fill(self) -> None:
        """Copy the sum so far into `place`, or zeros if nothing was added."""
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
        else:  # PyTorch adds sparse to dense, but not dense to sparse
            self.value = grad + self.value if self.value.is_sparse else self.value + grad


def _add(into: Tensor, grad: Tensor) -> None:
    if _has_kernel(into, grad):
        from stretto.pipeline.sum_kernels import add

        add(into, grad)
    else:
        into.add_(grad)


def _has_kernel(into: Tensor, grad: Tensor) -> bool:
    """Return whether our kernel adds a large gradient of few bits to a float32 sum."""
    return (
        into.dtype == torch.float32
        and grad.dtype in _HALVES
        and into.numel() >= _LARGE
        and into.shape == grad.shape
        and into.is_contiguous()
        and grad.is_contiguous()
        and not grad.requires_grad
        and has_kernels(into, grad)
    )


def add_all(grads: Iterable[tuple[Sum, Tensor]]) -> None:
    """Add gradients of different parameters; those whose sums lie in flat tensors take one kernel where possible."""
    places, gradients = [], []
    for sum_, grad in grads:
        if sum_.value is not None and sum_.value is sum_.place and not grad.is_sparse:
            places.append(sum_.place)
            gradients.append(grad)
        else:
            sum_.add(grad)
    if places:
        torch._foreach_add_(places, gradients)


class Block:
    """Sums that are contiguous in memory. If other ranks hold the same parameters, the block is one all-reduce."""

    def __init__(self, sums: Sequence[Sum], *, shared: bool) -> None:
        self.sums, self._shared = sums, shared
        sizes = [_round_up(sum_.parameter.numel(), _ALIGNMENT) for sum_ in sums]
        self.offsets = [0, *accumulate(sizes)]
        self.size = self.offsets[-1] + (_round_up(len(sums), _ALIGNMENT) if shared else 0)
        self._flat = torch.empty(0)
        self._used = [True] * len(sums)

    def lie_in(self, flat: Tensor) -> None:
        """Place the sums in this memory. Its contents are ignored."""
        self._flat = flat
        for sum_, offset in zip(self.sums, self.offsets, strict=False):
            sum_.place = _like(sum_.parameter, flat, offset)

    def message(self) -> Tensor:
        """Return the tensor to all-reduce. Its last elements flag which gradients this rank has."""
        assert self._shared
        self._used = [sum_.value is not None for sum_ in self.sums]
        for sum_ in self.sums:
            sum_.fill()
            sum_.is_summed = True
        if all(self._used):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self._used))
        return torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat

    @property
    def is_in_doubt(self) -> bool:
        """Whether only the reduced flags tell which gradients exist."""
        return not all(self._used)

    def settle(self) -> None:
        """Drop the gradients of parameters that no rank used."""
        for sum_, ranks in zip(self.sums, self._flags.abs().tolist(), strict=True):
            if not ranks:
                sum_.value = None

    @property
    def _flags(self) -> Tensor:
        return self._flat[self.offsets[-1] : self.offsets[-1] + len(self.sums)]


class Buffer:
    """The flat tensor of a stage's parameters that share both the dtype of their sums and the dtype of `.grad`."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.sums = [sum_ for block in blocks for sum_ in block.sums]
        self.dtype, self.grad_dtype = self.sums[0].dtype, self.sums[0].grad_dtype
        self._device = self.sums[0].parameter.device
        self._offsets = [0, *accumulate(block.size for block in blocks)]
        self.flat: Tensor | None = None
        self.divisor: Tensor | None = None
        """The count by which the sums must still be divided."""

    @property
    def size(self) -> int:
        return _round_up(self._offsets[-1], _FLAT_MULTIPLE)

    def renew(self) -> None:
        """Move all blocks to newly allocated memory."""
        self.flat = torch.empty(self.size, dtype=self.dtype, device=self._device)
        for block, offset in zip(self.blocks, self._offsets, strict=False):
            block.lie_in(self.flat[offset : offset + block.size])

    def divide(self) -> None:
        if self.divisor is not None and self.flat is not None:
            self.flat.div_(self.divisor)
            self.divisor = None

    def cast(self) -> list[Tensor]:
        """Return the sums, divided and cast to the dtype of `.grad`."""
        assert self.flat is not None
        cast = torch.empty(self.size, dtype=self.grad_dtype, device=self._device)
        if self.divisor is not None:
            torch.div(self.flat, self.divisor, out=cast)
        else:
            cast.copy_(self.flat)
        return [
            _like(sum_.parameter, cast, offset + within)
            for block, offset in zip(self.blocks, self._offsets, strict=False)
            for sum_, within in zip(block.sums, block.offsets, strict=False)
        ]


def _like(parameter: Tensor, flat: Tensor, offset: int) -> Tensor:
    """Return a tensor of the parameter's shape and strides in flat memory.

    It is not a view: views share a version counter, so changing one slice would bump the version of all others.
    """
    strides = parameter.stride() if parameter.is_contiguous() else torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset).data


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
