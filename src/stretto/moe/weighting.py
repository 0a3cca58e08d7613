"""Rows times the weights that routers have given them.

R rows, I features.
"""

from typing import Any

import torch
from torch import Tensor

from stretto.moe.kernels import has_kernels


def weigh(rows_RI: Tensor, weights_R: Tensor) -> Tensor:
    """Return each row times its weight, in the rows' dtype.

    With weights in float32, products are in float32 at least, and rounded once.

    >>> weigh(torch.ones(2, 3), torch.tensor([2.0, 0.5]))
    tensor([[2.0000, 2.0000, 2.0000],
            [0.5000, 0.5000, 0.5000]])
    """
    return _Weigh.apply(rows_RI, weights_R)  # type: ignore[no-any-return, no-untyped-call]


class _Weigh(torch.autograd.Function):
    """Autograd's own product would be a tensor in float32 for rows of 16 bits, in the backward too."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weights_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RI, weights_R)
        return torch.mul(rows_RI, weights_R[:, None], out=torch.empty_like(rows_RI))

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> Any:
        rows_RI, weights_R = ctx.saved_tensors
        rows_need, weights_need = ctx.needs_input_grad
        # With create_graph, gradients are enabled here, and autograd must know what runs, so no kernel of ours does.
        if has_kernels(grad_RI, rows_RI, weights_R) and not torch.is_grad_enabled():
            from stretto.moe.row_kernels import weigh_backward

            return weigh_backward(grad_RI, rows_RI, weights_R, needs=(rows_need, weights_need))
        rows_grad = weigh(grad_RI, weights_R) if rows_need else None
        products_RI = exact(grad_RI) * exact(rows_RI) if weights_need else None
        return rows_grad, None if products_RI is None else products_RI.sum(-1).to(weights_R.dtype)


def exact(x: Tensor) -> Tensor:
    """Return the same numbers in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
