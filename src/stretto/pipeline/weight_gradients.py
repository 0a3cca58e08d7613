"""Deferred weight gradients: what each needs, and how it is added, alone or with those of other microbatches."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.moe.grouped_linear import grouped_outer
from stretto.pipeline.gradient_buffers import Sum, add_all

embedding_backward = torch.ops.aten.embedding_dense_backward
SumOf = Callable[[nn.Parameter], Sum]
"""Returns the sum to which a parameter's gradient is added."""
Bias = tuple[Sum, Tensor]
"""A bias's gradient, and the sum to which it must still be added."""


@dataclass(slots=True, eq=False)
class WeightGradient:
    """A deferred weight gradient. Calling it computes and adds it.

    The call returns the bias's gradient instead of adding it, so that the caller can add many with one kernel.
    """

    add: Callable[..., Bias | None]
    sum_of: SumOf
    given: Tensor
    """The layer's input."""
    grad: Tensor
    """The gradient of the layer's output."""
    more: tuple[Any, ...]
    """Further arguments of `add`."""
    versions: tuple[int, int]
    """The versions of `given` and `grad` when the gradient was deferred."""

    def __call__(self) -> Bias | None:
        self.validate_unchanged()
        return self.add(self.sum_of, self.given, self.grad, *self.more)

    def validate_unchanged(self) -> None:
        if (self.given._version, self.grad._version) != self.versions:  # autograd checks only until the backward
            raise PipelineError("a tensor was changed in place before the weight gradient that it is needed for")

    @property
    def key(self) -> Any:
        """Weight gradients with equal keys can be added with one matrix product; None if this one cannot be joined.

        float16 is not joined: each microbatch's gradient may fit its range while their sum overflows.
        """
        plain = type(self.given) is Tensor and type(self.grad) is Tensor and self.grad.dtype is not torch.float16
        if self.add is not add_linear or not plain:
            return None
        weight, bias, rows, *needs = self.more
        which = None if rows is None else (rows.start, rows.stop)
        return id(weight), id(bias), which, *needs, self.given.dtype, self.grad.dtype


def add_together(deferred: list[list[WeightGradient]]) -> None:
    """Add the deferred weight gradients of several microbatches, joining those with equal keys in one product.

    Each one is freed, with its tensors, as soon as it is added.
    """
    alike = _alike(deferred)
    deferred.clear()
    biases: dict[Sum, Tensor] = {}
    while alike:
        group = alike.pop()
        gradient = group[0] if len(group) == 1 else _joined(group)
        del group
        bias = gradient()
        del gradient
        if bias is None:
            continue
        if bias[0] in biases:  # the layer ran twice
            add_all(biases.items())
            biases.clear()
        biases[bias[0]] = bias[1]
    add_all(biases.items())


def _alike(deferred: list[list[WeightGradient]]) -> list[list[WeightGradient]]:
    """Group weight gradients that one product can add. Return the groups in reverse order, for `pop`."""
    groups: dict[Any, list[WeightGradient]] = {}
    for gradient in chain(*deferred):
        groups.setdefault((gradient.key if len(deferred) > 1 else None) or id(gradient), []).append(gradient)
    return list(groups.values())[::-1]


def _joined(group: list[WeightGradient]) -> WeightGradient:
    """Concatenate the rows of several weight gradients into one."""
    for one in group:
        one.validate_unchanged()
    given, grad = torch.cat([flattened(one.given) for one in group]), torch.cat([flattened(one.grad) for one in group])
    first = group[0]
    return WeightGradient(first.add, first.sum_of, given, grad, first.more, (given._version, grad._version))


def add_linear(
    sum_of: SumOf,
    x: Tensor,
    grad: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    rows: slice | None,
    weight_needs: bool,
    bias_needs: bool,
) -> Bias | None:
    flat = flattened(grad)
    if weight_needs:
        sum_of(weight).add_product(flat.T, flattened(x), rows)
    if bias is None or not bias_needs:
        return None
    into = sum_of(bias)
    bias_grad = flat.sum(0, dtype=into.dtype)
    if rows is None:
        return into, bias_grad
    into.add(bias_grad, rows)
    return None


def flattened(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def add_grouped(sum_of: SumOf, x: Tensor, grad: Tensor, weight: nn.Parameter, counts: Tensor) -> None:
    sum_of(weight).add(grouped_outer(grad, x, counts))


def add_embedding(sum_of: SumOf, rows: Tensor, grad: Tensor, weight: nn.Parameter, padding: int) -> None:
    # autograd's own kernel: deterministic, unlike index_add_ on CUDA
    sum_of(weight).add(embedding_backward(grad, rows, weight.shape[0], padding, False))
