"""Weight gradients that were put off: what each needs, and how it is added, alone or with other microbatches'."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.pipeline.gradient_buffers import Sum, add_all
from stretto.pipeline.grouped_linear import grouped_outer

embedding_backward = torch.ops.aten.embedding_dense_backward
SumOf = Callable[[nn.Parameter], Sum]
"""Where a parameter's gradient is added."""
Bias = tuple[Sum, Tensor]
"""Where a bias's gradient is to be added, and the gradient."""


@dataclass(slots=True, eq=False)
class WeightGradient:
    """One that was put off, of a layer's input and its output's gradient. Called, it is added, but for a bias's that it
    returns, to be added with others.
    """

    add: Callable[..., Bias | None]
    sum_of: SumOf
    given: Tensor
    grad: Tensor
    more: tuple[Any, ...]
    versions: tuple[int, int]

    def __call__(self) -> Bias | None:
        self.demand_unchanged()
        return self.add(self.sum_of, self.given, self.grad, *self.more)

    def demand_unchanged(self) -> None:
        if (self.given._version, self.grad._version) != self.versions:  # autograd looks only until the backward
            raise PipelineError("a tensor was changed in place before the weight gradient that it is needed for")

    @property
    def key(self) -> Any:
        """Those of one layer that have the same can be added by one product; None for one that is added by itself.

        float16 is not joined: what each microbatch adds may be small enough for it, and their sum too large.
        """
        plain = type(self.given) is Tensor and type(self.grad) is Tensor and self.grad.dtype is not torch.float16
        if self.add is not add_linear or not plain:
            return None
        weight, bias, rows, *needs = self.more
        which = None if rows is None else (rows.start, rows.stop)
        return id(weight), id(bias), which, *needs, self.given.dtype, self.grad.dtype


def add_together(owed: list[list[WeightGradient]]) -> None:
    """Add what several microbatches owe, the like of it in one product. Each is dropped, with what it holds, once it is
    added.
    """
    alike = _alike(owed)
    owed.clear()
    biases: dict[Sum, Tensor] = {}
    while alike:
        them = alike.pop()
        one = them[0] if len(them) == 1 else _joined(them)
        del them
        bias = one()
        del one
        if bias is None:
            continue
        if bias[0] in biases:  # of a layer that was used twice
            add_all(biases.items())
            biases.clear()
        biases[bias[0]] = bias[1]
    add_all(biases.items())


def _alike(owed: list[list[WeightGradient]]) -> list[list[WeightGradient]]:
    """Those that can be added by one product, the first ones last."""
    found: dict[Any, list[WeightGradient]] = {}
    for it in chain(*owed):
        found.setdefault((it.key if len(owed) > 1 else None) or id(it), []).append(it)
    return list(found.values())[::-1]


def _joined(them: list[WeightGradient]) -> WeightGradient:
    """One weight gradient of the rows of several."""
    for it in them:
        it.demand_unchanged()
    given, grad = torch.cat([flattened(it.given) for it in them]), torch.cat([flattened(it.grad) for it in them])
    first = them[0]
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
    of_bias = flat.sum(0, dtype=into.dtype)
    if rows is None:
        return into, of_bias
    into.add(of_bias, rows)
    return None


def flattened(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def add_grouped(sum_of: SumOf, x: Tensor, grad: Tensor, weight: nn.Parameter, counts: Tensor) -> None:
    sum_of(weight).add(grouped_outer(grad, x, counts))


def add_embedding(sum_of: SumOf, rows: Tensor, grad: Tensor, weight: nn.Parameter, padding: int) -> None:
    # autograd's own: the same bits every time, which index_add_ on CUDA does not give
    sum_of(weight).add(embedding_backward(grad, rows, weight.shape[0], padding, False))
