"""Checkpoints in Hugging Face's format: a `config.json`, and tensors in safetensors files."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.ir.errors import one_line
from stretto.ir.files import read_text, write_text
from stretto.model.causal_lm import CausalLM
from stretto.model.config import ModelConfig, ModelError
from stretto.moe.experts import Experts

_INDEX = "model.safetensors.index.json"
_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BLOCK = 128  # rows and columns that share a scale in DeepSeek's FP8 checkpoints
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


class HasState(Protocol):
    """A model, a layer, or a `Pipeline`: its state has Hugging Face's names."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def modules(self) -> Iterator[nn.Module]: ...


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    mtp: bool = False,
    balance: bool = False,
) -> CausalLM:
    """Load a DeepSeek-V3 or Kimi K2 checkpoint as a module from tokens to logits."""
    config = ModelConfig.load(folder)
    with torch.device("meta"):
        model = CausalLM(config, mtp=mtp, balance=balance).to(dtype)
    model.to_empty(device=device)
    load_weights(model, folder)
    return model


def load_weights(target: HasState, folder: str | Path) -> None:
    """Read the weights of a model, of a layer, or of this rank's part of a `Pipeline`, each into its own dtype.

    Experts are stored one by one and stacked here, those that this rank holds; weights stored in FP8 with scales are
    multiplied out.
    """
    tensors = dict(target.state_dict())
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ModelError("the model is on the meta device; give it memory first, with to_empty(device=...)")
    is_tied = ModelConfig.load(folder).tie_word_embeddings
    holders = {weight.data_ptr(): experts for experts in _divided(target) for weight in experts.parameters()}
    with _Checkpoint(Path(folder)) as checkpoint, torch.no_grad():
        stored = {name: name if checkpoint.has(name) else _stored_as(name, head=is_tied) for name in tensors}
        missing = [name for name in tensors if not checkpoint.has(stored[name])]
        if missing:
            raise ModelError(f"{folder} lacks {len(missing)} tensors of the model, such as {missing[0]}")
        for name in sorted(tensors):
            value = checkpoint.read(stored[name], holders.get(tensors[name].data_ptr()))
            if tensors[name].is_floating_point() and value.dtype not in _PLAIN:
                raise ModelError(
                    f"{folder}: {name} is stored as {str(value.dtype).removeprefix('torch.')} without scales per block"
                )
            if value.shape != tensors[name].shape:
                raise ModelError(
                    f"{folder}: {name} has the shape {tuple(value.shape)}, not {tuple(tensors[name].shape)}"
                )
            tensors[name].copy_(value)


def _stored_as(name: str, *, head: bool) -> str:
    """Return the name under which a tied tensor is stored. `head` tells whether the head is tied to the embedding."""
    tied = re.fullmatch(r"model\.layers\.\d+\.embed_tokens\.weight", name) or (head and name == "lm_head.weight")
    return "model.embed_tokens.weight" if tied else name


def _divided(target: HasState) -> list[Experts]:
    """Return the experts of which other ranks hold the rest."""
    return [module for module in target.modules() if isinstance(module, Experts) and module.ranks > 1]


