"""Autograd functions of layers whose weight gradients may be deferred."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.moe.grouped_linear import grouped_linear, grouped_outer
from stretto.pipeline.segments import direct
from stretto.pipeline.weight_gradients import add_embedding, add_grouped, add_linear, embedding_backward, flattened


class Defers(Protocol):
    """Decides whether the current backward defers weight gradients, and takes those that it does."""

    @property
    def defers(self) -> bool: ...

    def defer(self, add: Callable[..., None], given: Tensor, grad: Tensor, more: tuple[Any, ...]) -> None: ...


# These functions detach their outputs: autograd forbids in-place changes to views made inside a custom function.
# Deferred gradients hold detached inputs, since a saved input would keep its graph alive.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # noqa: ARG004
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: tuple[Defers, nn.Parameter, nn.Parameter | None, slice | None],
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        ctx.target = target
        return F.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, x_needs, weight_needs, bias_needs, _ = ctx.needs_input_grad
        x_grad = grad @ weight if x_needs else None
        deferral, *target = ctx.target
        if deferral.defers:
            needs = weight_needs, bias_needs
            deferral.defer(add_linear, grad if x is None else x.detach(), grad, (*target, *needs))
            return None, x_grad, None, None, None
        flat = flattened(grad)
        weight_grad = flat.T @ flattened(x) if weight_needs else None
        return None, x_grad, weight_grad, flat.sum(0) if bias_needs else None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # noqa: ARG004
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        deferral: Defers,
        parameter: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.deferral, ctx.parameter = deferral, parameter
        return grouped_linear(x, weight, counts).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, counts = ctx.saved_tensors
        _, x_needs, weight_needs, *_ = ctx.needs_input_grad
        x_grad = grouped_linear(grad, weight.transpose(1, 2), counts) if x_needs else None
        if ctx.deferral.defers:
            ctx.deferral.defer(add_grouped, x.detach(), grad, (ctx.parameter, counts))
            return None, x_grad, None, None, None, None
        return None, x_grad, grouped_outer(grad, x, counts) if weight_needs else None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # noqa: ARG004
        rows: Tensor,
        weight: nn.Parameter,
        padding: int,
        deferral: Defers,
    ) -> Tensor:
        ctx.save_for_backward(rows)  # so that autograd notices in-place changes
        ctx.weight, ctx.padding, ctx.deferral = weight, padding, deferral
        return F.embedding(rows, weight).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        if ctx.deferral.defers:
            ctx.deferral.defer(add_embedding, rows, grad, (ctx.weight, ctx.padding))
            return None, None, None, None, None
        return None, None, embedding_backward(grad, rows, ctx.weight.shape[0], ctx.padding, False), None, None


deferred_linear: Callable[..., Tensor] = direct(_Linear)
deferred_grouped: Callable[..., Tensor] = direct(_Grouped)
deferred_embedding: Callable[..., Tensor] = direct(_Embedding)
