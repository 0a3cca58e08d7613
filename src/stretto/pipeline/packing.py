"""Pytree containers and plain values as msgpack: packed so that another process gets back the same types."""

import importlib
from collections import namedtuple
from typing import Any

import msgspec
import torch
import torch.utils._pytree as pytree

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import LEAF, full_name


class Node(msgspec.Struct, frozen=True, array_like=True):
    """A container of the pytree; a leaf has an empty type."""

    type: str = ""
    context: Any = None
    children: "tuple[Node, ...]" = ()


def node_of(spec: pytree.TreeSpec) -> Node:
    if spec.type is None:
        return Node()
    if spec.type is namedtuple:
        return Node("namedtuple", packed(spec.context), tuple(map(node_of, children(spec))))
    return Node(_importable(spec.type), packed(spec.context), tuple(map(node_of, children(spec))))


def typed(spec: pytree.TreeSpec) -> Any:
    """Return what `==` of specs does not compare: the types in their contexts, since 1 == True."""
    context = spec.context
    plain = context is None or (isinstance(context, list) and all(type(key) is str for key in context))
    own = None if plain else msgspec.msgpack.encode(packed(context))
    return own, tuple(map(typed, children(spec)))


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def spec_of(node: Node) -> pytree.TreeSpec:
    if not node.type:
        return LEAF
    kind = namedtuple if node.type == "namedtuple" else _imported(node.type)
    if kind not in pytree.SUPPORTED_NODES:
        raise PipelineError(f"{node.type} is not registered with torch.utils._pytree in this process")
    return pytree.TreeSpec(kind, unpacked(node.context), [spec_of(child) for child in node.children])


def packed(value: Any) -> Any:
    """Encode a plain value or a container's context so that msgpack restores the same types."""
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes) or (kind is int and -(2**63) <= value < 2**63):
        return value
    match value:
        case int() if kind is int:
            return ["int", str(value)]
        case complex():
            return ["complex", value.real, value.imag]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case torch.device():
            return ["device", str(value)]
        case tuple() | list() if kind in (tuple, list):
            return [kind.__name__, [packed(item) for item in value]]
        case dict() if kind is dict:
            return ["dict", [[packed(key), packed(item)] for key, item in value.items()]]
        case _ if isinstance(value, type) or callable(value):
            return ["name", _importable(value)]
        case _:
            raise PipelineError(f"a layer hands on a container that keeps a {full_name(kind)}, which cannot travel")


def unpacked(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    match value:
        case ["int", digits]:
            return int(digits)
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
        case ["dtype", name]:
            return getattr(torch, name)
        case ["device", name]:
            return torch.device(name)
        case ["tuple", items]:
            return tuple(map(unpacked, items))
        case ["list", items]:
            return list(map(unpacked, items))
        case ["dict", items]:
            return {unpacked(key): unpacked(item) for key, item in items}
        case ["name", name]:
            return _imported(name)
    raise PipelineError(f"a message holds {value!r:.60}, which is nothing that is sent")


def _importable(thing: Any) -> str:
    """Return the import path of a class or function; raise PipelineError if it cannot be imported by that path."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module and name:
        path = f"{module}:{name}"
        try:
            if _imported(path) is thing:
                return path
        except (ImportError, AttributeError):
            pass
    raise PipelineError(
        f"a layer hands on a {name or thing!r}, which another process cannot find; "
        "define it at the top level of a module"
    )


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing
