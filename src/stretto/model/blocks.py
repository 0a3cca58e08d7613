"""Transformer blocks in phases: attention and MLP, or attention, dispatch, experts and combine.

N sequences, T tokens of each, D features, E experts, K experts for each token, R = N × T × K rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.layers import DENSE, EXPERT_PARALLEL_MOE, MOE, Phase
from stretto.model.attention import MultiheadLatentAttention
from stretto.model.config import ModelConfig
from stretto.moe.exchange import Dispatched
from stretto.moe.experts import Experts
from stretto.moe.router import Router


class Activations(NamedTuple):
    """What blocks hand on to each other."""

    x_NTD: Tensor
    tokens_NT: Tensor | None = None
    """The input tokens, if an MTP module needs them."""
    balance: Tensor | None = None
    """The sum of the auxiliary losses of all routers so far, if they are wanted."""


class Mlp(nn.Module):
    """A gated MLP (SwiGLU)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Moe(nn.Module):
    """The router, the routed experts, and the shared experts that every token goes through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(
            width,
            config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.experts = Experts(config.n_routed_experts, width, hidden)
        self.shared_experts = Mlp(width, hidden * config.n_shared_experts) if config.n_shared_experts else None


class Block(nn.Module, ABC):
    """Attention and an MLP, each with a norm before it and the input added to its output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = MultiheadLatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attend(self, x_NTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of attention, and what the MLP computes on."""
        x_NTD = x_NTD + self.self_attn(self.input_layernorm(x_NTD))
        return x_NTD, self.post_attention_layernorm(x_NTD)

    @abstractmethod
    def phases(self) -> Sequence[tuple[Phase, Callable[[Any], Any]]]:
        """Return the block's phases, in order, with the functions that run them."""

    def forward(self, value: Any) -> Any:
        for _, run in self.phases():
            value = run(value)
        return value


class DenseBlock(Block):
    """A block with an ordinary MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def phases(self) -> Sequence[tuple[Phase, Callable[[Any], Any]]]:
        return list(zip(DENSE.phases, (self._attention, self._mlp), strict=True))

    def _attention(self, value: Activations) -> tuple[Tensor, Activations]:
        x_NTD, h_NTD = self.attend(value.x_NTD)
        return h_NTD, value._replace(x_NTD=x_NTD)

    def _mlp(self, given: tuple[Tensor, Activations]) -> Activations:
        h_NTD, value = given
        return value._replace(x_NTD=value.x_NTD + self.mlp(h_NTD))


class Routed(NamedTuple):
    """The state between attention and dispatch."""

    rest: Activations
    h_NTD: Tensor
    weights_TK: Tensor
    sent: Any
    """Where tokens go: the indices of their experts, and then what the exchange has made of them."""


class Sorted(NamedTuple):
    """The state between dispatch and combine: rows in order of their experts."""

    rest: Activations
    h_NTD: Tensor | None
    """What the shared experts compute on; None once they have."""
    weights_TK: Tensor
    rows: Dispatched


class MoeBlock(Block):
    """A block with experts in place of the MLP, on this rank or divided among several."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mlp = Moe(config)

    def phases(self) -> Sequence[tuple[Phase, Callable[[Any], Any]]]:
        if self.mlp.experts.ranks > 1:
            before = self._attention, self._count, self._sizes, self._dispatch
            return list(zip(EXPERT_PARALLEL_MOE.phases, (*before, self._experts, self._combine), strict=True))
        return list(zip(MOE.phases, (self._attention, self._sort, self._experts, self._combine), strict=True))

    def _attention(self, value: Activations) -> Routed:
        x_NTD, h_NTD = self.attend(value.x_NTD)
        routing = self.mlp.gate(h_NTD.flatten(0, 1))
        balance = value.balance
        if balance is not None:
            balance = balance + self.mlp.gate.balance_loss(routing, sequences=len(h_NTD))
        rest = value._replace(x_NTD=x_NTD, balance=balance)
        return Routed(rest, h_NTD, routing.weights_TK, routing.indices_TK)

    # These two pass on the very tensors that they get, since they have no backward.

    def _count(self, routed: Routed) -> Routed:
        experts = self.mlp.experts
        counted = experts.exchanging().count(routed.sent, experts.total)
        self.mlp.gate.count(counted.counts_E)
        return routed._replace(sent=counted)

    def _sizes(self, routed: Routed) -> Routed:
        return routed._replace(sent=self.mlp.experts.exchanging().sizes(routed.sent))

    def _dispatch(self, routed: Routed) -> Sorted:
        rest, h_NTD, weights_TK, sized = routed
        rows = self.mlp.experts.exchanging().dispatch(h_NTD.flatten(0, 1), weights_TK, sized)
        return Sorted(rest, h_NTD, weights_TK, rows)

    def _sort(self, routed: Routed) -> Sorted:
        """Dispatch to experts that are all here."""
        return self._dispatch(self._sizes(self._count(routed)))

    def _experts(self, value: Sorted) -> Sorted:
        rest, shared = value.rest, self.mlp.shared_experts
        if shared is not None:
            rest = rest._replace(x_NTD=rest.x_NTD + shared(value.h_NTD))
        rows = value.rows._replace(rows_RD=self.mlp.experts(value.rows.rows_RD, value.rows.counts_e))
        return value._replace(rest=rest, h_NTD=None, rows=rows)

    def _combine(self, value: Sorted) -> Activations:
        (rows_RD, _, state), x_NTD = value.rows, value.rest.x_NTD
        out_TD = self.mlp.experts.exchanging().combine(rows_RD, state, value.weights_TK, dtype=x_NTD.dtype)
        return value.rest._replace(x_NTD=x_NTD + out_TD.view_as(x_NTD))