class _Checkpoint:
    """The tensors of a folder, opened as they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files, self._stack = folder, dict[str, Any](), ExitStack()
        self._file_of = dict(_files_by_name(folder))

    def __enter__(self) -> "_Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        return all(part in self._file_of for part in self._parts(name))

    def read(self, name: str, holder: Experts | None = None) -> Tensor:
        """Read a tensor; the experts' from one for each expert. With a `holder`, read only those that it holds."""
        parts = self._parts(name)
        if len(parts) == 1:
            whole = self._one(parts[0])
            return whole if holder is None else whole[self._held(name, len(whole), holder)]
        kinds = 2 if name.endswith("gate_up_proj") else 1
        experts = [parts[k : k + kinds] for k in range(0, len(parts), kinds)]
        held = experts if holder is None else experts[self._held(name, len(experts), holder)]
        return torch.stack([torch.cat([self._one(part) for part in kind]) for kind in held])

    def _held(self, name: str, stored: int, holder: Experts) -> slice:
        if stored != holder.total:
            raise ModelError(f"{self._folder}: {name} has {stored} experts, not {holder.total}")
        return slice(holder.first, holder.first + len(holder.down_proj))

    def _parts(self, name: str) -> list[str]:
        match = _EXPERTS.fullmatch(name)
        if match is None or name in self._file_of:
            return [name]
        kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        experts = 0
        while f"{match[1]}{experts}.{kinds[0]}.weight" in self._file_of:
            experts += 1
        return [f"{match[1]}{expert}.{kind}.weight" for expert in range(max(1, experts)) for kind in kinds]

    def _one(self, name: str) -> Tensor:
        value = self._tensor(name)
        if f"{name}_scale_inv" not in self._file_of:
            return value
        scale = self._tensor(f"{name}_scale_inv").float()
        blocks = tuple(-(-size // _BLOCK) for size in value.shape)
        if scale.shape != blocks:
            raise ModelError(
                f"{name}_scale_inv has the shape {tuple(scale.shape)}, not {blocks}: one for each {_BLOCK} × {_BLOCK}"
            )
        for dimension, size in enumerate(value.shape):
            scale = scale.repeat_interleave(_BLOCK, dimension).narrow(dimension, 0, size)
        return value.float() * scale

    def _tensor(self, name: str) -> Tensor:
        file = self._file_of[name]
        if file not in self._files:
            self._files[file] = self._stack.enter_context(_opened(self._folder / file))
        try:
            value: Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._folder / file} lacks {name}: {one_line(error)}") from None
        return value


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from None


def _files_by_name(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name and the file that has it."""
    if (folder / _INDEX).exists():
        try:
            files = dict(json.loads(read_text(folder / _INDEX))["weight_map"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{folder / _INDEX} is no index of safetensors files") from None
        for name, file in files.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{folder / _INDEX} names {file!r:.60}, which is no file of the folder")
            yield name, file
        return
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no safetensors files")
    for path in paths:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, path.name


def save_pretrained(model: CausalLM, folder: str | Path, *, shard_bytes: int = 5 * 10**9) -> None:
    """Write a model as `transformers` and inference engines load it, in files of `shard_bytes` at most.

    Tensors that are one are written once. Files of an earlier checkpoint in the folder are replaced.
    """
    if not isinstance(model, CausalLM):
        raise ModelError(
            f"save_pretrained takes a CausalLM (got {type(model).__name__}); docs/training.md says how to collect the "
            "weights of a Pipeline in one"
        )
    for experts in _divided(model):
        raise ModelError(
            f"this model holds {len(experts.down_proj)} of {experts.total} experts of a layer; collect those of all "
            "ranks in a whole model first"
        )
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror}") from None
    tensors = dict(_unstacked(model.state_dict()))
    shards: list[dict[str, Tensor]] = [{}]
    full = 0
    for name, tensor in tensors.items():
        if shards[-1] and full + tensor.nbytes > shard_bytes:
            shards.append({})
            full = 0
        shards[-1][name] = tensor
        full += tensor.nbytes
    names = [f"model-{k:05}-of-{len(shards):05}.safetensors" for k in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        partial = folder / f"{name}.partial"
        save_file(shard, str(partial), metadata={"format": "pt"})
        partial.replace(folder / name)
    if len(shards) > 1:
        index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        sizes = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        write_text(folder / _INDEX, json.dumps({"metadata": sizes, "weight_map": index}, indent=2) + "\n")
    else:
        (folder / _INDEX).unlink(missing_ok=True)
    dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    config = {**model.config.to_hugging_face(), "torch_dtype": dtype}
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()


def _unstacked(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under the names of a checkpoint: each expert's by itself, and tied ones once."""
    seen = set()
    for name, tensor in state.items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        match = _EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor.contiguous()
            continue
        kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        for expert, weight in enumerate(tensor):
            for kind, part in zip(kinds, weight.chunk(len(kinds)), strict=True):
                yield f"{match[1]}{expert}.{kind}.weight", part.contiguous()
