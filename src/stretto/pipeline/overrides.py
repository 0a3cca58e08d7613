"""Replaces modules' forwards for the duration of a step."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
"""A forward as a function of the module and its arguments. Its name must be `forward`, for pickle to find it."""

Make = Callable[[Forward | None], Forward | None]
"""Returns the replacement of a module's forward, or None to keep it. Takes the forward set on the instance, if any."""


class Overrides:
    """A context that replaces forwards during a step and restores them afterwards.

    A replacement is bound to its module like any method. A copy of the module made during the step gets it bound to
    the copy, where it runs the module's original forward.
    """

    def __init__(self) -> None:
        self._makers: list[tuple[nn.Module, Make]] = []
        self._before: list[tuple[nn.Module, Forward | None, MethodType]] = []

    def add(self, module: nn.Module, make: Make) -> None:
        self._makers.append((module, make))

    def __enter__(self) -> None:
        for module, make in self._makers:
            before = vars(module).get("forward")
            forward = make(before)
            if forward is not None:
                _show_signature(forward, module, before)
                vars(module)["forward"] = bound = MethodType(forward, module)
                self._before.append((module, before, bound))

    def __exit__(self, *error: object) -> None:
        while self._before:
            module, before, bound = self._before.pop()
            if vars(module).get("forward") is not bound:
                continue  # user code replaced it during the step; keep theirs
            if before is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = before


def usual_forward(module: nn.Module) -> Forward:
    """Return the forward of a module's class, bound to the module."""
    if isinstance(module, torch.jit.ScriptModule):
        return module.__getattr__("forward")  # type: ignore[no-any-return]
    function = _of_class(module)
    bind = getattr(type(function), "__get__", None)
    bound: Forward = function if bind is None else bind(function, module, type(module))
    return bound


def _of_class(module: nn.Module) -> Any:
    """Return what a module's class has as its forward, as it was defined: a static method, say."""
    return next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))


def _show_signature(forward: Forward, module: nn.Module, before: Forward | None) -> None:
    """Let `inspect.signature` find the signature of the forward that is replaced: models decide by it what to pass."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    replaced = before.__func__ if isinstance(before, MethodType) else _of_class(module) if before is None else before
    if isinstance(replaced, FunctionType) and (before is None or isinstance(before, MethodType)):
        vars(forward)["__wrapped__"] = replaced
        return
    with suppress(TypeError, ValueError):  # functions in C++ may have none
        signature = inspect.signature(usual_forward(module) if before is None else before)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(forward)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
