"""Experts whose weights are stacked, so that one grouped product runs them all."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.moe.exchange import (
    Counted,
    Dispatched,
    Exchange,
    Local,
    validate_combined,
    validate_counted,
    validate_dispatched,
    validate_routing,
)
from stretto.moe.expert_ranks import ExpertRanks
from stretto.moe.grouped_linear import grouped_linear
from stretto.moe.hooks import has_hooks
from stretto.moe.weighting import exact, weigh

Product = Callable[[Tensor, nn.Parameter, Tensor], Tensor]
"""Multiplies each group of rows by its own matrix: `grouped_linear`, or a product that defers weight gradients."""


class SwiGlu(nn.Module):
    """Multiplies one half of an MLP's features by an activation function of the other, and rows by their weights.

    It is a module so that memory policies can name it: its output is large, and cheap to compute again.
    """

    def forward(
        self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, weights_R: Tensor | None = None
    ) -> Tensor:
        out = activation(gate) * up
        return out if weights_R is None else weigh(out, weights_R)


class Experts(nn.Module):
    """Gated MLPs, one for each group of rows. Rows must be sorted by expert.

    With a weight for each row, in float32 at least, outputs are multiplied by it: the inputs of the last product are,
    which gives the same but for rounding.

    The weights have the names and shapes of Hugging Face `transformers`: `gate_up_proj` is E × 2I × D, `down_proj` is
    E × D × I.

    >>> experts = Experts(experts=2, features=4, hidden=8)
    >>> experts(torch.ones(5, 4), torch.tensor([2, 3])).shape  # two rows for the first expert, three for the second
    torch.Size([5, 4])

    On a mesh with "ep", a `Pipeline` leaves each rank its share of the experts (`shard`), and sets `exchange` while a
    step runs.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    rank = 0
    """Which share of the experts this is."""
    ranks = 1
    """How many ranks hold a share."""
    exchange: Exchange | None = None
    """How rows get to the ranks that hold their experts."""
    members: ExpertRanks | None = None
    """The ranks of this exchange."""
    number = 0
    """Which experts of the model these are. Copies and pickles have neither this number, nor members and exchange."""

    def __init__(
        self, experts: int, features: int, hidden: int, *, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, features))
        self.down_proj = nn.Parameter(torch.empty(experts, features, hidden))
        self.act_fn, self.swiglu = activation, SwiGlu()
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    @classmethod
    def of(cls, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, *, activation: Callable[[Tensor], Tensor]) -> Self:
        """Return experts that hold these very parameters."""
        experts = cls(0, 0, 0, activation=activation)  # which allocates nothing
        experts.gate_up_proj, experts.down_proj = gate_up_proj, down_proj
        return experts

    @property
    def total(self) -> int:
        """The number of experts on all ranks."""
        return len(self.down_proj) * self.ranks

    @property
    def first(self) -> int:
        """The number of the first expert that is here, among all."""
        return len(self.down_proj) * self.rank

    def shard(self, rank: int, ranks: int) -> None:
        """Keep only this rank's experts: the given one of so many equal shares, in order.

        The parameters become new ones. On the host they share memory with the old ones, whose memory is only free once
        these have moved; elsewhere they are copies.
        """
        if (self.rank, self.ranks) == (rank, ranks):
            return
        validate_shares(self, rank, ranks)
        each = len(self.down_proj) // ranks
        for name, whole in list(self._parameters.items()):
            assert whole is not None
            part = slice(rank * each, (rank + 1) * each)
            share = whole.data[part] if whole.is_cpu else whole.data[part].clone()
            own = nn.Parameter(share, requires_grad=whole.requires_grad)
            own.grad = None if whole.grad is None else whole.grad[part]
            self._parameters[name] = own
        self.rank, self.ranks = rank, ranks

    def exchanging(self) -> Exchange:
        """Return the exchange with which to run. Raise PipelineError if other ranks hold experts and there is none."""
        if self.exchange is not None:
            if self.members is not None:
                self.members.current = self.number
            return self.exchange
        if self.ranks > 1:
            last = self.first + len(self.down_proj) - 1
            raise PipelineError(
                f"this module holds experts {self.first} to {last} of {self.total}; run it in the Pipeline that has "
                "sharded it"
            )
        return _LOCAL

    # The exchange's phases, in this order.

    def count(self, indices_TK: Tensor) -> Counted:
        exchange = self.exchanging()
        counted = exchange.count(indices_TK, self.total)
        validate_counted(exchange, counted, experts=self.total)
        return counted

    def sizes(self, counted: Counted) -> Any:
        return self.exchanging().sizes(counted)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, sized: Any) -> Dispatched:
        exchange, x_TD = self.exchanging(), self._joined(x_TD)
        rows = exchange.dispatch(x_TD, weights_TK, sized)
        validate_dispatched(exchange, rows, x_TD, weights_TK, experts=len(self.down_proj))
        # Memory policies store tensors of 16 bits in float8, and should not find weights among them.
        return rows._replace(weights_R=exact(rows.weights_R))

    def combine(self, rows_RD: Tensor, state: Any, *, tokens: int, dtype: torch.dtype) -> Tensor:
        """Combine, and note the output, so that its backward runs even if the layer does not use it."""
        exchange, rows_RD = self.exchanging(), self._joined(rows_RD)
        out_TD = exchange.combine(rows_RD, state, tokens=tokens, dtype=dtype)
        validate_combined(exchange, out_TD, rows_RD, shape=(tokens, self.down_proj.shape[1]), dtype=dtype)
        if self.members is not None:
            self.members.note(out_TD)
        return out_TD

    def _joined(self, x: Tensor) -> Tensor:
        """Return what is exchanged so that all ranks exchange its gradient too."""
        return x if self.members is None else self.members.joining(x)

    def weighed(self, x_RD: Tensor, counts_E: Tensor, weights_R: Tensor) -> Tensor:
        """Run the experts as a module, and multiply their outputs by the weights of rows.

        If the module is more than a product of what is weighed, its outputs are weighed themselves, and saved for that.
        """
        cls = type(self)
        changed = (cls.forward, cls.run, cls.run_sorted) != (Experts.forward, Experts.run, Experts.run_sorted)
        if changed or has_hooks(self):
            return weigh(self(x_RD, counts_E), weights_R)
        return cast("Tensor", self(x_RD, counts_E, weights_R))

    def forward(self, *arguments: Any) -> Tensor:
        return self.run(grouped_linear, *arguments)

    def run(self, product: Product, *arguments: Tensor) -> Tensor:
        """Run the experts with this grouped product, on rows, their counts by expert, and their weights, if any."""
        return self.run_sorted(product, *arguments)

    def run_sorted(self, product: Product, x_RD: Tensor, counts_E: Tensor, weights_R: Tensor | None = None) -> Tensor:
        self.exchanging()  # raises if these are not all experts
        if len(counts_E) != len(self.down_proj):
            raise PipelineError(f"{len(self.down_proj)} experts need as many counts of rows (got {len(counts_E)})")
        gate, up = product(x_RD, self.gate_up_proj, counts_E).chunk(2, dim=-1)
        # What goes into the last product is weighed, so nobody needs to save what comes out of it.
        return product(self.swiglu(self.act_fn, gate, up, weights_R), self.down_proj, counts_E)

    def extra_repr(self) -> str:
        experts, features, hidden = self.down_proj.shape
        shared = f" of {self.total}" if self.ranks > 1 else ""
        return f"experts={experts}{shared}, features={features}, hidden={hidden}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _CONNECTION}


