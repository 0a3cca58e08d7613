"""What a message is, told to the process that receives it: containers, plain values, types and shapes of tensors."""

import importlib
from collections import namedtuple
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import LEAF, Tree, full_name, storage_of


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None if it is contiguous."""
    dtype: str
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        dtype = getattr(torch, self.dtype)
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)


class _Same(msgspec.Struct, frozen=True, array_like=True, tag="same"):
    """The tensor of an earlier leaf once more."""

    leaf: int


class _Plain(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    value: msgspec.Raw
    """As `_packed`: compared by its bytes, so that 1 is not True and NaN is NaN."""


_Leaf: TypeAlias = TensorMeta | _Same | _Plain


class _Node(msgspec.Struct, frozen=True, array_like=True):
    """A container; a leaf has no type."""

    type: str = ""
    context: Any = None
    children: "tuple[_Node, ...]" = ()


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """A description as it travels."""

    root: _Node
    leaves: tuple[_Leaf, ...]
    shared: tuple[int, ...]
    rows: int


class Description:
    """All of a message but its tensors' numbers. Two that are equal make the same value of the same numbers."""

    __slots__ = ("leaves", "lone", "metas", "rows", "shared", "spec")

    def __init__(
        self, spec: pytree.TreeSpec, leaves: Sequence[_Leaf], shared: tuple[int, ...] = (), rows: int = 0
    ) -> None:
        self.spec, self.leaves, self.shared = spec, tuple(leaves), shared
        self.rows = rows
        """How many rows the batch had that it comes from, 0 if that is not known."""
        self.metas = [leaf for leaf in self.leaves if isinstance(leaf, TensorMeta)]
        """Of the tensors that travel, in order."""
        self.lone: tuple[Any, ...] | None = None
        """By what a sender knows a plain contiguous tensor that looks like this, once it has seen one."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Description)
            and self.leaves == other.leaves
            and self.spec == other.spec
            and _typed(self.spec) == _typed(other.spec)
            and (self.shared, self.rows) == (other.shared, other.rows)
        )

    __hash__ = None  # type: ignore[assignment]

    def unlike(self, other: "Description") -> str:
        """The first thing in which it differs, as in "float32 of shape (4, 8), was of shape (4, 7)"."""
        if self.spec != other.spec or _typed(self.spec) != _typed(other.spec):
            return f"in {' '.join(str(self.spec).split())}, was in {' '.join(str(other.spec).split())}"
        for place, (leaf, before) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if leaf != before:
                return f"{_where(self.spec, place)}{_said(leaf)}, was {_said(before)}"
        if self.shared != other.shared:
            return "other tensors share memory with each other than did"
        return f"of a batch of {self.rows} rows, was of {other.rows}"

    def empty(self, device: torch.device) -> list[Tensor]:
        return [meta.empty(device) for meta in self.metas]

    def tree(self, tensors: Sequence[Tensor]) -> Tree:
        """The message, with these tensors."""
        first = self.leaves[0] if self.spec is LEAF else None
        if isinstance(first, TensorMeta):  # the usual case, taken by itself: this is hot
            return Tree([tensors[0].detach()], LEAF, [first.needs_grad])
        leaves: list[Any] = []
        needs: list[bool] = []
        rest = iter(tensors)
        for leaf in self.leaves:
            match leaf:
                case TensorMeta():
                    leaves.append(next(rest).detach())  # anew for each message: a layer may set attributes on it
                    needs.append(leaf.needs_grad)
                case _Same():
                    leaves.append(leaves[leaf.leaf])
                    needs.append(needs[leaf.leaf])
                case _Plain():
                    leaves.append(_unpacked(msgspec.msgpack.decode(leaf.value)))
                    needs.append(False)
        return Tree(leaves, self.spec, needs, self.shared)

    def encode(self) -> bytes:
        text = msgspec.msgpack.encode(_Wire(_noded(self.spec), self.leaves, self.shared, self.rows))
        if Description.decode(text) != self:
            raise PipelineError(f"a layer hands on {self.spec}, which another process cannot put together again")
        return text

    @staticmethod
    def decode(text: bytes) -> "Description":
        wire = _WIRE.decode(text)
        return Description(_specified(wire.root), wire.leaves, wire.shared, wire.rows)


def _where(spec: pytree.TreeSpec, place: int) -> str:
    """As in "['x'] is ", for a leaf of a container."""
    if spec is LEAF:
        return ""
    try:
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    except Exception:  # a class of somebody's own need not take zeros
        return f"item {place} is "
    return f"{pytree.keystr(paths[place][0])} is "


def _said(leaf: _Leaf) -> str:
    match leaf:
        case TensorMeta():
            strides = "" if leaf.stride is None else f" and strides {leaf.stride}"
            return f"{leaf.dtype} of shape {leaf.shape}{strides}{' with gradients' * leaf.needs_grad}"
        case _Same():
            return f"item {leaf.leaf} again"
        case _Plain():
            return f"{_unpacked(msgspec.msgpack.decode(leaf.value))!r:.60}"


_WIRE: msgspec.msgpack.Decoder[_Wire] = msgspec.msgpack.Decoder(_Wire)


def describe(tree: Tree, device: torch.device, rows: int = 0) -> tuple[Description, list[Tensor]]:
    """A message to a process on such a device: what it is, and its tensors as they travel."""
    first: dict[int, int] = {}
    described: list[_Leaf] = []
    travelling: list[Tensor] = []
    for place, (leaf, needs) in enumerate(zip(tree.leaves, tree.needs, strict=True)):
        if not isinstance(leaf, Tensor):
            described.append(_Plain(msgspec.Raw(msgspec.msgpack.encode(_packed(leaf)))))
        elif id(leaf) in first:
            described.append(_Same(first[id(leaf)]))
        else:
            first[id(leaf)] = place
            stride, dense = _dense(leaf, device)
            dtype = str(leaf.dtype).removeprefix("torch.")
            described.append(TensorMeta(tuple(leaf.shape), stride, dtype, needs))
            travelling.append(dense)
    return Description(tree.spec, described, tree.shared, rows), travelling


def _dense(tensor: Tensor, device: torch.device) -> tuple[tuple[int, ...] | None, Tensor]:
    """A tensor's strides, None if they are the usual ones, and its numbers as they lie in memory."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = full_name(type(tensor)) if type(tensor) is not Tensor else f"tensor of layout {tensor.layout}"
        raise PipelineError(f"a layer hands a {kind} on to another rank; only plain dense tensors travel")
    if tensor.device.type != device.type:
        raise PipelineError(f"a layer hands on a tensor on {tensor.device}, but the pipeline runs on {device.type}")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return None, tensor
    lying = as_it_lies(tensor)
    if lying.is_contiguous():
        return tensor.stride(), lying
    return None, tensor.contiguous()


