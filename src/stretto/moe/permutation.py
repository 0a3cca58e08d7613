"""Tokens in the order of the experts that they go to, and back. No token is dropped.

T tokens, K experts for each token, R = T × K rows, D features, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError


class Permutation(NamedTuple):
    """The rows in order of their experts. Rows of one expert stay in the order of their tokens.

    >>> order = Permutation.by_expert(torch.tensor([[1, 0], [1, 2]]), experts=3)
    >>> order.source_R.tolist(), order.counts_E.tolist()  # row 1 goes to expert 0, rows 0 and 2 to expert 1
    ([1, 0, 2, 3], [1, 2, 1])
    """

    source_R: Tensor
    """For each row in order of experts, its place in `indices_TK.flatten()`."""
    target_R: Tensor
    """The inverse: for each of those places, the row in order of experts."""
    counts_E: Tensor
    """The number of rows of each expert."""

    @staticmethod
    def by_expert(indices_TK: Tensor, *, experts: int) -> "Permutation":
        """Sort by expert, without waiting for the device. Numbers below 0 or from `experts` on count for no expert."""
        sorted_R, source_R = indices_TK.flatten().sort(stable=True)
        target_R = torch.empty_like(source_R)
        target_R[source_R] = torch.arange(len(source_R), device=source_R.device)
        borders = torch.searchsorted(sorted_R.long(), torch.arange(experts + 1, device=source_R.device))
        return Permutation(source_R, target_R, borders.diff())

    def inverse(self) -> "Permutation":
        """Return the order that leads back, of rows for tokens with one expert each."""
        return Permutation(self.target_R, self.source_R, self.counts_E)


def validate_rows(order: Permutation, counted: int) -> None:
    """Raise PipelineError if not all rows are counted for some expert."""
    if (rows := len(order.source_R)) != counted:
        experts = len(order.counts_E)
        raise PipelineError(
            f"{rows - counted} of {rows} indices of experts are below 0 or above {experts - 1}, and there are "
            f"{experts} experts; route each token to experts that exist"
        )


def dispatch(x_TD: Tensor, order: Permutation) -> Tensor:
    """Return each token's row once for each of its experts, in order of experts."""
    return _Dispatch.apply(x_TD, order.source_R, order.target_R)  # type: ignore[no-any-return, no-untyped-call]


def combine(rows_RD: Tensor, weights_TK: Tensor, order: Permutation, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs. Sums are in float32 at least.

    The result is of this dtype, or that of the rows: under autocast, rows have fewer bits than the tokens that they
    are added to.
    """
    arguments = rows_RD, weights_TK, order.source_R, order.target_R, dtype or rows_RD.dtype
    return _Combine.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


# Autograd's own backward of an index adds rows one by one, in no fixed order on CUDA. These gather instead.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, target_R: Tensor) -> Tensor:
        ctx.save_for_backward(target_R)
        ctx.shape = len(x_TD), len(source_R) // max(1, len(x_TD)), x_TD.shape[-1]
        return x_TD.index_select(0, source_R // max(1, ctx.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        (target_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, target_R).view(ctx.shape).sum(1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, target_R: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, source_R, target_R)
        rows_TKD = rows_RD.index_select(0, target_R).view(*weights_TK.shape, rows_RD.shape[-1])
        return _weighted_sum(rows_TKD, weights_TK).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        rows_RD, weights_TK, source_R, target_R = ctx.saved_tensors
        rows_grad = weights_grad = None
        if torch.is_grad_enabled():  # with create_graph, autograd must know the operations
            rows_TKD = rows_RD.index_select(0, target_R).view(*weights_TK.shape, rows_RD.shape[-1])
            grad_TKD = (grad_TD[:, None] * weights_TK[..., None]).to(rows_RD.dtype)
            weights_grad = _exact_dots(rows_TKD, grad_TD).to(weights_TK.dtype)
            return grad_TKD.flatten(0, 1).index_select(0, source_R), weights_grad, None, None, None
        if ctx.needs_input_grad[0]:
            grad_TKD = rows_RD.new_empty(*weights_TK.shape, rows_RD.shape[-1])
            torch.mul(grad_TD[:, None], weights_TK[..., None], out=grad_TKD)  # in float32, rounded once
            rows_grad = grad_TKD.flatten(0, 1).index_select(0, source_R)
        if ctx.needs_input_grad[1]:
            rows_TKD = rows_RD.index_select(0, target_R).view(*weights_TK.shape, rows_RD.shape[-1])
            weights_grad = _dots(rows_TKD, grad_TD).to(weights_TK.dtype)
        return rows_grad, weights_grad, None, None, None


# Matrix products of halves that sum in float32 read the rows once, where elementwise kernels would write them all again
# in float32. The weights are split into two halves, whose sum has 16 bits.


def _weighted_sum(rows_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    if not _has_float32_products(rows_TKD) or weights_TK.shape[1] % 8:  # with other sizes the products are slower
        return (rows_TKD * weights_TK[..., None]).sum(1)
    high_TK = weights_TK.to(rows_TKD.dtype)
    low_TK = (weights_TK - high_TK).to(rows_TKD.dtype)
    both_T2D: Tensor = torch.bmm(torch.stack([high_TK, low_TK], 1), rows_TKD, out_dtype=torch.float32)
    return both_T2D.sum(1)


def _dots(rows_TKD: Tensor, grad_TD: Tensor) -> Tensor:
    """Return the product of each row with its token's gradient."""
    if not _has_float32_products(rows_TKD) or grad_TD.dtype != rows_TKD.dtype:
        return _exact_dots(rows_TKD, grad_TD)
    dots_TK1: Tensor = torch.bmm(rows_TKD, grad_TD[..., None], out_dtype=torch.float32)
    return dots_TK1[..., 0]


def _exact_dots(rows_TKD: Tensor, grad_TD: Tensor) -> Tensor:
    exact = torch.promote_types(grad_TD.dtype, torch.float32)
    return (rows_TKD * grad_TD[:, None].to(exact)).sum(-1)


def _has_float32_products(rows_TKD: Tensor) -> bool:
    return rows_TKD.is_cuda and rows_TKD.dtype in (torch.bfloat16, torch.float16) and len(rows_TKD) > 0
