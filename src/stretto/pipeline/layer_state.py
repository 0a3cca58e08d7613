"""Tensors that layers hold and that their phases replace, where lanes are streams: memory of the phase's stream."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.pipeline.contents import Contents
from stretto.pipeline.module_attributes import attributes_of
from stretto.program.anatomy import Part

_Slot = tuple[nn.Module, str]
"""A module, and the name of a buffer or attribute."""


class LayerState:
    """Module buffers and attributes in which phases of other lanes than compute have put new tensors."""

    def __init__(self, layers: Mapping[int, nn.Module], parts: Sequence[Part]) -> None:
        """`layers` are those of a stage in order, and `parts` its phases."""
        modules = list(layers.values())
        self._layers = [modules[part.layer] for part in parts]
        self._replaced: set[_Slot] = set()

    @contextmanager
    def watching(self, part: int) -> Iterator[None]:
        """Note what a part replaces within this context."""
        before = {slot: _tensors(value) for slot, value in _slots(self._layers[part])}
        yield
        for slot, value in _slots(self._layers[part]):
            known = before.get(slot, ())
            if any(all(tensor is not other for other in known) for tensor in _tensors(value)):
                self._replaced.add(slot)

    def replaced(self) -> list[Tensor]:
        """Return the tensors that are now where others have been."""
        return [tensor for slot in self._replaced for tensor in _tensors(_value(*slot))]


def _slots(layer: nn.Module) -> Iterator[tuple[_Slot, Any]]:
    for module in layer.modules():
        for name, value in (*module._buffers.items(), *attributes_of(module).items()):
            yield (module, name), value


def _value(module: nn.Module, name: str) -> Any:
    return module._buffers[name] if name in module._buffers else vars(module).get(name)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors that a value is or holds."""
    return [value] if isinstance(value, Tensor) else [tensor for _, tensor, _ in Contents([("", value)]).tensors]
