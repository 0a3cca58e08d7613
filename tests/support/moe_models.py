"""Small DeepSeek-V3 models: ours, and Hugging Face's with the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from stretto.model import CausalLM, ModelConfig, Yarn

TINY = ModelConfig.named("tiny")


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Small models of all shapes."""
    groups, size = draw(st.sampled_from([(1, 2), (1, 6), (2, 3), (4, 2)]))
    top_groups = draw(st.integers(1, groups))
    layers = draw(st.integers(1, 3))
    yarn = draw(
        st.none()
        | st.builds(
            Yarn,
            factor=st.sampled_from([1.0, 4.0, 40.0]),
            original_max_position_embeddings=st.just(16),
            beta_fast=st.sampled_from([1.0, 32.0]),
            mscale=st.sampled_from([0.0, 0.7, 1.0]),
            mscale_all_dim=st.sampled_from([0.0, 1.0]),
        )
    )
    return ModelConfig(
        vocab_size=draw(st.integers(3, 17)),
        hidden_size=draw(st.integers(2, 12)),
        intermediate_size=draw(st.integers(1, 9)),
        moe_intermediate_size=draw(st.integers(2, 5)),
        num_hidden_layers=layers,
        num_attention_heads=draw(st.integers(1, 3)),
        n_routed_experts=groups * size,
        num_experts_per_tok=draw(st.integers(1, size * top_groups)),
        n_shared_experts=draw(st.integers(1, 2)),
        first_k_dense_replace=draw(st.integers(0, layers)),
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        q_lora_rank=draw(st.none() | st.integers(1, 5)),
        kv_lora_rank=draw(st.integers(1, 5)),
        qk_nope_head_dim=draw(st.integers(1, 4)),
        qk_rope_head_dim=2 * draw(st.integers(1, 3)),
        v_head_dim=draw(st.integers(1, 4)),
        rope_theta=draw(st.sampled_from([100.0, 10000.0])),
        rope_interleave=draw(st.booleans()),
        yarn=yarn,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )


def hugging_face(config: ModelConfig, **options: Any) -> DeepseekV3ForCausalLM:
    """Their model, with random weights, biases and router biases."""
    values = {name: value for name, value in config.to_hugging_face().items() if name != "model_type"}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**values, **options))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def pair(config: ModelConfig, dtype: torch.dtype, **options: Any) -> tuple[CausalLM, DeepseekV3ForCausalLM]:
    """Our model and theirs, with the same weights."""
    other = hugging_face(config, **options).to(dtype)
    ours = CausalLM(config).to(dtype)
    ours.load_state_dict(other.state_dict())
    return ours, other


class _Double:
    """Stands in for `torch` in a module: float32 means float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def exact() -> Iterator[None]:
    """Lift their casts to float32: what they always compute in float32, they compute in float64 within this context."""
    modules: list[Any] = [modeling_deepseek_v3, modeling_rope_utils]
    for module in modules:
        module.torch = _Double()
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch


def relative(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
