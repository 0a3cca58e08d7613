"""Which models of transformers can be cut, and why others are refused."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from stretto.model.cut_layers import CHECKPOINTING
from stretto.moe.hooks import has_hooks

KindOf = Callable[[Any, int], str]
"""Returns the kind of attention of a layer, by the model's config and the layer's number."""


def _full(_: Any, __: int) -> str:
    return "full_attention"


def _by_window(config: Any, _: int) -> str:
    return "full_attention" if config.sliding_window is None else "sliding_attention"


def _by_layer(config: Any, number: int) -> str:
    return str(config.layer_types[number])


SUPPORTED: dict[str, tuple[str, KindOf]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", _full),
    "llama": ("LlamaForCausalLM", _full),
    "mistral": ("MistralForCausalLM", _by_window),
    "mixtral": ("MixtralForCausalLM", _by_window),
    "qwen2": ("Qwen2ForCausalLM", _by_layer),
    "qwen3": ("Qwen3ForCausalLM", _by_layer),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _by_window),
}
"""The class of each model type, and the kinds of attention in its forward. Other models may scale embeddings or logits,
or pass more from layer to layer, so each one here has tests."""
_ROPE = ("default", "linear", "llama3", "yarn")  # "dynamic" and "longrope" depend on the batches so far
_ATTENTION = ("eager", "sdpa")


def refusal(model: Any) -> str | None:
    """Return why a model cannot be cut, or None."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    name, _ = SUPPORTED.get(kind, ("", _full)) if isinstance(kind, str) else ("", _full)
    if not name or type(model).__name__ != name or type(model).__module__ != f"{_PACKAGE}.{kind}.modeling_{kind}":
        classes = ", ".join(name for name, _ in SUPPORTED.values())
        return f"stretto.cut takes a causal language model of transformers: {classes} (got {_in_words(model, kind)})"
    checks = (_wrapped, _replaced, _unusual_attention, _outdated)
    found = (wrong for check in checks if (wrong := check(model)) is not None)
    return next((f"this {name} cannot be cut: {wrong}" for wrong in found), None)


_PACKAGE = "transformers.models"


def _in_words(model: Any, kind: Any) -> str:
    return type(model).__name__ + (f", of model type {kind!r:.40}" if kind is not None else "")


def _wrapped(model: nn.Module) -> str | None:
    """Return what else a library has put into the model."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        return "it has adapters (PEFT); merge them (merge_and_unload) or cut it before they are added"
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        return "it is quantized; load it in bfloat16 or float32"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "accelerate has spread it over devices; load it without device_map"
    if any(isinstance(parameter.data, DTensor) for parameter in model.parameters()):
        return "its parameters are sharded (DTensor); load it without a tensor-parallel plan"
    return None


def _replaced(model: Any) -> str | None:
    """Return what of the model's own forward would not run."""
    for name, module in (("the model", model), ("model.model", model.model)):
        if has_hooks(module):
            return f"{name} has hooks, which would not run; put them on modules within it"
        package = f"{_PACKAGE}.{model.config.model_type}.modeling_{model.config.model_type}"
        origins = {type(module).__module__, getattr(type(module).forward, "__module__", "")}
        if "forward" in vars(module) or origins != {package}:
            return f"the forward of {name} was replaced, and would not run"
        if module._compiled_call_impl is not None:
            return f"{name} is compiled; compile the layers that stretto.cut returns instead"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return CHECKPOINTING
    return None


def _unusual_attention(model: Any) -> str | None:
    attention, rope = model.config._attn_implementation, getattr(model.model.rotary_emb, "rope_type", None)
    if attention not in _ATTENTION:
        ways = " or ".join(f'model.set_attn_implementation("{name}")' for name in _ATTENTION[::-1])
        return f"its attention is computed by {attention!r:.40}; call {ways}"
    if rope not in _ROPE:
        return f"its position embeddings are of type {rope!r:.40}, which is none of {', '.join(_ROPE)}"
    _, kind_of = SUPPORTED[model.config.model_type]
    for number in range(model.config.num_hidden_layers):
        if (kind := kind_of(model.config, number)) not in mask_functions():
            return f"layer {number} has {kind!r:.40}, which is none of {', '.join(mask_functions())}"
    if not getattr(model.config, "is_causal", True):
        return "its attention is not causal (config.is_causal)"
    return None


def mask_functions() -> dict[str, Callable[..., Any]]:
    """Return transformers' own functions that make masks, by kind of attention."""
    from transformers import masking_utils

    return {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }


def _outdated(_: nn.Module) -> str | None:
    for function in mask_functions().values():
        parameters = inspect.signature(function).parameters
        if "inputs_embeds" not in parameters or "cache_position" in parameters:
            version = getattr(sys.modules["transformers"], "__version__", "an old one")
            return f"transformers {version} makes masks in a way that is not known here; install a newer version"
    return None
