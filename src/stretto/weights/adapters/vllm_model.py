"""What a vLLM model reveals about its checkpoints: tensor names and shapes, and which weights are missing."""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from stretto.weights.manifest import TensorSpec

_EXPERT = re.compile(r"experts\.\d+\.[^.]+\.")  # in names that models map to their fused experts
_TRANSPOSED = re.compile(r"\.c_\w+\.weight$")  # matrices that GPT-2 and its relatives store transposed
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_INNER_MODULES = re.compile(r"(?<=\bexperts\.)(?:[^.]+\.)+(?=[^.]+$)")  # inside experts; the expert mapping omits them


class Account:
    """Tracks which pushed tensors vLLM has loaded.

    vLLM's loaders return the names of the parameters that they loaded; a tensor counts as loaded once the parameter was
    returned that contains it according to the model.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    >>> account = Account(Model())
    >>> account.add(["0.q_proj.weight", "0.norm.weight"], {"0.qkv_proj.weight", "0.norm.weight"})
    ['0.q_proj.weight', '0.norm.weight']
    >>> account.add(["0.k_proj.weight"], set())  # it was not loaded
    """

    def __init__(self, model: Any) -> None:
        self._parts: dict[str, dict[str, int]] = {}  # {part: {fused module: index of the part in it}}
        self._experts: dict[str, set[str]] = {}  # {"experts.0.w1.": {"experts.w13_"}}: one expert to fused
        for module in model.modules():
            for fused, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
                for index, part in enumerate(parts):
                    self._parts.setdefault(part, {})[fused] = index
            for fused, part, *_ in module.get_expert_mapping() if hasattr(module, "get_expert_mapping") else ():
                self._experts.setdefault(part, set()).add(fused)
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._pushed: list[str] = []
        self._missing: set[str] = set()
        self._loaded: set[str] = set()
        self._unknown = False

    def add(self, pushed: Sequence[str], loaded: set[str] | None) -> list[str] | None:
        """Add the names of pushed tensors and of loaded parameters.

        Return the names of all tensors pushed so far if all are loaded; None if one is not, or if vLLM cannot say.
        """
        self._pushed += pushed
        self._unknown = self._unknown or loaded is None
        self._loaded |= {spelling for name in loaded or () for spelling in (name, _INNER_MODULES.sub("", name))}
        missing_now = {name for name in pushed if self._parameters(name).isdisjoint(loaded or ())}
        missing = self._missing | missing_now
        self._missing = {name for name in missing if self._loaded.isdisjoint(self._expert_parameters(name))}
        return None if self._unknown or self._missing else self._pushed

    def _parameters(self, name: str) -> set[str]:
        """Return the parameters that a tensor may be, or be a part of; vLLM returns one when it loads the tensor."""
        parameters = set(self.spelled(name))
        for spelling in self.spelled(name):
            words = spelling.split(".")
            for k, word in enumerate(words):
                parameters |= {".".join([*words[:k], fused, *words[k + 1 :]]) for fused in self._parts.get(word, ())}
        return parameters

    def _expert_parameters(self, name: str) -> set[str]:
        """Return the fused parameters that an expert's tensor is a part of; it may be loaded by another call.

        vLLM returns nothing for experts on other ranks.
        """
        return {
            spelling.replace(expert, fused)
            for spelling in self.spelled(name)
            for expert in _EXPERT.findall(spelling)
            for fused in self._experts.get(expert, ())
        }

    def spelled(self, name: str) -> list[str]:
        """Return a tensor's name, and the name that the model's mapper turns it into."""
        return [name, *(self._mapper.apply_list([name]) if self._mapper is not None else ())]

    def fused(self, part: str) -> list[tuple[str, int]]:
        """Return the fused modules that a module is a part of, each with the index of the part."""
        return list(self._parts.get(part, {}).items())


class Shapes:
    """The shapes that a checkpoint's tensors must have, derived from vLLM's layers; unknown layers are not checked."""

    def __init__(self, model: Any) -> None:
        self._names = Account(model)
        self._layers = dict(model.named_modules())

    def wrong(self, entries: Sequence[TensorSpec]) -> list[str]:
        """Describe the tensors with a wrong shape. Floating-point dtypes may differ: vLLM casts them."""
        problems = []
        for entry in entries:
            fits = [shape for name in self._names.spelled(entry.name) if (shape := self._expected(name)) is not None]
            transposed = [shape[::-1] for shape in fits] if _TRANSPOSED.search(entry.name) else []
            if fits and entry.shape not in fits + transposed:
                problems.append(f"{entry.name} is pushed with shape {entry.shape}, and vLLM's model has {fits[0]}")
            elif fits and entry.dtype not in _FLOATS:
                problems.append(f"{entry.name} is pushed as {entry.dtype}, and vLLM's model has floating point there")
        return problems

    def _expected(self, name: str) -> tuple[int, ...] | None:
        path, _, kind = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if kind not in ("weight", "bias"):
            return None
        if path in self._layers:
            return _shape(self._layers[path], kind, None)
        for fused, index in self._names.fused(last):
            layer = self._layers.get(f"{parent}.{fused}" if parent else fused)
            if layer is not None:
                return _shape(layer, kind, index)
        return None


