"""A linear layer with one weight matrix per group of rows, for the experts of a mixture."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """Multiplies each group of rows by its own matrix. Rows must be sorted by group, and counts add up to the rows.

    On CUDA nobody checks that they do, since the host would have to wait for it.

    >>> layer = GroupedLinear(groups=2, in_features=4, out_features=3)
    >>> layer(torch.ones(5, 4), torch.tensor([2, 3])).shape  # two rows for the first group, three for the second
    torch.Size([5, 3])
    """

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features).uniform_(-bound, bound))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, counts)

    def extra_repr(self) -> str:
        groups, out_features, in_features = self.weight.shape
        return f"groups={groups}, in_features={in_features}, out_features={out_features}"


def grouped_linear(x_TD: Tensor, weight_GED: Tensor, counts_G: Tensor) -> Tensor:
    """Multiply each group's rows by the transpose of its matrix, as nn.Linear does."""
    if torch.is_autocast_enabled(x_TD.device.type):
        x_TD, weight_GED = autocast(x_TD), autocast(weight_GED)
    if _has_kernel(x_TD, weight_GED):
        return _Product.apply(x_TD, weight_GED, counts_G)  # type: ignore[no-any-return, no-untyped-call]
    parts = zip(torch.split(x_TD, counts_G.tolist()), weight_GED, strict=True)
    return torch.cat([rows @ weight.T for rows, weight in parts])


class _Product(torch.autograd.Function):
    """One kernel for all groups. Its own backward in PyTorch refuses gradients that are not laid out row by row."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_GED: Tensor, counts_G: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_GED, counts_G)
        return _grouped_mm(x_TD.contiguous(), weight_GED.transpose(1, 2), offs=_ends(counts_G))

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> Any:
        x_TD, weight_GED, counts_G = ctx.saved_tensors
        x_needs, weight_needs, _ = ctx.needs_input_grad
        x_grad = grouped_linear(grad_TE, weight_GED.transpose(1, 2), counts_G) if x_needs else None
        return x_grad, grouped_outer(grad_TE, x_TD, counts_G) if weight_needs else None, None


def grouped_outer(grad_TE: Tensor, x_TD: Tensor, counts_G: Tensor) -> Tensor:
    """Return the gradient of the matrices: for each group, the sum of its rows' outer products."""
    if _has_kernel(x_TD, grad_TE):
        return _Outer.apply(grad_TE, x_TD, counts_G)  # type: ignore[no-any-return, no-untyped-call]
    counts = counts_G.tolist()
    parts = zip(torch.split(grad_TE, counts), torch.split(x_TD, counts), strict=True)
    return torch.stack([grad.T @ x for grad, x in parts])


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad_TE: Tensor, x_TD: Tensor, counts_G: Tensor) -> Tensor:
        ctx.save_for_backward(grad_TE, x_TD, counts_G)
        return _grouped_mm(grad_TE.contiguous().T, x_TD.contiguous(), offs=_ends(counts_G))

    @staticmethod
    def backward(ctx: Any, grad_GED: Tensor) -> Any:
        grad_TE, x_TD, counts_G = ctx.saved_tensors
        grad_GED = grad_GED.contiguous()  # the kernel refuses those of a sum
        first = grouped_linear(x_TD, grad_GED, counts_G)
        return first, grouped_linear(grad_TE, grad_GED.transpose(1, 2), counts_G), None


def _has_kernel(x: Tensor, other: Tensor) -> bool:
    """Return whether PyTorch has one kernel for this product; it needs features that are a multiple of 16 bytes."""
    features = (x.shape[-1], other.shape[-1], *other.shape[1:-1])
    aligned = all(size * x.element_size() % 16 == 0 for size in features)
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # which is its name before PyTorch 2.10


def autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as PyTorch's autocast does: float64 stays."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)
