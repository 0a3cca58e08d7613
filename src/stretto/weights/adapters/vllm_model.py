"""What vLLM's model says of the checkpoints that go into it: names, shapes, and what is still missing."""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from stretto.weights.manifest import TensorSpec

_EXPERT = re.compile(r"experts\.\d+\.[^.]+\.")  # of the names that models map to their fused experts
_TURNED = re.compile(r"\.c_\w+\.weight$")  # matrices that GPT-2 and its kin have by columns, and vLLM turns round
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_WITHIN = re.compile(r"(?<=\bexperts\.)(?:[^.]+\.)+(?=[^.]+$)")  # modules within experts, which that map does not name


class Account:
    """Which of the tensors that came are in vLLM's parameters. Its loaders return the names of those parameters: a
    tensor counts as taken once the parameter was returned that its model says it is a part of.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    >>> account = Account(Model())
    >>> account.add(["0.q_proj.weight", "0.norm.weight"], {"0.qkv_proj.weight", "0.norm.weight"})
    ['0.q_proj.weight', '0.norm.weight']
    >>> account.add(["0.k_proj.weight"], set())  # it was not loaded
    """

    def __init__(self, model: Any) -> None:
        self._parts: dict[str, dict[str, int]] = {}  # which part of which modules they are
        self._experts: dict[str, set[str]] = {}
        for module in model.modules():
            for fused, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
                for place, part in enumerate(parts):
                    self._parts.setdefault(part, {})[fused] = place
            for fused, part, *_ in module.get_expert_mapping() if hasattr(module, "get_expert_mapping") else ():
                self._experts.setdefault(part, set()).add(fused)
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._came: list[str] = []
        self._left: set[str] = set()
        self._loaded: set[str] = set()
        self._blind = False

    def add(self, came: Sequence[str], loaded: set[str] | None) -> list[str] | None:
        """All that was taken of all that ever came; None as long as any of it was not, or if nobody can say."""
        self._came += came
        self._blind = self._blind or loaded is None
        self._loaded |= {it for name in loaded or () for it in (name, _WITHIN.sub("", name))}
        now = {name for name in came if self._now(name).isdisjoint(loaded or ())}
        self._left = {name for name in self._left | now if self._loaded.isdisjoint(self._later(name))}
        return None if self._blind or self._left else self._came

    def _now(self, name: str) -> set[str]:
        """Parameters that a tensor may be, or be part of: one is returned when it is loaded."""
        found = set(self.spelled(name))
        for it in self.spelled(name):
            words = it.split(".")
            for place, word in enumerate(words):
                found |= {".".join([*words[:place], fused, *words[place + 1 :]]) for fused in self._parts.get(word, ())}
        return found

    def _later(self, name: str) -> set[str]:
        """Parameters of experts that it is one of: of those that are on other ranks, nothing is returned."""
        return {
            it.replace(expert, fused)
            for it in self.spelled(name)
            for expert in _EXPERT.findall(it)
            for fused in self._experts.get(expert, ())
        }

    def spelled(self, name: str) -> list[str]:
        """A tensor's name, and what the model's mapping makes of it."""
        return [name, *(self._mapper.apply_list([name]) if self._mapper is not None else ())]

    def fused(self, part: str) -> list[tuple[str, int]]:
        """Modules that this one is a part of, and which."""
        return list(self._parts.get(part, {}).items())


class Shapes:
    """What shapes tensors of a checkpoint have, by vLLM's layers; of those that it does not know, nothing is said."""

    def __init__(self, model: Any) -> None:
        self._names = Account(model)
        self._layers = dict(model.named_modules())

    def wrong(self, entries: Sequence[TensorSpec]) -> list[str]:
        """In words. Types may differ: vLLM casts floating point numbers."""
        found = []
        for entry in entries:
            fits = [shape for name in self._names.spelled(entry.name) if (shape := self._expected(name)) is not None]
            turned = [shape[::-1] for shape in fits] if _TURNED.search(entry.name) else []
            if fits and entry.shape not in fits + turned:
                found.append(f"{entry.name} is pushed with shape {entry.shape}, and vLLM's model has {fits[0]}")
            elif fits and entry.dtype not in _FLOATS:
                found.append(f"{entry.name} is pushed as {entry.dtype}, and vLLM's model has floating point there")
        return found

    def _expected(self, name: str) -> tuple[int, ...] | None:
        path, _, kind = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if kind not in ("weight", "bias"):
            return None
        if path in self._layers:
            return _shape(self._layers[path], kind, None)
        for fused, place in self._names.fused(last):
            layer = self._layers.get(f"{parent}.{fused}" if parent else fused)
            if layer is not None:
                return _shape(layer, kind, place)
        return None


