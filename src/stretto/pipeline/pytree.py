"""Values passed between layers: flattens pytrees of tensors and rebuilds them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.ir.errors import PipelineError

Value: TypeAlias = Any
"""A tensor, a plain value, or a container of values: tuple, list, dict, or any type registered with pytrees."""

PLAIN = frozenset({NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""The types that layers may return besides tensors."""

LEAF: pytree.TreeSpec = pytree.tree_structure(0)
"""The structure of a value that is not a container."""


@dataclass(slots=True)
class Tree:
    """A flattened value: its leaves, its containers, and which leaves need gradients.

    A tensor that occurs twice in the value is the same object in both leaves.
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    needs: list[bool]
    shared: tuple[int, ...] = ()
    """Indices of leaves that share memory with another leaf without being the same tensor."""

    @staticmethod
    def whole(value: Value) -> "Tree":
        """Wrap a value as a single leaf, unflattened, such as a user's input."""
        return Tree([value], LEAF, [False])

    def versions(self) -> list[int]:
        """Return the tensors' versions; an in-place change increments a version."""
        return [version_of(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)]

    def value(self) -> Value:
        """Rebuild the value in new containers, so that a layer may modify them."""
        return self.leaves[0] if self.spec is LEAF else pytree.tree_unflatten(self.leaves, self.spec)

    def copied(self, where: Callable[[Tensor], bool]) -> "Tree":
        """Return the tree with the tensors for which `where` is true cloned."""
        copies = {id(leaf): leaf.clone() for leaf in self.leaves if isinstance(leaf, Tensor) and where(leaf)}
        if not copies:
            return self
        return Tree([copies.get(id(leaf), leaf) for leaf in self.leaves], self.spec, self.needs, self.shared)


def entering(value: Value) -> tuple[Tree, list[Any]]:
    """Flatten a user's input or target, and detach the leaves that require gradients.

    Also return the original leaves. If no leaf requires gradients, return the value as a single leaf and an empty list.
    """
    leaves, spec = ([value], LEAF) if isinstance(value, Tensor) else pytree.tree_flatten(value)
    needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    if not any(needs):
        return Tree.whole(value), []
    cut = {id(leaf): leaf.detach() for leaf, need in zip(leaves, needs, strict=True) if need}
    return Tree([cut.get(id(leaf), leaf) for leaf in leaves], LEAF if spec == LEAF else spec, needs), leaves


def validate_unchanged(tree: Tree, versions: list[int]) -> None:
    """Raise PipelineError if a tensor of the tree was changed in place since it had these versions."""
    if tree.versions() != versions:
        raise PipelineError("a layer changes in place a tensor that it has handed on before; let it hand on a copy")


def take_apart(value: Value, who: str = "a layer", inputs: Tree | None = None) -> Tree:
    """Flatten the value that a layer returned for `inputs`. Raise PipelineError for unsupported leaves."""
    if isinstance(value, Tensor):
        return Tree([value], LEAF, [value.requires_grad])
    leaves, spec = flatten_once(value, who)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
            raise PipelineError(
                f"{who} hands on a {full_name(type(leaf))}; layers hand on tensors, plain values, and containers "
                "that torch.utils._pytree knows (tuple, list, dict, named tuples, registered classes)"
            )
    needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    before = () if inputs is None else [storage_of(inputs.leaves[place]) for place in inputs.shared]
    return Tree(leaves, LEAF if spec == LEAF else spec, needs, _sharing(leaves, before))


def flatten_once(value: Value, who: str) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a value. Raise PipelineError if a list or dict occurs twice: rebuilding would make two of it."""
    seen: set[int] = set()

    def repeats(part: Any) -> bool:
        if isinstance(part, list | dict):
            if id(part) in seen:
                raise PipelineError(f"{who} is given, or hands on, one {type(part).__name__} twice; make a copy of it")
            seen.add(id(part))
        return False

    return pytree.tree_flatten(value, is_leaf=repeats)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count changes."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _sharing(leaves: list[Any], before: Collection[int]) -> tuple[int, ...]:
    """Return the indices of tensors that share memory with another tensor without being the same object.

    Storages in `before` count as one: their tensors shared memory in the layer's input, though transfers may have
    copied them since.
    """
    by_storage: dict[int, set[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = storage_of(leaf)
            by_storage.setdefault(-1 if storage in before else storage, set()).add(id(leaf))
    if all(len(same) == 1 for same in by_storage.values()):
        return ()
    several = {one for same in by_storage.values() if len(same) > 1 for one in same}
    return tuple(k for k, leaf in enumerate(leaves) if id(leaf) in several)


def tensors_of(value: Value) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def full_name(kind: Any) -> str:
    """Return the qualified name of a class or function, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"
