"""Replaces modules' forwards for the duration of a step."""

from collections.abc import Callable
from types import MethodType
from typing import Any

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
