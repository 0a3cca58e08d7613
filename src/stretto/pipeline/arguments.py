"""What a recomputed module is given besides tensors and plain values: what of it may change, and must be followed."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import PLAIN, full_name, version_of

_CONSTANT = (
    Enum,
    torch.Size,
    slice,
    range,
    type,
    ModuleType,
    MethodDescriptorType,
    WrapperDescriptorType,
    ClassMethodDescriptorType,
    OpOverload,
    OpOverloadPacket,
    torch.jit.ScriptFunction,
)
_BINDINGS = ("PyCapsule", "pybind11_")  # what functions that were written in C++ are bound to


class Arguments:
    """The modules and tensors within the arguments of a recomputed module. Most modules are given neither."""

    __slots__ = ("_name", "_tensors", "modules")

    def __init__(self, name: str) -> None:
        self._name = name
        self.modules: list[nn.Module] = []
        """Modules that may run, or be read."""
        self._tensors: list[tuple[Tensor, int]] = []

    def add(self, leaf: Any) -> None:
        """Follow an argument. Raise PipelineError if it may change in a way that nothing here would notice."""
        if not self._follow(leaf):
            raise PipelineError(
                f"{self._name} is given a {full_name(type(leaf))}, which may be another one when {self._name} is "
                "recomputed; recompute what is around it, or register the class with torch.utils._pytree"
            )

    def validate(self) -> None:
        """Raise PipelineError if a tensor within an argument was changed in place."""
        if any(version_of(tensor) != version for tensor, version in self._tensors):
            raise PipelineError(f"a tensor within what {self._name} is given was changed in place before its backward")

    def _follow(self, value: Any) -> bool:
        """Return whether all that a value consists of is constant, or can be followed."""
        if type(value) in PLAIN or isinstance(value, _CONSTANT):
            return True
        if isinstance(value, Tensor):
            self._tensors.append((value, version_of(value)))
            return True
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return True
        if isinstance(value, FunctionType):
            self.modules += (held for held in _closed_over(value) if isinstance(held, nn.Module))
            return True
        if isinstance(value, MethodType | BuiltinFunctionType):
            owner = value.__self__
            return type(owner).__name__.startswith(_BINDINGS) or self._follow(owner)
        if type(value) is partial:
            return all(map(self._follow, (value.func, *value.args, *value.keywords.values())))
        if type(value) in (tuple, frozenset):
            return all(map(self._follow, value))
        if is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009
            return all(self._follow(getattr(value, field.name)) for field in fields(value))
        return False


def flattened(name: str, values: Any) -> tuple[list[Any], pytree.TreeSpec, Arguments]:
    """Take arguments apart. The leaves that are neither tensors nor plain are followed."""
    leaves, spec = pytree.tree_flatten(values)
    followed = Arguments(name)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
            followed.add(leaf)
    return leaves, spec, followed


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that has no value yet
            yield cell.cell_contents
