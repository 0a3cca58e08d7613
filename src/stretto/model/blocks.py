"""Transformer blocks in phases: attention and MLP, or attention, dispatch, experts and combine.

N sequences, T tokens of each, D features, E experts, K experts for each token, R = N × T × K rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.layers import DENSE, MOE, Phase
from stretto.model.attention import MultiheadLatentAttention
from stretto.model.config import ModelConfig
from stretto.moe.experts import Experts
from stretto.moe.permutation import Permutation, combine, dispatch
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
    indices_TK: Tensor
    weights_TK: Tensor


class Sorted(NamedTuple):
    """The state between dispatch and combine: rows in order of their experts."""

    rest: Activations
    h_NTD: Tensor | None
    """What the shared experts compute on; None once they have."""
    rows_RD: Tensor
    weights_TK: Tensor
    order: Permutation


class MoeBlock(Block):
    """A block with experts in place of the MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mlp = Moe(config)

    def phases(self) -> Sequence[tuple[Phase, Callable[[Any], Any]]]:
        return list(zip(MOE.phases, (self._attention, self._dispatch, self._experts, self._combine), strict=True))

    def _attention(self, value: Activations) -> Routed:
        x_NTD, h_NTD = self.attend(value.x_NTD)
        routing = self.mlp.gate(h_NTD.flatten(0, 1))
        balance = value.balance
        if balance is not None:
            balance = balance + self.mlp.gate.balance_loss(routing, sequences=len(h_NTD))
        rest = value._replace(x_NTD=x_NTD, balance=balance)
        return Routed(rest, h_NTD, routing.indices_TK, routing.weights_TK)

    def _dispatch(self, routed: Routed) -> Sorted:
        order = Permutation.by_expert(routed.indices_TK, experts=len(self.mlp.experts.down_proj))
        self.mlp.gate.count(order.counts_E)
        rows_RD = dispatch(routed.h_NTD.flatten(0, 1), order)
        return Sorted(routed.rest, routed.h_NTD, rows_RD, routed.weights_TK, order)

    def _experts(self, value: Sorted) -> Sorted:
        rest, shared = value.rest, self.mlp.shared_experts
        if shared is not None:
            rest = rest._replace(x_NTD=rest.x_NTD + shared(value.h_NTD))
        return value._replace(rest=rest, h_NTD=None, rows_RD=self.mlp.experts(value.rows_RD, value.order.counts_E))

    def _combine(self, value: Sorted) -> Activations:
        x_NTD = value.rest.x_NTD
        out_TD = combine(value.rows_RD, value.weights_TK, value.order, dtype=x_NTD.dtype)
        return value.rest._replace(x_NTD=x_NTD + out_TD.view_as(x_NTD))
