"""Tokens in the order of the experts that they go to, and back. No token is dropped.

T tokens, K experts for each token, R = T × K rows, D features, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.moe.kernels import has_kernels


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
        borders = torch.searchsorted(sorted_R.long(), torch.arange(experts + 1, device=source_R.device))
        return Permutation(source_R, inverted(source_R), borders.diff())

    def sort(self, values_TK: Tensor) -> Tensor:
        """Return the values that tokens have for each of their experts, in order of experts."""
        return values_TK.flatten().index_select(0, self.source_R)

    def inverse(self) -> "Permutation":
        """Return the order that leads back, of rows for tokens with one expert each."""
        return Permutation(self.target_R, self.source_R, self.counts_E)


def inverted(source_R: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    every_R = torch.arange(len(source_R), device=source_R.device)
    return torch.empty_like(source_R).scatter_(0, source_R, every_R)


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


def tokens_of(source_R: Tensor, *, tokens: int) -> Tensor:
    """Return for each row in order of experts its token."""
    chosen = len(source_R) // max(1, tokens)
    return source_R if chosen == 1 else source_R // max(1, chosen)


def combine(rows_RD: Tensor, order: Permutation, *, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return for each token the sum of its experts' outputs, in float32 at least, and rounded once.

    The result is of this dtype, or that of the rows: under autocast, rows have fewer bits than the tokens that they
    are added to.
    """
    arguments = rows_RD, order.source_R, order.target_R, tokens, dtype or rows_RD.dtype
    return _Combine.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


# Each is the backward of the other. Autograd's own would add rows one by one, in no fixed order on CUDA.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, target_R: Tensor) -> Tensor:
        ctx.save_for_backward(source_R, target_R)
        ctx.tokens = len(x_TD)
        return x_TD.index_select(0, tokens_of(source_R, tokens=ctx.tokens))

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return _Combine.apply(grad_RD, *ctx.saved_tensors, ctx.tokens, grad_RD.dtype), None, None  # type: ignore[no-untyped-call]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, source_R: Tensor, target_R: Tensor, tokens: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(source_R, target_R)
        ctx.dtype = rows_RD.dtype
        chosen = len(target_R) // max(1, tokens)
        if chosen == 1:
            return rows_RD.index_select(0, target_R).to(dtype)
        if has_kernels(rows_RD, dtype=dtype):
            from stretto.moe.row_kernels import gather_sum

            return gather_sum(rows_RD, target_R, tokens=tokens, dtype=dtype)
        rows_TKD = rows_RD.index_select(0, target_R).view(tokens, chosen, rows_RD.shape[1])
        return rows_TKD.sum(1, dtype=torch.promote_types(rows_RD.dtype, torch.float32)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        rows_grad = _Dispatch.apply(grad_TD.to(ctx.dtype), *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return rows_grad, None, None, None, None
