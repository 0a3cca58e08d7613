"""Experts whose weights are stacked, so that one grouped product runs them all."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.moe.grouped_linear import grouped_linear
from stretto.moe.permutation import Permutation, combine, dispatch

Product = Callable[[Tensor, nn.Parameter, Tensor], Tensor]
"""Multiplies each group of rows by its own matrix: `grouped_linear`, or a product that defers weight gradients."""


class Experts(nn.Module):
    """Gated MLPs, one for each group of rows. Rows must be sorted by expert.

    The weights have the names and shapes of Hugging Face `transformers`: `gate_up_proj` is E × 2I × D, `down_proj` is
    E × D × I.

    >>> experts = Experts(experts=2, features=4, hidden=8)
    >>> experts(torch.ones(5, 4), torch.tensor([2, 3])).shape  # two rows for the first expert, three for the second
    torch.Size([5, 4])
    """

    def __init__(
        self, experts: int, features: int, hidden: int, *, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, features))
        self.down_proj = nn.Parameter(torch.empty(experts, features, hidden))
        self.act_fn = activation
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    @classmethod
    def of(cls, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, *, activation: Callable[[Tensor], Tensor]) -> Self:
        """Return experts that hold these very parameters."""
        experts = cls(0, 0, 0, activation=activation)  # which allocates nothing
        experts.gate_up_proj, experts.down_proj = gate_up_proj, down_proj
        return experts

    def forward(self, *arguments: Any) -> Tensor:
        return self.run(grouped_linear, *arguments)

    def run(self, product: Product, *arguments: Tensor) -> Tensor:
        """Run the experts with this grouped product, on rows and their counts by expert."""
        return self.run_sorted(product, *arguments)

    def run_sorted(self, product: Product, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        gate, up = product(x_RD, self.gate_up_proj, counts_E).chunk(2, dim=-1)
        return product(self.act_fn(gate) * up, self.down_proj, counts_E)

    def extra_repr(self) -> str:
        experts, features, hidden = self.down_proj.shape
        return f"experts={experts}, features={features}, hidden={hidden}"


class RoutedExperts(Experts):
    """Experts that take tokens in any order, each with the experts that it goes to and their weights."""

    def run(self, product: Product, *arguments: Tensor) -> Tensor:
        """Run the experts with this grouped product, on tokens, the indices of their experts, and their weights."""
        x_TD, indices_TK, weights_TK = arguments
        order = Permutation.by_expert(indices_TK, experts=len(self.down_proj))
        rows_RD = self.run_sorted(product, dispatch(x_TD, order), order.counts_E)
        return combine(rows_RD, weights_TK, order, dtype=x_TD.dtype)
