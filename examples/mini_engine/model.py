"""A tiny mixture-of-experts transformer: its sizes, a random checkpoint, and what must be generated from it.

T tokens · S tokens so far · D width · V vocabulary · H heads · K key/value heads · d width of a head
E experts · F width of an expert · f, h, k: a rank's part of F, H, K
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.weights.manifest import TensorSpec

REAL = torch.float64  # of all arithmetic, so that the order of a sum never decides which token is next


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. Each layer has one MLP for every token, and experts of the same width of which a router chooses."""

    vocabulary: int = 96
    context: int = 256
    layers: int = 2
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 8
    experts: int = 4
    chosen: int = 2
    expert_width: int = 24
    dtype: str = "bfloat16"


CONFIGS = {
    "tiny": Config(),
    "small": Config(
        vocabulary=1024, layers=4, width=256, heads=8, kv_heads=4, head_width=32, experts=16, expert_width=256
    ),
}


def entries(config: Config) -> list[TensorSpec]:
    """The checkpoint's tensors, in model order."""
    D, F = config.width, config.expert_width
    q, kv = config.heads * config.head_width, config.kv_heads * config.head_width
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocabulary, D)}
    for layer in (f"layers.{n}" for n in range(config.layers)):
        shapes[f"{layer}.input_layernorm"] = (D,)
        shapes |= {f"{layer}.self_attn.{name}_proj": (q if name == "q" else kv, D) for name in "qkv"}
        shapes[f"{layer}.self_attn.o_proj"] = (D, q)
        shapes[f"{layer}.post_attention_layernorm"] = (D,)
        shapes[f"{layer}.router"] = (config.experts, D)
        for part in ("mlp", *(f"experts.{e}" for e in range(config.experts))):
            shapes |= {f"{layer}.{part}.{name}": shape for name, shape in mlp.items()}
    shapes |= {"norm": (D,), "lm_head": (config.vocabulary, D)}
    return [TensorSpec(f"{name}.weight", config.dtype, shape) for name, shape in shapes.items()]


def checkpoint(config: Config, seed: int) -> dict[str, Tensor]:
    """A random one."""
    generator = torch.Generator().manual_seed(seed)

    def made(entry: TensorSpec) -> Tensor:
        noise = torch.randn(entry.shape, generator=generator)
        if len(entry.shape) == 1:
            noise = 1 + 0.1 * noise
        elif not entry.name.startswith("embed"):
            noise *= entry.shape[1] ** -0.5
        return noise.to(getattr(torch, config.dtype))

    return {entry.name: made(entry) for entry in entries(config)}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8, and its scale."""
    weight = weight.float()
    largest = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    scale = largest / torch.full_like(largest, 127)  # by a tensor: the same bits on every device
    return (weight / scale).round().to(torch.int8), scale


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.to(REAL)


def rotated(x_THd: Tensor, *, start: int) -> Tensor:
    """With each token's place turned into its heads."""
    half = x_THd.shape[-1] // 2
    place_T = torch.arange(start, start + len(x_THd), dtype=REAL, device=x_THd.device)
    speed = 10_000 ** (-torch.arange(half, dtype=REAL, device=x_THd.device) / half)
    angle = (place_T[:, None] * speed)[:, None]
    a, b = x_THd[..., :half], x_THd[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attention(q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor) -> Tensor:
    """T × (H·d), for the last T of S tokens."""
    (T, H, d), (S, K, _) = q_THd.shape, k_SKd.shape
    k_SHd, v_SHd = (x.repeat_interleave(H // K, 1) for x in (k_SKd, v_SKd))
    scores_HTS = torch.einsum("thd,shd->hts", q_THd, k_SHd) * d**-0.5
    later_TS = torch.ones(T, S, dtype=torch.bool, device=q_THd.device).triu(S - T + 1)
    shares_HTS = scores_HTS.masked_fill(later_TS, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", shares_HTS, v_SHd).flatten(1)


def routed(x_TD: Tensor, router_ED: Tensor, chosen: int) -> Tensor:
    """T × E: how much of each expert a token gets; 0 of most."""
    scores_TE = x_TD @ router_ED.to(REAL).T
    best, experts = scores_TE.topk(chosen)
    return torch.zeros_like(scores_TE).scatter(1, experts, best.softmax(-1))


@torch.no_grad()
def reference(config: Config, weights: Mapping[str, Tensor], tokens: Sequence[int], count: int) -> list[int]:
    """The tokens that follow, straight from a checkpoint: nothing fused, split, kept or transposed."""
    made = list(tokens)
    for _ in range(count):
        made.append(int(_logits(config, weights, made).argmax()))
    return made[len(tokens) :]


def _logits(config: Config, weights: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    d = config.head_width
    x_TD = weights["embed_tokens.weight"].to(REAL)[list(tokens)]
    for layer in (f"layers.{n}" for n in range(config.layers)):
        y_TD = normed(x_TD, weights[f"{layer}.input_layernorm.weight"])
        q, k, v = (
            (y_TD @ weights[f"{layer}.self_attn.{name}_proj.weight"].to(REAL).T).unflatten(1, (-1, d)) for name in "qkv"
        )
        y_TD = attention(rotated(q, start=0), rotated(k, start=0), v)
        x_TD = x_TD + y_TD @ weights[f"{layer}.self_attn.o_proj.weight"].to(REAL).T
        y_TD = normed(x_TD, weights[f"{layer}.post_attention_layernorm.weight"])
        shares_TE = routed(y_TD, weights[f"{layer}.router.weight"], config.chosen)
        x_TD = x_TD + _mlp(weights, f"{layer}.mlp", y_TD)
        for e in range(config.experts):
            x_TD = x_TD + shares_TE[:, e, None] * _mlp(weights, f"{layer}.experts.{e}", y_TD)
    return normed(x_TD[-1], weights["norm.weight"]) @ weights["lm_head.weight"].to(REAL).T


def _mlp(weights: Mapping[str, Tensor], part: str, x_TD: Tensor) -> Tensor:
    def rounded(weight: Tensor) -> Tensor:
        whole, scale = quantise(weight)
        return whole.to(REAL) * scale

    gate, up = (rounded(weights[f"{part}.{name}_proj.weight"]) for name in ("gate", "up"))
    down_FD = rounded(weights[f"{part}.down_proj.weight"].T)  # a scale for each of F: a rank has those of its part
    return (F.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down_FD
