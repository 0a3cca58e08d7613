"""Multi-head latent attention (MLA): queries, keys and values pass through small latent vectors.

N sequences, T tokens, D features, H heads, q and k features per head (d) are partly rotated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.model.config import ModelConfig
from stretto.model.rope import RotaryEmbedding, softmax_scale

_LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is


class Heads(nn.Module):
    """Makes the queries, keys and values of each head from projections: it rotates, and joins what belongs together.

    It is a module so that memory policies can name it: its outputs are large, and cheap to compute again.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        self._plain, self._rotated, self._value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rotary = RotaryEmbedding(config)

    def forward(self, queries_NTh: Tensor, kv_NTh: Tensor, k_rotated_NTr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_plain, q_rotated = torch.split(self._by_head(queries_NTh), [self._plain, self._rotated], dim=-1)
        k_plain, v_NHTv = torch.split(self._by_head(kv_NTh), [self._plain, self._value], dim=-1)
        q_rotated, k_rotated = self.rotary(q_rotated, k_rotated_NTr[:, None])
        q_NHTd = torch.cat([q_plain, q_rotated], dim=-1)
        k_NHTd = torch.cat([k_plain, k_rotated.expand(-1, self._heads, -1, -1)], dim=-1)
        return q_NHTd, k_NHTd, v_NHTv

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self._heads, x.shape[-1] // self._heads).transpose(1, 2)


class MultiheadLatentAttention(nn.Module):
    """Causal attention. Keys of all heads share one rotated part; the rest comes from a latent vector per token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self._scale = softmax_scale(config)
        self._latent, self._rotated = config.kv_lora_rank, config.qk_rope_head_dim
        queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=_LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self._latent + self._rotated, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(self._latent, eps=_LATENT_EPS)
        self.kv_b_proj = nn.Linear(self._latent, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, bias=bias)
        self.heads = Heads(config)
        self._low_rank_queries = config.q_lora_rank is not None

    def forward(self, x_NTD: Tensor) -> Tensor:
        queries_NTh = self._queries(x_NTD)
        latent_NTl, k_rotated_NTr = self.kv_a_proj_with_mqa(x_NTD).split([self._latent, self._rotated], dim=-1)
        kv_NTh = self.kv_b_proj(self.kv_a_layernorm(latent_NTl))
        q_NHTd, k_NHTd, v_NHTv = self.heads(queries_NTh, kv_NTh, k_rotated_NTr)
        out_NHTv = F.scaled_dot_product_attention(q_NHTd, k_NHTd, v_NHTv, is_causal=True, scale=self._scale)
        out: Tensor = self.o_proj(out_NHTv.transpose(1, 2).flatten(2))
        return out

    def _queries(self, x_NTD: Tensor) -> Tensor:
        if not self._low_rank_queries:
            return self.q_proj(x_NTD)  # type: ignore[no-any-return]
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_NTD)))  # type: ignore[no-any-return]
