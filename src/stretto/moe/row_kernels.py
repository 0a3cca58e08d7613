"""Triton kernels that read each row of experts once.

T tokens, K experts for each token, R = T × K rows, D features, n ranks, e experts on each rank. Places of rows are
64-bit numbers, since rows may have more than 2³¹ elements in all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.moe.kernels import OPTIONS, on_device_of

_MOST_FEATURES = 1024  # for each step of a program
_MOST_LOADS = 8  # rows that a program loads at once
_ROWS = 1024  # whose new places a program writes at once


@triton.jit  # type: ignore[untyped-decorator]
def _gather_sum(  # type: ignore[no-untyped-def]
    rows, target, out, features, K: tl.constexpr, LOADS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < features
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, LOADS):
        for k in tl.static_range(LOADS):
            there = first + k < K
            row = tl.load(target + token * K + first + k, mask=there, other=0)
            total += tl.load(rows + row * features + feature, mask=inside & there, other=0.0).to(tl.float32)
    tl.store(out + token * features + feature, total.to(out.dtype.element_ty), mask=inside)


def gather_sum(rows_RD: Tensor, target_R: Tensor, *, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return for each token the sum of its rows, in float32 and in the order of its K experts, rounded once."""
    rows_RD = rows_RD.contiguous()
    chosen, features = len(target_R) // max(1, tokens), rows_RD.shape[1]
    out_TD = rows_RD.new_empty(tokens, features, dtype=dtype)
    block, loads = _block(features), max(1, min(chosen, _MOST_LOADS))
    with on_device_of(rows_RD):
        _gather_sum[tokens, triton.cdiv(features, block)](
            rows_RD, target_R, out_TD, features, chosen, loads, block, **OPTIONS
        )
    return out_TD


@triton.jit  # type: ignore[untyped-decorator]
def _weigh_backward(  # type: ignore[no-untyped-def]
    grad, rows, weights, rows_grad, weights_grad, features, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, features, BLOCK):
        feature = first + tl.arange(0, BLOCK)
        inside = feature < features
        gradient = tl.load(grad + row * features + feature, mask=inside, other=0.0).to(tl.float32)
        if weights_grad is not None:
            product += gradient * tl.load(rows + row * features + feature, mask=inside, other=0.0).to(tl.float32)
        if rows_grad is not None:
            weighted = (gradient * weight).to(rows_grad.dtype.element_ty)
            tl.store(rows_grad + row * features + feature, weighted, mask=inside)
    if weights_grad is not None:
        tl.store(weights_grad + row, tl.sum(product).to(weights_grad.dtype.element_ty))


def weigh_backward(
    grad_RD: Tensor, rows_RD: Tensor, weights_R: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of rows and of their weights that are needed, from the gradient of their products.

    A weight's gradient is the product of its row and the row's gradient, summed in float32. Gradients have the dtypes
    of rows and weights.
    """
    grad_RD, rows_RD, weights_R = _aligned(grad_RD), _aligned(rows_RD), weights_R.contiguous()
    rows_grad, weights_grad = (
        torch.empty_like(of) if needed else None for of, needed in zip((rows_RD, weights_R), needs, strict=True)
    )
    if any(needs):
        with on_device_of(rows_RD):
            _weigh_backward[(len(rows_RD),)](
                grad_RD, rows_RD, weights_R, rows_grad, weights_grad, rows_RD.shape[1], _block(rows_RD.shape[1]),
                **OPTIONS,
            )  # fmt: skip
    return rows_grad, weights_grad


@triton.jit  # type: ignore[untyped-decorator]
def _transpose(  # type: ignore[no-untyped-def]
    counts, stride, source, target, ranks, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    block = tl.program_id(0)
    every = tl.arange(0, BLOCKS)
    rank, expert = every // EXPERTS, every % EXPERTS
    counted = tl.load(counts + rank * stride + expert, mask=rank < ranks, other=0)
    by_expert = expert * ranks + rank  # the number of each block in order of experts
    in_rank_order = tl.sum(tl.where(every < block, counted, 0))
    own = block % EXPERTS * ranks + block // EXPERTS
    in_expert_order = tl.sum(tl.where(by_expert < own, counted, 0))
    count = tl.sum(tl.where(every == block, counted, 0))
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        tl.store(source + in_expert_order + row, in_rank_order + row, mask=row < count)
        tl.store(target + in_rank_order + row, in_expert_order + row, mask=row < count)


def transpose(counts_ne: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Return where each row in order of experts comes from, and the inverse, if rows come ordered by rank.

    A program moves the block of one rank and expert, after it has counted the rows before it in both orders.
    """
    ranks, experts = counts_ne.shape
    source_R, target_R = (counts_ne.new_empty(rows) for _ in range(2))
    with on_device_of(counts_ne):
        _transpose[(ranks * experts,)](
            counts_ne, counts_ne.stride(0), source_R, target_R, ranks, experts,
            triton.next_power_of_2(ranks * experts), _ROWS, **OPTIONS,
        )  # fmt: skip
    return source_R, target_R


@triton.jit  # type: ignore[untyped-decorator]
def _copy(numbers, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(numbers + place, mask=place < count), mask=place < count)


def copy_to(out: Tensor, numbers: Tensor) -> None:
    """Copy a few numbers to pinned host memory, without the device's copy engine.

    That engine takes one copy after the other, so behind activations that leave they would wait for as long as those
    take. The host's memory must stay until the stream has run this.
    """
    numbers = numbers.contiguous()
    with on_device_of(numbers):
        _copy[(triton.cdiv(numbers.numel(), _ROWS),)](numbers, out, numbers.numel(), _ROWS, **OPTIONS)


def _aligned(x: Tensor) -> Tensor:
    """Return a contiguous tensor at a multiple of 16 bytes: elsewhere, threads would add up other features."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x.contiguous()


def _block(features: int) -> int:
    least: int = triton.next_power_of_2(max(1, features))
    return min(_MOST_FEATURES, least)