def _shape(layer: Any, kind: str, part: int | None) -> tuple[int, ...] | None:
    """Return the shape of a layer's weight or bias, not divided among ranks; of one `part` if the layer is fused."""
    linear = import_module("vllm.model_executor.layers.linear")
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    if isinstance(layer, embedding.VocabParallelEmbedding):
        whole = (layer.org_vocab_size, layer.embedding_dim) if kind == "weight" else (layer.org_vocab_size,)
        return whole if isinstance(layer.quant_method, embedding.UnquantizedEmbeddingMethod) else None
    if isinstance(layer, _norms()):
        parameters = dict(layer.named_parameters(recurse=False))
        return tuple(parameters[kind].shape) if kind in parameters else None
    if not isinstance(layer, linear.LinearBase) or type(layer.quant_method) is not linear.UnquantizedLinearMethod:
        return None
    if type(layer) is linear.QKVParallelLinear:
        heads, groups = layer.total_num_heads, layer.total_num_kv_heads
        parts = [heads * layer.head_size, groups * layer.head_size, groups * layer.v_head_size]
    elif type(layer) is linear.MergedColumnParallelLinear:
        parts = list(layer.output_sizes)
    elif part is None:
        parts = [layer.output_size]
    else:
        return None
    if part is not None and part >= len(parts):
        return None
    outputs = sum(parts) if part is None else parts[part]
    return (outputs, layer.input_size) if kind == "weight" else (outputs,)


def _norms() -> Any:
    """Return the norm classes, which every rank holds whole."""
    norms = import_module("vllm.model_executor.layers.layernorm")
    return (norms.RMSNorm, norms.GemmaRMSNorm, torch.nn.LayerNorm)


def unfinished(model: Any) -> list[str]:
    """Describe the layers that did not get all their elements in a reload.

    Attention layers are skipped: they take their scales at the end. Vocabularies are padded: one is complete if it got
    anything, or shares its memory with one that did.
    """
    reload = import_module("vllm.model_executor.model_loader.reload.layerwise")
    is_deferred = import_module("vllm.model_executor.layers.attention").is_deferred_attention_layer
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
    problems = []
    vocabularies = [
        (layer, reload.get_layerwise_info(layer)) for layer in model.modules() if isinstance(layer, embedding)
    ]
    filled = {_address(layer, info) for layer, info in vocabularies if info.load_numel or not info.can_load()}
    for name, layer in model.named_modules():
        info = reload.get_layerwise_info(layer)
        if not info.can_load() or is_deferred(layer):
            continue
        # Count parameters only: vLLM's own total includes buffers, most of which are computed (rotary embeddings, say).
        got, total = info.load_numel, sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if isinstance(layer, embedding) and (got or _address(layer, info) in filled or _is_padding(layer)):
            continue
        if got < total:
            problems.append(f"{name} got {got} of its {total} elements")
    return problems


def _is_padding(layer: Any) -> bool:
    """Return whether a rank holds only padding of a vocabulary."""
    shard = layer.shard_indices
    return not shard.num_org_elements and not shard.num_added_elements


def _address(layer: Any, info: Any) -> int:
    """Return the address of a vocabulary's weight as it is outside a reload."""
    weight = info.kernel_tensors[0]["weight"] if info.kernel_tensors is not None else layer.weight
    return weight.data_ptr()  # type: ignore[no-any-return]


def discard_kept(model: Any) -> None:
    """Discard the tensors that layers have kept in a failed update, so that finalizing restores their old weights."""
    reload = import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        info = reload.get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def unreloadable(model: Any) -> list[str]:
    """Describe the layers that vLLM's CPU build cannot load new weights into."""
    latent = import_module("vllm.model_executor.layers.attention.mla_attention").MLAAttention
    first = next((name for name, layer in model.named_modules() if isinstance(layer, latent)), None)
    return [] if first is None else [f"vLLM's CPU build cannot reload latent attention ({first})"]


class Packed:
    """The packed copies of weights that vLLM's CPU build makes besides its parameters.

    A reload does not make them again (as of 0.32.0): the kernels of experts pack only once, and a tied head keeps its
    old packed copy.
    """

    def __init__(self, model: Any) -> None:
        """Remove the kernels of experts before a reload, so that it makes new ones."""
        base = import_module("vllm.model_executor.layers.fused_moe.fused_moe_method_base").FusedMoEMethodBase
        quant_methods = (getattr(layer, "quant_method", None) for layer in model.modules())
        methods: list[Any] = [method for method in quant_methods if isinstance(method, base)]
        self._model, self._kernels = model, [(method, method.moe_kernel) for method in methods]
        for method in methods:
            method.moe_kernel = None

    def restore(self) -> None:
        """Pack vocabularies again after a reload, and restore the kernels of experts that got no new weights."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
        for layer in self._model.modules():
            if isinstance(layer, embedding):
                layer.quant_method.process_weights_after_loading(layer)
