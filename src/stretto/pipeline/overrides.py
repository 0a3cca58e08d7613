"""Forwards of modules, replaced while a step runs and put back after it: between steps modules are the user's own."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A forward as a function of the module and its arguments. It is called `forward`, by which pickle finds it."""

Make = Callable[[Forward | None], Forward | None]
"""The forward that replaces a module's, of one that was set on the module itself, if any; None leaves it alone."""


class Overrides:
    """Opened around a step.

    A replacement is bound to its module like any method, so that a copy of the module that is made meanwhile has it
    bound to the copy, where it runs the module's own forward.
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
                vars(module)["forward"] = bound = MethodType(forward, module)
                self._before.append((module, before, bound))

    def __exit__(self, *error: object) -> None:
        while self._before:
            module, before, bound = self._before.pop()
            if vars(module).get("forward") is not bound:
                continue  # somebody has replaced it since, and meant to
            if before is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = before
