"""Values that layers hand on: tensors in containers that PyTorch's pytrees know, taken apart and put together."""

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
"""What layers may hand on beside tensors."""

LEAF: pytree.TreeSpec = pytree.tree_structure(0)
"""The structure of a value that is no container."""


@dataclass(slots=True)
class Tree:
    """A value taken apart: its leaves, its containers, and which leaves need gradients.

    A tensor that the value holds twice is twice the same leaf.
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    needs: list[bool]
    shared: tuple[int, ...] = ()
    """Leaves that share memory with another leaf without being the same tensor."""

    @staticmethod
    def whole(value: Value) -> "Tree":
        """A value that stays as it is, such as a user's own input."""
        return Tree([value], LEAF, [False])

    def versions(self) -> list[int]:
        """Of the tensors; what was changed in place has another one."""
        return [version_of(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)]

    def value(self) -> Value:
        """The value again, in new containers: a layer may write into them without changing anybody else's."""
        return self.leaves[0] if self.spec is LEAF else pytree.tree_unflatten(self.leaves, self.spec)

    def copied(self, where: Callable[[Tensor], bool]) -> "Tree":
        """The same, with copies of some tensors."""
        copies = {id(leaf): leaf.clone() for leaf in self.leaves if isinstance(leaf, Tensor) and where(leaf)}
        if not copies:
            return self
        return Tree([copies.get(id(leaf), leaf) for leaf in self.leaves], self.spec, self.needs, self.shared)


def entering(value: Value) -> tuple[Tree, list[Any]]:
    """A user's own input or target, taken apart and cut off from its graph if some of it requires gradients; and its
    leaves as they were, if so.
    """
    leaves, spec = ([value], LEAF) if isinstance(value, Tensor) else pytree.tree_flatten(value)
    needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    if not any(needs):
        return Tree.whole(value), []
    cut = {id(leaf): leaf.detach() for leaf, need in zip(leaves, needs, strict=True) if need}
    return Tree([cut.get(id(leaf), leaf) for leaf in leaves], LEAF if spec == LEAF else spec, needs), leaves


def demand_unchanged(tree: Tree, versions: list[int]) -> None:
    """Raise if a tensor that was handed on has other versions now."""
    if tree.versions() != versions:
        raise PipelineError("a layer changes in place a tensor that it has handed on before; let it hand on a copy")


def take_apart(value: Value, who: str = "a layer", given: Tree | None = None) -> Tree:
    """The tree of what a layer has returned for what it was given; raises if it holds what cannot be handed on."""
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
    before = () if given is None else [storage_of(given.leaves[place]) for place in given.shared]
    return Tree(leaves, LEAF if spec == LEAF else spec, needs, _sharing(leaves, before))


def flatten_once(value: Value, who: str) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and containers of a value, in which no container stands twice: it would be two containers afterwards."""
    seen: set[int] = set()

    def repeats(part: Any) -> bool:
        if isinstance(part, list | dict):
            if id(part) in seen:
                raise PipelineError(f"{who} is given, or hands on, one {type(part).__name__} twice; make a copy of it")
            seen.add(id(part))
        return False

    return pytree.tree_flatten(value, is_leaf=repeats)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; 0 for those of inference mode, of which nobody knows."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _sharing(leaves: list[Any], before: Collection[int]) -> tuple[int, ...]:
    """The places of tensors that share memory with another one, and are not the very same; those that are from before
    share theirs since then, though they were copied.
    """
    by_storage: dict[int, set[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            place = storage_of(leaf)
            by_storage.setdefault(-1 if place in before else place, set()).add(id(leaf))
    if all(len(same) == 1 for same in by_storage.values()):
        return ()
    several = {one for same in by_storage.values() if len(same) > 1 for one in same}
    return tuple(k for k, leaf in enumerate(leaves) if id(leaf) in several)


def tensors_of(value: Value) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def full_name(kind: Any) -> str:
    """A class or function as another process would look it up."""
    return f"{kind.__module__}.{kind.__qualname__}"
