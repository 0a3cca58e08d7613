"""Copies of a model's decoder layers that share its parameters, so that the model itself stays as it is."""

import copy
from collections import OrderedDict
from typing import TypeGuard

from torch import nn

from stretto.model.cut_layers import record_logits
from stretto.moe.experts import RoutedExperts
from stretto.moe.hooks import has_hooks

_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""How transformers describes experts that compute what `RoutedExperts` does."""


def shared_copy(layer: nn.Module, *, records: bool) -> nn.Module:
    """Return a decoder layer whose experts defer their weight gradients.

    With `records`, its router leaves its logits to the layer that runs it. Return the layer itself if there is nothing
    to change.
    """
    block = layer._modules.get("mlp")
    changed: dict[str, nn.Module] = {}
    if block is not None and is_plain(experts := block._modules.get("experts")):
        changed["experts"] = _deferring(experts)
    if block is not None and records:
        changed["gate"] = _recording(block.get_submodule("gate"))
    if block is None or not changed:
        return layer
    return _with(layer, mlp=_with(block, **changed))


def is_plain(experts: nn.Module | None) -> TypeGuard[nn.Module]:
    """Return whether these are experts of transformers that `RoutedExperts` can stand in for."""
    if experts is None or any(getattr(experts, name, None) != value for name, value in _PLAIN.items()):
        return False
    weights = experts._parameters
    if weights.keys() != {"gate_up_proj", "down_proj"} or experts._modules.keys() != {"act_fn"} or experts._buffers:
        return False
    if any(type(weight) is not nn.Parameter or weight.dim() != 3 for weight in weights.values()):
        return False
    if has_hooks(experts) or "forward" in vars(experts) or experts._compiled_call_impl is not None:
        return False
    return getattr(getattr(type(experts), "_apply_gate", None), "__name__", "") == "_default_apply_gate"


def _deferring(experts: nn.Module) -> RoutedExperts:
    weights = experts._parameters
    assert weights["gate_up_proj"] is not None
    assert weights["down_proj"] is not None
    act_fn = experts.get_submodule("act_fn")
    return RoutedExperts.of(weights["gate_up_proj"], weights["down_proj"], activation=act_fn).train(experts.training)


def _recording(router: nn.Module) -> nn.Module:
    recording = copy.copy(router)
    recording._forward_hooks = OrderedDict(router._forward_hooks)  # shared with the original otherwise
    recording.register_forward_hook(record_logits)
    return recording


def _with(module: nn.Module, **inner: nn.Module) -> nn.Module:
    """Return a shallow copy of a module, with some of the modules in it replaced."""
    copied = copy.copy(module)
    copied._modules = {**module._modules, **inner}
    return copied
