"""Layers that offer phases, and what does not run when they run in phases."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeGuard, runtime_checkable

from torch import nn

from stretto.ir.errors import PipelineError
from stretto.layers import Layer, Phase
from stretto.moe.experts import sharded_experts
from stretto.pipeline.named_layer import NamedLayer
from stretto.pipeline.pytree import Value


@runtime_checkable
class Phased(Protocol):
    """A layer split into phases. Running them in order, each on the result of the previous one, equals its forward."""

    def phases(self) -> Sequence[tuple[Phase, Callable[[Value], Value]]]: ...


def is_phased(layer: nn.Module) -> TypeGuard[Phased]:
    return isinstance(layer, Phased) and callable(layer.phases)


def bypassed(number: int, layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a layer whose forwards do not run if it runs in phases, by the names that users see."""
    modules: dict[str, nn.Module] = {f"layer {number}": layer}
    if isinstance(layer, NamedLayer):
        modules |= {path: layer.module(path) for path in layer.paths}
    return modules if is_phased(layer) else {}


def anatomy_of(layer: nn.Module) -> Layer:
    """Return the name and the phases of a layer, for planning: its `layer_name` or its class's name.

    Without phases it counts as one, called by its `phase_name` or the layer's name in lower case. If the layer has
    experts on several ranks, and no phase in which these exchange tokens, they may do so in all.
    """
    name = _own_name(layer, "layer_name", type(layer).__name__)
    alone = _own_name(layer, "phase_name", name.lower())
    phases = tuple(phase for phase, _ in layer.phases()) if is_phased(layer) else (Phase(alone),)
    if not phases[-1].backward:
        raise PipelineError(f"the last phase of a layer has a backward, and {phases[-1].name!r} of {name} has none")
    if sharded_experts(layer) and not any(phase.is_joint for phase in phases):
        phases = tuple(replace(phase, joint=True) for phase in phases)
    return Layer(name, phases)


def _own_name(layer: nn.Module, attribute: str, default: str) -> str:
    """Return the name that a layer gives itself in an attribute, if it does."""
    name = getattr(layer, attribute, default)
    if not isinstance(name, str) or not name:
        raise PipelineError(f"{attribute} of {type(layer).__name__} is a name, such as 'moe' (got {name!r:.40})")
    return name
