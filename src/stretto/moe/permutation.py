"""Tokens in the order of the experts that they go to, and back. No token is dropped.

T tokens, K experts for each token, R = T × K rows, D features, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        """Sort by expert, without waiting for the device."""
        sorted_R, source_R = indices_TK.flatten().sort(stable=True)
        target_R = torch.empty_like(source_R)
        target_R[source_R] = torch.arange(len(source_R), device=source_R.device)
        every = torch.arange(experts, device=source_R.device, dtype=sorted_R.dtype)
        ends_E = torch.searchsorted(sorted_R, every, right=True)
        return Permutation(source_R, target_R, ends_E.diff(prepend=ends_E.new_zeros(1)))


def dispatch(x_TD: Tensor, order: Permutation) -> Tensor:
    """Return each token's row once for each of its experts, in order of experts."""
    return _Dispatch.apply(x_TD, order.source_R, order.target_R)  # type: ignore[no-any-return, no-untyped-call]


def combine(rows_RD: Tensor, weights_TK: Tensor, order: Permutation, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return for each token the sum of its experts' outputs, weighted. Sums are in float32 at least.

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
        total_TD = rows_TKD.new_zeros(rows_TKD[:, 0].shape, dtype=_exact(rows_RD.dtype))
        for rows_TD, weights_T in zip(rows_TKD.unbind(1), weights_TK.unbind(1), strict=True):
            total_TD.addcmul_(rows_TD, weights_T[:, None].to(total_TD.dtype))
        return total_TD.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        rows_RD, weights_TK, source_R, target_R = ctx.saved_tensors
        exact = _exact(grad_TD.dtype)
        rows_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            grad_TKD = torch.stack(
                [(grad_TD * weights_T[:, None].to(exact)).to(rows_RD.dtype) for weights_T in weights_TK.unbind(1)], 1
            )
            rows_grad = grad_TKD.flatten(0, 1).index_select(0, source_R)
        if ctx.needs_input_grad[1]:
            rows_TKD = rows_RD.index_select(0, target_R).view(*weights_TK.shape, rows_RD.shape[-1])
            columns = [(rows_TD * grad_TD.to(exact)).sum(-1) for rows_TD in rows_TKD.unbind(1)]
            weights_grad = torch.stack(columns, 1).to(weights_TK.dtype)
        return rows_grad, weights_grad, None, None, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
