"""The layers of benchmarks: our MLA + MoE blocks, in bfloat16."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.layers import Phase
from stretto.model import ModelConfig
from stretto.model.blocks import Activations, MoeBlock
from stretto.moe import Routed, expert_phases

CONFIG = ModelConfig(
    vocab_size=1,
    hidden_size=3584,
    intermediate_size=1,
    moe_intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=16,
    n_routed_experts=32,
    num_experts_per_tok=8,
    first_k_dense_replace=0,
    q_lora_rank=768,
    routed_scaling_factor=2.5,
)
"""Small enough for four ranks on a GPU, with ratios of attention, experts and their communication near Kimi K2's."""
K2 = ModelConfig(
    vocab_size=1,
    hidden_size=7168,
    intermediate_size=1,
    moe_intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=64,
    n_routed_experts=12,
    num_experts_per_tok=8,
    first_k_dense_replace=0,
    q_lora_rank=1536,
    routed_scaling_factor=2.827,
)
"""Kimi K2's layers, as one of 32 ranks that share its 384 experts has them; there are 8 rows for each token."""
SKEW = 0.12
"""The standard deviation of the routers' biases when routing is skewed; scores have one of about 0.2."""


class Layer(nn.Module):
    """A block of the model, on a plain tensor."""

    layer_name = MoeBlock.layer_name

    def __init__(self, number: int, *, skewed: bool = False, config: ModelConfig = CONFIG) -> None:
        super().__init__()
        torch.manual_seed(number)
        with torch.device("cuda"):
            self.block = MoeBlock(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if "gate.weight" in name else 0.006)
        if skewed:
            self.block.mlp.gate.e_score_correction_bias.normal_(std=SKEW)
        self.to("cuda", torch.bfloat16)

    def phases(self) -> list[tuple[Phase, Callable[[Any], Any]]]:
        block = self.block
        return expert_phases(
            block.mlp.experts, route=self._route, meanwhile=self._share, finish=_add, count=block.mlp.gate.count
        )

    def _route(self, x_NTD: Tensor) -> Routed:
        x_TD, indices_TK, weights_TK, rest = self.block._route(Activations(x_NTD))
        return Routed(x_TD, indices_TK, weights_TK, rest.x_NTD)

    def _share(self, x_NTD: Tensor, h_TD: Tensor) -> Tensor:
        assert self.block.mlp.shared_experts is not None
        return _add(x_NTD, self.block.mlp.shared_experts(h_TD))

    def forward(self, value: Any) -> Any:
        for _, run in self.phases():
            value = run(value)
        return value


def _add(x_NTD: Tensor, out_TD: Tensor) -> Tensor:
    return x_NTD + out_TD.view_as(x_NTD)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()
