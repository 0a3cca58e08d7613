"""Tensors that layers hold and that their phases replace, where lanes are streams: memory of the phase's stream."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.program.anatomy import Part


class LayerState:
    """Module buffers and attributes that phases of other lanes than compute have replaced by new tensors."""

    def __init__(self, layers: Mapping[int, nn.Module], parts: Sequence[Part]) -> None:
        """`layers` are those of a stage in order, and `parts` its phases."""
        modules = list(layers.values())
        self._modules = [modules[part.layer] for part in parts]
        self._replaced: dict[nn.Module, set[tuple[nn.Module, str]]] = {module: set() for module in modules}

    @contextmanager
    def watching(self, part: int) -> Iterator[None]:
        """Note what a part replaces within this context."""
        layer = self._modules[part]
        before = dict(_slots(layer))
        yield
        self._replaced[layer] |= {slot for slot, tensor in _slots(layer) if before.get(slot) is not tensor}

    def replaced(self, part: int) -> list[Tensor]:
        """Return the tensors that are now where the part's layer has had others."""
        found = (_value(*slot) for slot in self._replaced[self._modules[part]])
        return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _slots(layer: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    for module in layer.modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor):
                yield (module, name), value


def _value(module: nn.Module, name: str) -> Any:
    return module._buffers[name] if name in module._buffers else vars(module).get(name)