class RoutedExperts(Experts):
    """Experts that take tokens in any order, each with the experts that it goes to and their weights."""

    def run(self, product: Product, *arguments: Tensor) -> Tensor:
        """Run the experts with this grouped product, on tokens, the indices of their experts, and their weights."""
        x_TD, indices_TK, weights_TK = arguments
        validate_routing(x_TD, indices_TK, weights_TK)
        sized = self.sizes(self.count(indices_TK))
        rows_RD, weights_R, counts_e, state = self.dispatch(x_TD, weights_TK, sized)
        if type(self).run_sorted is Experts.run_sorted:
            rows_RD = self.run_sorted(product, rows_RD, counts_e, weights_R)
        else:  # as in `weighed`
            rows_RD = weigh(self.run_sorted(product, rows_RD, counts_e), weights_R)
        return self.combine(rows_RD, state, tokens=len(x_TD), dtype=x_TD.dtype)


_LOCAL = Local()
_CONNECTION = ("exchange", "members", "number")  # which a Pipeline sets while it runs


def validate_shares(experts: Experts, rank: int, ranks: int) -> None:
    """Raise PipelineError if experts cannot be divided into these shares."""
    total = len(experts.down_proj)
    if experts.ranks > 1:
        raise PipelineError(
            f"these experts are share {experts.rank} of {experts.ranks} already, and cannot become share {rank} of "
            f"{ranks}; start from a whole model"
        )
    assert 0 <= rank < ranks
    if total % ranks:
        raise PipelineError(f"{total} experts cannot be divided among {ranks} ranks; use a divisor of {total}")
    if experts._parameters.keys() != {"gate_up_proj", "down_proj"} or "parametrizations" in experts._modules:
        raise PipelineError("experts with parametrizations or parameters of other names cannot be divided among ranks")
    for name, parameter in experts._parameters.items():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            raise PipelineError(
                f"{name} of these experts is a {type(parameter).__name__}, which cannot be divided among ranks; make "
                "it a plain nn.Parameter"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise PipelineError(
                f"{name} of these experts has hooks, which would not run on a rank's share of it; remove them"
            )


def experts_of(module: nn.Module) -> list[Experts]:
    """Return all experts in a module."""
    return [experts for experts in module.modules() if isinstance(experts, Experts)]


def sharded_experts(module: nn.Module) -> list[Experts]:
    """Return the experts in a module of which other ranks hold others."""
    return [experts for experts in experts_of(module) if experts.ranks > 1]
