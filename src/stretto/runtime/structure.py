"""Values that layers hand on: a tensor, or tuples, lists and dicts of them, taken apart, described and put together."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from stretto.ir.errors import StrettoError

Value: TypeAlias = Any
"""A tensor, or a tuple, list or dict of values; anything else is handed on as it is."""


def leaves_of(value: Value) -> list[Any]:
    """Everything in a value that is no tuple, list or dict, in order."""
    return [value] if isinstance(value, Tensor) else list(_leaves(value))


def tensors_of(value: Value) -> list[Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def _leaves(value: Value) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


class Room(NamedTuple):
    """What a tensor was, without the tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def rooms_of(value: Value) -> list[Room | None]:
    """Of each leaf that can have a gradient, what it is."""
    return [
        Room(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) and leaf.is_floating_point() else None
        for leaf in leaves_of(value)
    ]


def rebuilt(value: Value, leaves: Sequence[Any]) -> Value:
    """The same value with other leaves."""
    return leaves[0] if isinstance(value, Tensor) else _rebuilt(value, iter(leaves))


def _rebuilt(value: Value, leaves: Iterator[Any]) -> Value:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_rebuilt(item, leaves) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_rebuilt(item, leaves) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _rebuilt(item, leaves)) for key, item in value.items())
    return next(leaves)


class _Tensor(msgspec.Struct, tag="tensor"):
    shape: list[int]
    dtype: str


class _Sequence(msgspec.Struct, tag="sequence"):
    items: list["Description"]
    is_list: bool


class _Dict(msgspec.Struct, tag="dict"):
    items: dict[str, "Description"]


class _Plain(msgspec.Struct, tag="plain"):
    value: int | float | str | bool | None


Description: TypeAlias = _Tensor | _Sequence | _Dict | _Plain


def describe(value: Value) -> Description:
    """What a value is made of, so that another process can make room for it."""
    match value:
        case Tensor():
            return _Tensor(list(value.shape), str(value.dtype).removeprefix("torch."))
        case tuple() | list():
            return _Sequence([describe(item) for item in value], isinstance(value, list))
        case dict() if all(isinstance(key, str) for key in value):
            return _Dict({key: describe(item) for key, item in value.items()})
        case int() | float() | str() | None:
            return _Plain(value)
        case _:
            raise StrettoError(
                f"stages hand on tensors, and tuples, lists and dicts of them (got {type(value).__name__})"
            )


DESCRIPTIONS: msgspec.json.Decoder[Description] = msgspec.json.Decoder(Description)


def make_room(what: Description, device: torch.device) -> Value:
    """A value as it was described, its tensors empty."""
    match what:
        case _Tensor():
            return torch.empty(what.shape, dtype=getattr(torch, what.dtype), device=device)
        case _Sequence():
            items = [make_room(item, device) for item in what.items]
            return items if what.is_list else tuple(items)
        case _Dict():
            return {key: make_room(item, device) for key, item in what.items.items()}
        case _Plain():
            return what.value
