"""Transformer blocks in phases: attention and MLP, or attention, dispatch, experts and combine.

N sequences, T tokens of each, D features, E experts. What goes to experts is flat: T tokens of all sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.layers import DENSE, MOE, Phase
from stretto.model.attention import MultiheadLatentAttention
from stretto.model.config import ModelConfig
from stretto.moe.expert_phases import Routed, expert_phases
from stretto.moe.experts import Experts, SwiGlu
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
        self.swiglu = SwiGlu()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.swiglu(F.silu, self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


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

    layer_name: str
    """What planning calls such a layer."""

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

    layer_name = DENSE.name

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


class MoeBlock(Block):
    """A block with experts in place of the MLP, on this rank or divided among several."""

    layer_name = MOE.name

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mlp = Moe(config)

    def phases(self) -> Sequence[tuple[Phase, Callable[[Any], Any]]]:
        return expert_phases(
            self.mlp.experts,
            route=self._route,
            meanwhile=None if self.mlp.shared_experts is None else self._share,
            finish=_add,
            count=self.mlp.gate.count,
        )

    def _route(self, value: Activations) -> Routed:
        x_NTD, h_NTD = self.attend(value.x_NTD)
        h_TD = h_NTD.flatten(0, 1)
        routing = self.mlp.gate(h_TD)
        balance = value.balance
        if balance is not None:
            balance = balance + self.mlp.gate.balance_loss(routing, sequences=len(h_NTD))
        return Routed(h_TD, routing.indices_TK, routing.weights_TK, value._replace(x_NTD=x_NTD, balance=balance))

    def _share(self, rest: Activations, h_TD: Tensor) -> Activations:
        assert self.mlp.shared_experts is not None
        return _add(rest, self.mlp.shared_experts(h_TD))


def _add(rest: Activations, out_TD: Tensor) -> Activations:
    return rest._replace(x_NTD=rest.x_NTD + out_TD.view_as(rest.x_NTD))
