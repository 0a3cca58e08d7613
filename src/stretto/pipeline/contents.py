"""What attributes and arguments hold: containers, tensors and generators, to be compared or restored later."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import is_
from typing import Any

import torch
from torch import Tensor

from stretto.pipeline.pytree import PLAIN, version_of

_CONSTANT = Enum | slice | range | type
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)  # a subclass comes before its base


class Contents:
    """What named values hold now: the entries of containers, the versions of tensors, the states of generators.

    Containers are lists, dicts, sets, deques and their subclasses, also within others, tuples and frozen dataclasses.
    """

    __slots__ = ("_containers", "_generators", "others", "tensors")

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._containers: list[tuple[str, Any, tuple[Any, ...]]] = []
        self._generators: list[tuple[str, torch.Generator, Tensor]] = []
        self.tensors: list[tuple[str, Tensor, int]] = []
        """Each tensor once, with its name and version."""
        self.others: list[Any] = []
        """Objects that are not looked into, and may change."""
        waiting = list(named)
        seen: set[int] = set()
        while waiting:
            name, value = waiting.pop()
            if type(value) in PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                self.tensors.append((name, value, version_of(value)))
            elif isinstance(value, torch.Generator):
                self._generators.append((name, value, value.get_state()))
            elif isinstance(value, tuple | frozenset):
                waiting += [(name, inner) for inner in value]
            elif isinstance(value, _KINDS):
                entries = _entries(value)
                self._containers.append((name, value, entries))
                waiting += [(name, inner) for inner in entries]
                if type(value) not in _KINDS and hasattr(value, "__dict__"):
                    waiting.append((name, vars(value)))
            elif _is_frozen(value):
                waiting += [(name, getattr(value, field.name, None)) for field in fields(value)]
            elif not isinstance(value, _CONSTANT):
                self.others.append(value)

    def changed(self) -> str | None:
        """Return the name of something that has changed since, or None."""
        for name, container, entries in self._containers:
            if not _are_same(entries, _entries(container)):
                return name
        for name, generator, state in self._generators:
            if not torch.equal(state, generator.get_state()):
                return name
        return self.changed_tensor()

    def changed_tensor(self) -> str | None:
        """Return the name of a tensor that was changed in place since, or None."""
        return next((name for name, tensor, version in self.tensors if version_of(tensor) != version), None)

    def now(self) -> "Contents":
        """Return what the same containers and generators hold now."""
        contents = Contents(())
        contents._containers = [(name, container, _entries(container)) for name, container, _ in self._containers]
        contents._generators = [(name, generator, generator.get_state()) for name, generator, _ in self._generators]
        return contents

    def restore(self) -> None:
        """Give containers and generators what they held. Tensors stay as they are."""
        for _, container, entries in self._containers:
            if not _are_same(entries, _entries(container)):
                _refill(container, entries)
        for _, generator, state in self._generators:
            generator.set_state(state)


def _are_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return whether two tuples hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _is_frozen(value: Any) -> bool:
    """Return whether a value is a frozen dataclass."""
    return is_dataclass(value) and not isinstance(value, type) and bool(value.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _kind(container: Any) -> Any:
    """Return the built-in class of a container, whose methods no subclass has replaced."""
    return next(kind for kind in _KINDS if isinstance(container, kind))


def _entries(container: Any) -> tuple[Any, ...]:
    """Return what a container holds: of a dict its keys, and then its values."""
    kind = _kind(container)
    if issubclass(kind, dict):
        return (*kind.keys(container), *kind.values(container))
    return tuple(kind.__iter__(container))


def _refill(container: Any, entries: tuple[Any, ...]) -> None:
    kind = _kind(container)
    kind.clear(container)
    if issubclass(kind, dict):
        half = len(entries) // 2
        for key, value in zip(entries[:half], entries[half:], strict=True):
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.update(container, entries)
    else:
        kind.extend(container, entries)
