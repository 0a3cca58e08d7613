"""Descriptions of messages: their containers, plain values, and the dtypes and shapes of their tensors."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.packing import Node, children, node_of, packed, spec_of, typed, unpacked
from stretto.pipeline.pytree import LEAF, Tree, full_name, storage_of


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """A tensor's shape, strides and dtype, without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None if the tensor is contiguous."""
    dtype: str
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        dtype = getattr(torch, self.dtype)
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)


class _Same(msgspec.Struct, frozen=True, array_like=True, tag="same"):
    """The same tensor as an earlier leaf."""

    leaf: int


class _Plain(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    value: msgspec.Raw
    """Encoded by `packed` and compared as bytes, so that 1 differs from True and NaN equals NaN."""


_Leaf: TypeAlias = TensorMeta | _Same | _Plain


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """A description in its wire format."""

    root: Node
    leaves: tuple[_Leaf, ...]
    shared: tuple[int, ...]
    rows: int


class Description:
    """Everything about a message except its tensors' data.

    Equal descriptions rebuild the same value from the same tensor data.
    """

    __slots__ = ("leaves", "lone", "metas", "rows", "shared", "spec")

    def __init__(
        self, spec: pytree.TreeSpec, leaves: Sequence[_Leaf], shared: tuple[int, ...] = (), rows: int = 0
    ) -> None:
        self.spec, self.leaves, self.shared = spec, tuple(leaves), shared
        self.rows = rows
        """The number of rows of the batch that the message comes from, 0 if unknown."""
        self.metas = [leaf for leaf in self.leaves if isinstance(leaf, TensorMeta)]
        """The metadata of the tensors that are sent, in order."""
        self.lone: tuple[Any, ...] | None = None
        """The sender's fast key for a single plain contiguous tensor of this description (see `_lone`), once sent."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Description)
            and self.leaves == other.leaves
            and self.spec == other.spec
            and typed(self.spec) == typed(other.spec)
            and (self.shared, self.rows) == (other.shared, other.rows)
        )

    __hash__ = None  # type: ignore[assignment]

    def unlike(self, other: "Description") -> str:
        """Return the first difference in words, e.g. "float32 of shape (4, 8), was float32 of shape (4, 7)"."""
        if self.spec != other.spec or typed(self.spec) != typed(other.spec):
            return f"in {' '.join(str(self.spec).split())}, was in {' '.join(str(other.spec).split())}"
        for place, (leaf, before) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if leaf != before:
                return f"{_where(self.spec, place)}{_in_words(leaf)}, was {_in_words(before)}"
        if self.shared != other.shared:
            return "other tensors share memory with each other than did"
        return f"of a batch of {self.rows} rows, was of {other.rows}"

    def empty(self, device: torch.device) -> list[Tensor]:
        return [meta.empty(device) for meta in self.metas]

    def tree(self, tensors: Sequence[Tensor]) -> Tree:
        """Return the message's tree, with these tensors as its data."""
        first = self.leaves[0] if self.spec is LEAF else None
        if isinstance(first, TensorMeta):  # fast path for the usual case; this is hot
            return Tree([tensors[0].detach()], LEAF, [first.needs_grad])
        leaves: list[Any] = []
        needs: list[bool] = []
        rest = iter(tensors)
        for leaf in self.leaves:
            match leaf:
                case TensorMeta():
                    leaves.append(next(rest).detach())  # a new tensor per message: a layer may set attributes on it
                    needs.append(leaf.needs_grad)
                case _Same():
                    leaves.append(leaves[leaf.leaf])
                    needs.append(needs[leaf.leaf])
                case _Plain():
                    leaves.append(unpacked(msgspec.msgpack.decode(leaf.value)))
                    needs.append(False)
        return Tree(leaves, self.spec, needs, self.shared)

    def encode(self) -> bytes:
        text = msgspec.msgpack.encode(_Wire(node_of(self.spec), self.leaves, self.shared, self.rows))
        if Description.decode(text) != self:
            raise PipelineError(f"a layer hands on {self.spec}, which another process cannot put together again")
        return text

    @staticmethod
    def decode(text: bytes) -> "Description":
        wire = _WIRE.decode(text)
        return Description(spec_of(wire.root), wire.leaves, wire.shared, wire.rows)


def _where(spec: pytree.TreeSpec, place: int) -> str:
    """Return a leaf's path in its container, e.g. "['x'] is "; empty if the message is a single leaf."""
    if spec is LEAF:
        return ""
    try:
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    except Exception:  # a user's class may reject the placeholder zeros
        return f"item {place} is "
    return f"{pytree.keystr(paths[place][0])} is "


def _in_words(leaf: _Leaf) -> str:
    match leaf:
        case TensorMeta():
            strides = "" if leaf.stride is None else f" and strides {leaf.stride}"
            return f"{leaf.dtype} of shape {leaf.shape}{strides}{' with gradients' * leaf.needs_grad}"
        case _Same():
            return f"item {leaf.leaf} again"
        case _Plain():
            return f"{unpacked(msgspec.msgpack.decode(leaf.value))!r:.60}"


_WIRE: msgspec.msgpack.Decoder[_Wire] = msgspec.msgpack.Decoder(_Wire)


def describe(tree: Tree, device: torch.device, rows: int = 0) -> tuple[Description, list[Tensor]]:
    """Return the description of a message to a process on `device`, and the tensors to send."""
    first: dict[int, int] = {}
    described: list[_Leaf] = []
    tensors: list[Tensor] = []
    for place, (leaf, needs) in enumerate(zip(tree.leaves, tree.needs, strict=True)):
        if not isinstance(leaf, Tensor):
            described.append(_Plain(msgspec.Raw(msgspec.msgpack.encode(packed(leaf)))))
        elif id(leaf) in first:
            described.append(_Same(first[id(leaf)]))
        else:
            first[id(leaf)] = place
            stride, dense = _dense(leaf, device)
            dtype = str(leaf.dtype).removeprefix("torch.")
            described.append(TensorMeta(tuple(leaf.shape), stride, dtype, needs))
            tensors.append(dense)
    return Description(tree.spec, described, tree.shared, rows), tensors


def _dense(tensor: Tensor, device: torch.device) -> tuple[tuple[int, ...] | None, Tensor]:
    """Return a tensor's strides (None if contiguous) and a contiguous tensor with its data."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = full_name(type(tensor)) if type(tensor) is not Tensor else f"tensor of layout {tensor.layout}"
        raise PipelineError(f"a layer hands a {kind} on to another rank; only plain dense tensors travel")
    if tensor.device.type != device.type:
        raise PipelineError(f"a layer hands on a tensor on {tensor.device}, but the pipeline runs on {device.type}")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return None, tensor
    contiguous = as_contiguous(tensor)
    if contiguous.is_contiguous():
        return tensor.stride(), contiguous
    return None, tensor.contiguous()


def as_contiguous(tensor: Tensor) -> Tensor:
    """Return a view with dimensions ordered by stride, which is contiguous if the tensor is dense."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


_NATIVE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
)


