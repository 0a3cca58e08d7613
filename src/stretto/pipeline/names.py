"""Names of parameters and modules, as users see them.

Inside a pipeline every name begins with the number of its layer, as in `nn.Sequential`: "3.weight". Users see the same,
except for a `NamedLayer`, whose names are those of a whole model without any number: "model.norm.weight".
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor, nn

from stretto.pipeline.named_layer import NamedLayer

_T = TypeVar("_T")


def prefix_of(number: int, layer: nn.Module) -> str:
    """Return what users see before the names in a layer."""
    return "" if isinstance(layer, NamedLayer) else str(number)


def modules_of(number: int, layer: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Return a layer's modules, each with its own name and the one that users see.

    Leave out what only holds the modules of a `NamedLayer`: those are nowhere called, and have no name in its model.
    """
    for name, module in layer.named_modules(prefix=str(number)):
        seen = name.partition(".")[2]
        if not isinstance(layer, NamedLayer):
            yield name, name, module
        elif any(seen == path or seen.startswith(f"{path}.") for path in layer.paths):
            yield name, seen, module


def named_modules(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules of all layers, each once, by the names that users see."""
    done: set[nn.Module] = set()
    for number, layer in layers.items():
        for _, name, module in modules_of(number, layer):
            if module not in done:
                done.add(module)
                yield name, module


class Names:
    """Translates names, on every rank alike."""

    def __init__(self, named: Collection[int]) -> None:
        """`named` are the numbers of all `NamedLayer`s, including other ranks'."""
        self._named = frozenset(named)
        self.together: Mapping[str, tuple[str, ...]] = {}
        """For each tied name, all names of its tie; each with its layer's number."""

    def seen(self, name: str) -> str:
        """Return the name that users see."""
        number, _, rest = name.partition(".")
        return rest if rest and int(number) in self._named else name

    def all_seen(self, named: Iterable[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
        return ((self.seen(name), value) for name, value in named)

    def in_text(self, text: str) -> str:
        """Return an error of PyTorch's with the names that users see."""
        return re.sub(r"(?<![\w.])\d+\.(?=[A-Za-z_])", lambda found: self.seen(f"{found[0]}x")[:-1], text)

    def own(self, state: Mapping[str, Tensor], layers: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """Return the part of a state dict that is for these layers, by internal names.

        Where the state dict has a tied parameter under one of its names only, it is taken for the others too.
        """
        own: dict[str, Tensor] = {}
        for number, layer in layers.items():
            starts = tuple(f"{path}." for path in layer.paths) if isinstance(layer, NamedLayer) else (f"{number}.",)
            before = f"{number}." if isinstance(layer, NamedLayer) else ""
            own |= {f"{before}{name}": value for name, value in state.items() if name.startswith(starts)}
        for name, tied in self.together.items():
            values = [state[other] for other in map(self.seen, tied) if other in state]
            if int(name.partition(".")[0]) in layers and name not in own and values:
                own[name] = values[0]
        return own


def clash_of(layers: Iterable[tuple[int, nn.Module]]) -> str | None:
    """Return an error text if users would see one name for two parameters or buffers, else None."""
    seen: dict[str, tuple[int, int]] = {}
    for number, layer in layers:
        if not isinstance(layer, NamedLayer):
            continue
        for name, tensor in layer.state_dict(keep_vars=True).items():
            other, first = seen.setdefault(name, (id(tensor), number))
            if other != id(tensor):
                return f"layers {first} and {number} both have a {name}, which is not the same; give them other names"
    return None
