"""What is set on modules: attributes, also in slots, and what every module has: submodules and hooks."""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

import torch
from torch import nn

_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_TABLES = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return what is set on a module, besides what every module has."""
    found = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
    return found | slots_of(module) if _slots(module) else found


def set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module these attributes, and no others."""
    table, slots = vars(module), _slots(module)
    for key in attributes_of(module).keys() - attributes.keys() - slots.keys():
        del table[key]
    table.update({key: value for key, value in attributes.items() if key not in slots} if slots else attributes)
    set_slots(module, attributes)


class Structure:
    """The submodules, hooks and replaced forwards of modules, to be compared or restored."""

    __slots__ = ("_entries",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._entries = [
            (module, vars(module).get("forward"), [(table, dict(table)) for table in _tables_of(module)])
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # these cannot change
        ]

    def has_changed(self) -> bool:
        """Return whether anything is not what it was."""
        return any(
            vars(module).get("forward") is not forward or any(_differ(table, was) for table, was in tables)
            for module, forward, tables in self._entries
        )

    def restore(self) -> None:
        """Put everything back."""
        for module, forward, tables in self._entries:
            own = vars(module)
            if forward is not None:
                own["forward"] = forward
            else:
                own.pop("forward", None)
            for table, was in tables:
                if _differ(table, was):
                    table.clear()
                    table.update(was)


def _tables_of(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the tables of a module's submodules and hooks."""
    own = vars(module)
    return [table for name in _TABLES if isinstance(table := own.get(name), dict)]


def _differ(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether tables have other entries, or the same in another order."""
    return len(one) != len(other) or not all(
        key == key_before and value is before
        for (key, value), (key_before, before) in zip(one.items(), other.items(), strict=True)
    )


def slots_of(module: nn.Module) -> dict[str, Any]:
    """Return what the slots of a module's class hold."""
    found = {}
    for name, slot in _slots(module).items():
        with suppress(AttributeError):  # it holds nothing
            found[name] = slot.__get__(module)
    return found


def set_slots(module: nn.Module, values: dict[str, Any]) -> None:
    """Let the slots of a module's class hold these values, and no others."""
    for name, slot in _slots(module).items():
        if name in values:
            slot.__set__(module, values[name])
        else:
            with suppress(AttributeError):
                slot.__delete__(module)


def _slots(module: nn.Module) -> dict[str, Any]:
    kind: Any = type(module)
    return _slots_of_class(kind)


@lru_cache
def _slots_of_class(kind: Any) -> dict[str, Any]:
    """Return the slots of a class, which nearly no module has."""
    return {
        name: slot
        for base in reversed(kind.__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    }
