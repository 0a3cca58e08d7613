"""The sizes of a DeepSeek-V3 / Kimi K2 model, under the names of Hugging Face's `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stretto.ir.errors import StrettoError
from stretto.ir.files import read_text

_T = TypeVar("_T")


class ModelError(StrettoError):
    """A model's configuration or checkpoint cannot be used."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN: rotary embeddings for contexts `factor` times longer than those first trained on."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a model.

    >>> ModelConfig.named("kimi-k2").n_routed_experts
    384
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    """The number of first layers that are dense."""
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    """Whether rotary pairs are neighbours (x₀, x₁), or half the features apart."""
    yarn: Yarn | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    """The number of MTP modules that a checkpoint has."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count, least = getattr(self, name), 0 if name in _MAY_BE_ZERO else 1
            if type(count) is not int or count < least:
                raise ModelError(f"{name} is a whole number of at least {least} (got {count!r:.40})")
        if self.q_lora_rank is not None and (type(self.q_lora_rank) is not int or self.q_lora_rank < 1):
            raise ModelError(f"q_lora_rank is a whole number, or null for no low rank (got {self.q_lora_rank!r:.40})")
        numbers = {"rope_theta": self.rope_theta, "rms_norm_eps": self.rms_norm_eps}
        if self.yarn is not None:
            numbers |= {name: getattr(self.yarn, name) for name in ("factor", "beta_fast", "beta_slow")}
        for name, value in numbers.items():
            if not 0 < value < math.inf:
                raise ModelError(f"{name} is a number above 0 (got {value!r:.40})")
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"qk_rope_head_dim must be even, for pairs (got {self.qk_rope_head_dim})")
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups or self.topk_group > groups:
            raise ModelError(f"{experts} experts, {groups} groups and {self.topk_group} groups per token do not fit")
        if groups > 1 and experts // groups < 2:
            raise ModelError(f"a group needs two experts at least, for its score ({experts} experts, {groups} groups)")
        if self.num_experts_per_tok > experts // groups * self.topk_group:
            raise ModelError(
                f"{self.num_experts_per_tok} experts per token cannot be chosen from {self.topk_group} groups of "
                f"{experts // groups}"
            )

    @property
    def dense_layers(self) -> int:
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @staticmethod
    def named(name: str) -> "ModelConfig":
        """Return a known model's sizes: "tiny" (seconds on a CPU), "moonlight-16b", "deepseek-v3" or "kimi-k2"."""
        if name not in SIZES:
            raise ModelError(f"unknown model {name!r:.40}; known are {', '.join(SIZES)}")
        return SIZES[name]

    @staticmethod
    def load(path: str | Path) -> "ModelConfig":
        """Read a `config.json`, or the one in a folder."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            values = msgspec.json.decode(read_text(file), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ModelError(f"{file} is no config.json: {error}") from None
        try:
            return ModelConfig.from_hugging_face(values)
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from None

    @staticmethod
    def from_hugging_face(values: Mapping[str, Any]) -> "ModelConfig":
        """Read the values of a `config.json`. What this architecture does not do is refused."""
        if values.get("model_type") not in MODEL_TYPES:
            raise ModelError(f"model_type is one of {', '.join(MODEL_TYPES)} (got {values.get('model_type')!r:.40})")
        for name, expected in (_FIXED | _REFUSED).items():
            if values.get(name, expected) != expected:
                raise ModelError(f"{name} must be {expected!r} in this architecture (got {values[name]!r:.40})")
        heads = values.get("num_key_value_heads")
        if heads not in (None, values.get("num_attention_heads")):
            raise ModelError(f"num_key_value_heads must equal num_attention_heads, or be left out (got {heads!r:.40})")
        for name in _REQUIRED:
            if name not in values:
                raise ModelError(f"{name} is missing")
        _validate_quantization(values.get("quantization_config"))
        known = {field.name for field in fields(ModelConfig)} - {"yarn"}
        chosen = {name: value for name, value in values.items() if name in known and value is not None}
        if "num_mtp_layers" in values:  # transformers' newer name
            chosen["num_nextn_predict_layers"] = values["num_mtp_layers"]
        both = [values[name] for name in ("rope_parameters", "rope_scaling") if values.get(name)]
        if len(both) > 1 and both[0] != both[1]:
            raise ModelError("rope_parameters and rope_scaling say different things; leave one out")
        rope = dict(both[0]) if both else {}
        chosen["rope_theta"] = rope.pop("rope_theta", chosen.get("rope_theta", 10000.0))
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        if (
            kind not in ("default", "yarn")
            or rope.get("attention_factor") is not None
            or not rope.get("truncate", True)
        ):
            raise ModelError(f"rotary embeddings are plain or YaRN, with no further options (got {kind!r:.40}, {rope})")
        if kind == "yarn":
            scale = {field.name: rope.get(field.name) for field in fields(Yarn)}
            chosen["yarn"] = {name: _whole(value) for name, value in scale.items() if value is not None}
        return _converted(chosen, ModelConfig)

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the values of a `config.json` that `transformers` and inference engines read."""
        values = asdict(self)
        scaling = values.pop("yarn")
        values["rope_scaling"] = None if scaling is None else {"type": "yarn", **scaling}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **values,
            **_FIXED,
            "num_key_value_heads": self.num_attention_heads,
        }


MODEL_TYPES = ("deepseek_v3", "kimi_k2")
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
_REFUSED: dict[str, Any] = {"attention_dropout": 0.0, "is_causal": True, "partial_rotary_factor": 1.0}
"""What may be said only so."""
_REQUIRED = (
    *("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts", "first_k_dense_replace"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps"),
)
"""Fields that change numbers, and for which others assume other values than ours."""
_MAY_BE_ZERO = {"first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"}
_COUNTS = [field.name for field in fields(ModelConfig) if field.type in (int, "int")]


def _validate_quantization(said: Any) -> None:
    """Raise ModelError if weights are stored in another way than plainly, or in FP8 with a scale per 128 × 128."""
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if method is None or (method == "fp8" and list(said.get("weight_block_size") or ()) == [128, 128]):
        return
    raise ModelError(
        f"weights are plain, or fp8 in blocks of 128 × 128; this quantization_config is not known (got {said!r:.80})"
    )


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _converted(values: Mapping[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"not the configuration of such a model: {error}") from None


SIZES = {
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_nextn_predict_layers=1,
    ),
    "moonlight-16b": ModelConfig(
        vocab_size=163840,
        hidden_size=2048,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        routed_scaling_factor=2.446,
        rope_theta=50000.0,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    ),
    "deepseek-v3": ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        q_lora_rank=1536,
        yarn=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        max_position_embeddings=163840,
        num_nextn_predict_layers=1,
    ),
    "kimi-k2": ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=64,
        n_routed_experts=384,
        num_experts_per_tok=8,
        routed_scaling_factor=2.827,
        q_lora_rank=1536,
        rope_theta=50000.0,
        yarn=Yarn(32.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        max_position_embeddings=131072,
    ),
}
"""Known models by name."""
