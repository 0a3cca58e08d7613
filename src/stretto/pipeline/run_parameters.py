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

    __slots__ = ("_name", "entries")

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        self._name = name
        self.entries = [
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
        for table, key, parameter, version, data, _ in self.entries:
            if key not in table or table[key] is not parameter:
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
            for table, key, parameter, _, data, needs in self.entries:
                table[key] = parameter
                if data is not None and _moved(parameter, data):
                    parameter.data = data
                if parameter.requires_grad != needs:
                    parameter.requires_grad_(needs)


class Accumulated:
    """The gradients that a run has added to `.grad` itself, by a `backward()`; a second run would add them again."""

    __slots__ = ("_before", "_name", "_tensors")

    def __init__(self, name: str, parameters: RunParameters, given: Iterable[Tensor]) -> None:
        """`given` are the tensors that the run is given."""
        self._name = name
        self._tensors: list[Tensor] = [entry.parameter for entry in parameters.entries if entry.needs]
        self._tensors += [tensor for tensor in given if tensor.is_leaf and tensor.requires_grad]
        self.start()

    def start(self) -> None:
        """Look only at what is added from now on."""
        self._before = list(map(_gradient, self._tensors))

    def validate(self) -> None:
        """Raise PipelineError if anything was added."""
        for tensor, before in zip(self._tensors, self._before, strict=True):
            if tensor.grad is not None and _gradient(tensor) != before:
                raise PipelineError(
                    f"{self._name} adds gradients to .grad in its forward, by backward(), and would add them again "
                    "when it is recomputed; keep what does so, or use torch.autograd.grad"
                )


def _gradient(tensor: Tensor) -> tuple[int, int] | None:
    """Return what tells a gradient from one that was added to it."""
    return None if tensor.grad is None else (id(tensor.grad), version_of(tensor.grad))


def _memory(parameter: Tensor) -> Tensor | None:
    plain = type(parameter) in (nn.Parameter, Tensor) and parameter.layout is torch.strided
    return parameter.data if plain else None


def _moved(parameter: Tensor, data: Tensor | None) -> bool:
    return data is not None and not parameter.is_set_to(data)