def as_it_lies(tensor: Tensor) -> Tensor:
    """A dense tensor as a contiguous one, of the same memory."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


_MOVED_AS_THEY_ARE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
)


def moved_as(tensor: Tensor) -> Tensor:
    """A dense tensor as any process group can move it: most know few types."""
    lying = as_it_lies(tensor)
    return lying if tensor.dtype in _MOVED_AS_THEY_ARE else lying.reshape(-1).view(torch.uint8)


def look_of(values: Sequence[Any] | None) -> Hashable | None:
    """All that a layer can see of some values without looking at a tensor's numbers, and which tensors share memory.
    None if that cannot be told.
    """
    found: list[Hashable] = []
    try:
        for value in values or ():
            leaves, spec = ([value], LEAF) if isinstance(value, Tensor) else pytree.tree_flatten(value)
            found.append(None if spec is LEAF else _look_of_spec(spec))
            first: dict[int, int] = {}  # by tensor and by storage, the first leaf that has it
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    same = first.setdefault(id(leaf), place), first.setdefault(storage_of(leaf), place)
                    found.append((_look_of_tensor(leaf), same))
                else:
                    found.append(msgspec.msgpack.encode(_packed(leaf)))
    except (PipelineError, RuntimeError, NotImplementedError):
        return None
    return tuple(found)


def _look_of_spec(spec: pytree.TreeSpec) -> Hashable:
    return spec.type, msgspec.msgpack.encode(_packed(spec.context)), tuple(map(_look_of_spec, _children(spec)))


def _look_of_tensor(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _noded(spec: pytree.TreeSpec) -> _Node:
    if spec.type is None:
        return _Node()
    if spec.type is namedtuple:
        return _Node("namedtuple", _packed(spec.context), tuple(map(_noded, _children(spec))))
    return _Node(_importable(spec.type), _packed(spec.context), tuple(map(_noded, _children(spec))))


def _typed(spec: pytree.TreeSpec) -> Any:
    """What makes two specs that are equal the same: 1 is equal to True. None if nothing does."""
    context = spec.context
    plain = context is None or (isinstance(context, list) and all(type(key) is str for key in context))
    own = None if plain else msgspec.msgpack.encode(_packed(context))
    return own, tuple(map(_typed, _children(spec)))


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def _specified(node: _Node) -> pytree.TreeSpec:
    if not node.type:
        return LEAF
    kind = namedtuple if node.type == "namedtuple" else _imported(node.type)
    if kind not in pytree.SUPPORTED_NODES:
        raise PipelineError(f"{node.type} is not registered with torch.utils._pytree in this process")
    return pytree.TreeSpec(kind, _unpacked(node.context), [_specified(child) for child in node.children])


def _packed(value: Any) -> Any:
    """Plain values and what containers keep of themselves, so that msgpack gives back the same types."""
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
            return [kind.__name__, [_packed(item) for item in value]]
        case dict() if kind is dict:
            return ["dict", [[_packed(key), _packed(item)] for key, item in value.items()]]
        case _ if isinstance(value, type) or callable(value):
            return ["name", _importable(value)]
        case _:
            raise PipelineError(f"a layer hands on a container that keeps a {full_name(kind)}, which cannot travel")


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    match packed:
        case ["int", digits]:
            return int(digits)
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
        case ["dtype", name]:
            return getattr(torch, name)
        case ["device", name]:
            return torch.device(name)
        case ["tuple", items]:
            return tuple(map(_unpacked, items))
        case ["list", items]:
            return list(map(_unpacked, items))
        case ["dict", items]:
            return {_unpacked(key): _unpacked(item) for key, item in items}
        case ["name", name]:
            return _imported(name)
    raise PipelineError(f"a message holds {packed!r:.60}, which is nothing that is sent")


def _importable(thing: Any) -> str:
    """The name of a class or function by which any process finds it."""
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
