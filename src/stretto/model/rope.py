"""Rotary position embeddings, plain or stretched by YaRN.

N sequences, T tokens, H heads, d features of which pairs are rotated.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.model.config import ModelConfig, Yarn


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return how much attention is sharpened for a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: ModelConfig) -> float:
    """Return the factor of attention scores."""
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= yarn_mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def frequencies(config: ModelConfig) -> list[float]:
    """Return the angle per token of each pair of features."""
    pairs = config.qk_rope_head_dim // 2
    plain = [config.rope_theta ** (-pair / pairs) for pair in range(pairs)]
    if config.yarn is None:
        return plain
    low, high = (_pair_that_turns(times, config) for times in (config.yarn.beta_fast, config.yarn.beta_slow))
    first, last = max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1)
    width = last - first or 0.001
    # Pairs that turn often keep their frequency, slow ones are stretched, and those between change gradually.
    stretched = [min(max((pair - first) / width, 0.0), 1.0) for pair in range(pairs)]
    return [f * (1 - share) + f / config.yarn.factor * share for f, share in zip(plain, stretched, strict=True)]


def _pair_that_turns(times: float, config: ModelConfig) -> float:
    """Return which pair turns this many times within the original context."""
    assert config.yarn is not None
    length = config.yarn.original_max_position_embeddings
    return config.qk_rope_head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))


def amplitude(yarn: Yarn | None) -> float:
    """Return the factor of the rotated features."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


class RotaryEmbedding(nn.Module):
    """Rotates pairs of features by angles that grow with the token's position; in float32 at least."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._frequencies, self._interleaved = frequencies(config), config.rope_interleave
        self._amplitude = amplitude(config.yarn)
        self.register_buffer("frequencies", torch.tensor(self._frequencies, dtype=torch.float64), persistent=False)

    def forward(self, *features_NHTd: Tensor) -> list[Tensor]:
        """Rotate each of these tensors, whose tokens have the positions 0, 1, …"""
        first = features_NHTd[0]
        exact = torch.promote_types(first.dtype, torch.float32)
        positions_T = torch.arange(first.shape[-2], device=first.device, dtype=exact)
        angles_Tp = positions_T[:, None] * self.frequencies.to(exact)
        cos_Tp, sin_Tp = angles_Tp.cos() * self._amplitude, angles_Tp.sin() * self._amplitude
        return [self._rotated(x_NHTd, cos_Tp, sin_Tp) for x_NHTd in features_NHTd]

    def _rotated(self, x_NHTd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor) -> Tensor:
        x = x_NHTd.to(cos_Tp.dtype)
        a, b = (x[..., 0::2], x[..., 1::2]) if self._interleaved else x.chunk(2, dim=-1)
        # Both kinds of pairs come out half the features apart: scores do not depend on the order of features.
        return torch.cat([a * cos_Tp - b * sin_Tp, b * cos_Tp + a * sin_Tp], dim=-1).to(x_NHTd.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.frequencies.is_meta:  # exact again, whatever they were cast to, or left uninitialised by to_empty
            self.frequencies = torch.tensor(self._frequencies, dtype=torch.float64, device=self.frequencies.device)
        return self