def _shape(layer: Any, kind: str, place: int | None) -> tuple[int, ...] | None:
    """Of a layer's weight or bias, over all ranks; of one part of it if it is fused of several."""
    linear = import_module("vllm.model_executor.layers.linear")
    words = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    if isinstance(layer, words.VocabParallelEmbedding):
        whole = (layer.org_vocab_size, layer.embedding_dim) if kind == "weight" else (layer.org_vocab_size,)
        return whole if isinstance(layer.quant_method, words.UnquantizedEmbeddingMethod) else None
    if isinstance(layer, _norms()):
        there = dict(layer.named_parameters(recurse=False))
        return tuple(there[kind].shape) if kind in there else None
    if not isinstance(layer, linear.LinearBase) or type(layer.quant_method) is not linear.UnquantizedLinearMethod:
        return None
    if type(layer) is linear.QKVParallelLinear:
        heads, groups = layer.total_num_heads, layer.total_num_kv_heads
        parts = [heads * layer.head_size, groups * layer.head_size, groups * layer.v_head_size]
    elif type(layer) is linear.MergedColumnParallelLinear:
        parts = list(layer.output_sizes)
    elif place is None:
        parts = [layer.output_size]
    else:
        return None
    if place is not None and place >= len(parts):
        return None
    outputs = sum(parts) if place is None else parts[place]
    return (outputs, layer.input_size) if kind == "weight" else (outputs,)


def _norms() -> Any:
    """Classes of layers that no rank has a part of only."""
    norms = import_module("vllm.model_executor.layers.layernorm")
    return (norms.RMSNorm, norms.GemmaRMSNorm, torch.nn.LayerNorm)


def unfinished(model: Any) -> list[str]:
    """Layers of a model being reloaded that did not get all that they hold, in words. Attention takes its scales in the
    end; vocabularies are padded, and must have got something, or lie in one place with another that has."""
    reload = import_module("vllm.model_executor.model_loader.reload.layerwise")
    waits = import_module("vllm.model_executor.layers.attention").is_deferred_attention_layer
    vocabulary = import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
    found = []
    words = [(it, reload.get_layerwise_info(it)) for it in model.modules() if isinstance(it, vocabulary)]
    filled = {_address(layer, info) for layer, info in words if info.load_numel or not info.can_load()}
    for name, layer in model.named_modules():
        info = reload.get_layerwise_info(layer)
        if not info.can_load() or waits(layer):
            continue
        # Buffers are counted by vLLM too, and most are computed: rotary embeddings, for one.
        got, total = info.load_numel, sum(it.numel() for it in layer.parameters(recurse=False))
        if isinstance(layer, vocabulary) and (got or _address(layer, info) in filled or _is_padding(layer)):
            continue
        if got < total:
            found.append(f"{name} got {got} of its {total} elements")
    return found


def _is_padding(layer: Any) -> bool:
    """Whether a rank has none of a vocabulary's words."""
    shard = layer.shard_indices
    return not shard.num_org_elements and not shard.num_added_elements


def _address(layer: Any, info: Any) -> int:
    """Of a vocabulary's weight, as it is used outside of reloading."""
    weight = info.kernel_tensors[0]["weight"] if info.kernel_tensors is not None else layer.weight
    return weight.data_ptr()  # type: ignore[no-any-return]


def forget_kept(model: Any) -> None:
    """What layers of a failed update have kept, so that finalizing gives them back what they had."""
    reload = import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        info = reload.get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def unreloadable(model: Any) -> list[str]:
    """Layers that vLLM's CPU build cannot take new weights into, in words."""
    latent = import_module("vllm.model_executor.layers.attention.mla_attention").MLAAttention
    where = next((name for name, layer in model.named_modules() if isinstance(layer, latent)), None)
    return [] if where is None else [f"vLLM's CPU build cannot reload latent attention ({where})"]


class Packed:
    """What vLLM's CPU build makes of weights besides its parameters, and does not make again when they are reloaded (as
    of 0.32.0): kernels of experts, which pack them the first time only, and the packed copy of a tied head."""

    def __init__(self, model: Any) -> None:
        """Before a reload."""
        base = import_module("vllm.model_executor.layers.fused_moe.fused_moe_method_base").FusedMoEMethodBase
        methods = [it for layer in model.modules() if isinstance(it := getattr(layer, "quant_method", None), base)]
        self._model, self._kernels = model, [(it, it.moe_kernel) for it in methods]
        for method in methods:
            method.moe_kernel = None

    def restore(self) -> None:
        """After it; experts that got nothing have what they had."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        vocabulary = import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
        for layer in self._model.modules():
            if isinstance(layer, vocabulary):
                layer.quant_method.process_weights_after_loading(layer)