def moved_as(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory in a dtype that every process group can transfer, as bytes if need be."""
    contiguous = as_contiguous(tensor)
    return contiguous if tensor.dtype in _NATIVE_DTYPES else contiguous.reshape(-1).view(torch.uint8)


def look_of(values: Sequence[Any] | None) -> Hashable | None:
    """Return a key of all that a layer can see of values without reading tensor data, including shared memory.

    Return None if the values cannot be described.
    """
    looks: list[Hashable] = []
    try:
        for value in values or ():
            leaves, spec = ([value], LEAF) if isinstance(value, Tensor) else pytree.tree_flatten(value)
            looks.append(None if spec is LEAF else _look_of_spec(spec))
            first: dict[int, int] = {}  # the first leaf with each tensor and each storage
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    same = first.setdefault(id(leaf), place), first.setdefault(storage_of(leaf), place)
                    looks.append((_look_of_tensor(leaf), same))
                else:
                    looks.append(msgspec.msgpack.encode(packed(leaf)))
    except (PipelineError, RuntimeError, NotImplementedError):
        return None
    return tuple(looks)


def _look_of_spec(spec: pytree.TreeSpec) -> Hashable:
    return spec.type, msgspec.msgpack.encode(packed(spec.context)), tuple(map(_look_of_spec, children(spec)))


def _look_of_tensor(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
