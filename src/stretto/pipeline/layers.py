"""The layers of a pipeline: how they are built, validated and found by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from stretto.costs import Costs, PhaseTimes
from stretto.ir.errors import PipelineError, PlanError
from stretto.layers import Layer
from stretto.pipeline.names import modules_of, prefix_of

Layers: TypeAlias = Sequence[nn.Module] | nn.ModuleList | nn.Sequential


def even_costs(stages: Sequence[Sequence[Layer]]) -> Costs:
    """Return default costs by which pairs are woven: compute phases take 1, communication phases 0.9.

    Phases without a backward take no time: they move a few numbers.
    """
    phases = {phase for stage in stages for layer in stage for phase in layer.phases}
    times = {"compute": PhaseTimes(1, 1, 1), "comm": PhaseTimes(0.9, 0.9)}
    return Costs(phases={phase.name: times[phase.lane] if phase.backward else PhaseTimes() for phase in phases})


def builder(layers: Layers | Callable[[int], nn.Module], count: int | None) -> tuple[Callable[[int], nn.Module], int]:
    """Return a function that builds the layer of a number, and the number of layers."""
    if isinstance(layers, Sequence | nn.ModuleList | nn.Sequential) and not isinstance(layers, str):
        for number, layer in enumerate(layers):
            if not isinstance(layer, nn.Module):
                raise PipelineError(f"layer {number} is no nn.Module (got {type(layer).__name__})")
        return layers.__getitem__, len(layers)
    if isinstance(layers, nn.Module) or not callable(layers):
        raise PipelineError(
            f"layers are a list of modules, or a function that builds one (got {type(layers).__name__})"
        )
    if count is None:
        raise PlanError("layers are given as a function that builds one, so layer_count is needed")
    return layers, count


def validate_own_statistics(layers: Layers, shares: Sequence[Sequence[int]]) -> None:
    """Raise PipelineError if stages share a norm with running statistics: each stage would keep its own."""
    seen: dict[int, tuple[int, str]] = {}
    for stage, share in enumerate(shares):
        for number in share:
            for _, name, module in modules_of(number, layers[number]):
                if isinstance(module, _NormBase) and module.running_mean is not None:
                    first, other = seen.setdefault(id(module), (stage, name))
                    if first != stage:
                        raise PipelineError(
                            f"{other} and {name} are one module, which keeps running statistics, in two stages"
                        )


_SHARDED = {
    FSDPModule: "is sharded by FSDP (fully_shard)",
    FullyShardedDataParallel: "is wrapped in FSDP (FullyShardedDataParallel)",
    DistributedDataParallel: "is replicated by DDP (DistributedDataParallel, replicate)",
}


def unfit(layers: Mapping[int, nn.Module]) -> str | None:
    """Return why a pipeline cannot train these layers, or None."""
    for number, layer in layers.items():
        for _, name, module in modules_of(number, layer):
            registry = _get_registry(module) or {}
            for kind, how in _SHARDED.items():
                if isinstance(module, kind) or (kind is DistributedDataParallel and "replicate" in registry):
                    return (
                        f"{name} {how}, which reduces gradients by itself, in the middle of a step; give the plain "
                        'module, and a mesh with a dimension "dp", as docs/training.md shows'
                    )
        for name, parameter in layer.named_parameters(prefix=prefix_of(number, layer)):
            if parameter.requires_grad and parameter.dtype == torch.float16:
                return f"{name} is float16, whose gradients need scaling, which a pipeline does not do; use bfloat16"
    return None


def is_sparse(module: nn.Module) -> bool:
    """Return whether a module's parameters get sparse gradients."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
