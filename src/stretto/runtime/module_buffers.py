"""Buffers that forwards change, such as running statistics: a recomputation finds them as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stretto.ir.errors import PipelineError

_Place: TypeAlias = tuple[nn.Module, str]
Snapshot: TypeAlias = dict[_Place, Tensor]
"""Copies of the buffers that a forward has changed, from before it."""


class ModuleBuffers:
    """The buffers of a module that is recomputed."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._modules = name, list(module.modules())
        self._changing: set[_Place] | None = None  # those that forwards change; unknown before the first

    @contextmanager
    def followed(self) -> Iterator[Snapshot]:
        """A first run: the snapshot is complete when it has ended."""
        before = {
            (module, key): (buffer, buffer._version)
            for module in self._modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        copies = {
            place: buffer.clone()
            for place, (buffer, _) in before.items()
            if self._changing is None or place in self._changing
        }
        yield copies
        changed = {
            (module, key)
            for (module, key), (buffer, version) in before.items()
            if isinstance(module, _NormBase)  # its statistics change without a new version
            or (now := module._buffers.get(key)) is not buffer
            or now._version != version
        }
        if self._changing is None:
            self._changing = changed
        elif missing := changed - self._changing:
            _, key = next(iter(missing))
            raise PipelineError(
                f"{self._name} changes its buffer {key!r} in some forwards only, so it cannot be recomputed exactly"
            )
        for place in copies.keys() - changed:
            del copies[place]

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        """A second run: on the buffers as they were before the first; what it does to them is forgotten."""
        now = {(module, key): module._buffers.get(key) for module, key in snapshot}
        for (module, key), buffer in snapshot.items():
            module._buffers[key] = buffer.clone()
        try:
            yield
        finally:
            for (module, key), current in now.items():
                module._buffers[key] = current
