"""The parameters that a recomputed module runs with: the same ones both times, and unchanged."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import version_of


class _Entry(NamedTuple):
    table: dict[str, nn.Parameter | None]
    """The parameters of its module."""
    key: str
    parameter: nn.Parameter
    version: int
    data: Tensor | None
    """Its memory; None if it is a special one, whose memory is not looked at."""
    needs: bool


class RunParameters:
    """The parameters of modules when they ran first."""

    __slots__ = ("_entries", "_name")

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        self._name = name
        self._entries = [
            _Entry(module._parameters, key, it, version_of(it), _memory(it), it.requires_grad)
            for module in modules
            for key, it in module._parameters.items()
            if it is not None and not self._is_lazy(key, it)
        ]

    def _is_lazy(self, key: str, parameter: nn.Parameter) -> bool:
        """Raise PipelineError if a parameter is made by the first forward, and return False."""
        if is_lazy(parameter):
            raise PipelineError(
                f"{self._name} makes its {key!r} in its first forward, so it cannot be recomputed; run a forward of it "
                "before the pipeline is made"
            )
        return False

    def validate(self) -> None:
        """Raise PipelineError if the modules have other parameters now, or changed ones."""
        for table, key, parameter, version, data, _ in self._entries:
            if table.get(key) is not parameter:
                raise PipelineError(
                    f"{self._name} ran with another {key!r} than it has when it is recomputed, as with "
                    "torch.func.functional_call; recompute what is around it"
                )
            if version_of(parameter) != version or _moved(parameter, data):
                raise PipelineError(f"a parameter of {self._name} was changed before its backward")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo what happens to the parameters within this context, which may end in the middle of a forward."""
        try:
            yield
        finally:
            for table, key, parameter, _, data, needs in self._entries:
                table[key] = parameter
                if data is not None and _moved(parameter, data):
                    parameter.data = data
                if parameter.requires_grad != needs:
                    parameter.requires_grad_(needs)


def _memory(parameter: Tensor) -> Tensor | None:
    plain = type(parameter) in (nn.Parameter, Tensor) and parameter.layout is torch.strided
    return parameter.data if plain else None


def _moved(parameter: Tensor, data: Tensor | None) -> bool:
    return data is not None and not parameter.is_set_to(data)
