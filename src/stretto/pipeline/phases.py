"""Layers that offer phases, and what does not run when they run in phases."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

from torch import nn

from stretto.layers import Layer, Phase
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


def anatomy_of(layers: Sequence[nn.Module]) -> list[Layer]:
    """Return the phases of each layer; a layer without phases counts as one phase."""
    return [
        Layer(type(layer).__name__, tuple(phase for phase, _ in layer.phases()))
        if is_phased(layer)
        else Layer(type(layer).__name__, (Phase(type(layer).__name__.lower()),))
        for layer in layers
    ]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own on its forward or backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)
