"""Saved tensors in float8: storage only, in tiles of 128 features with a scale each (see `stretto.moe.fp8`)."""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.moe.fp8 import pack, unpack
from stretto.pipeline.pytree import version_of
from stretto.pipeline.storages import WeakStorage

_DTYPES = (torch.bfloat16, torch.float16)  # where others are saved beside these, they need their precision
_TILE = 128
_LONGEST = 1 << 20  # features of a row; kernels run a program for each 1024


class Stored(Protocol):
    """What stands for a saved tensor."""

    def tensor(self) -> Tensor: ...


class Compressed:
    """A saved tensor whose numbers are stored in float8."""

    __slots__ = ("__weakref__", "_bytes", "_dtype", "_features", "_last", "_order", "_sizes")

    def __init__(self, stored: Stored, saved: Tensor, features: int) -> None:
        """`stored` stands for the bytes of the tensor that was saved, in rows of so many features."""
        self._bytes, self._features, self._dtype = stored, features, saved.dtype
        self._order = _memory_order(saved)
        self._sizes = [saved.shape[dim] for dim in self._order]
        self._last: _Rows | None = None

    def tensor(self) -> Tensor:
        """Return the tensor, rounded: the same memory while anything holds it and no backward has changed it."""
        rows = None if self._last is None else self._last.tensor()
        if rows is None:
            with torch.no_grad():
                rows = unpack(self._bytes.tensor(), features=self._features, dtype=self._dtype)
            self._last = _Rows(rows)
        order = sorted(range(len(self._order)), key=self._order.__getitem__)
        tensor: Tensor = rows.view(self._sizes).permute(order)
        return tensor


class _Rows:
    """A weak reference to the memory of a tensor, which knows whether that was changed in place."""

    __slots__ = ("_changes", "_storage", "_version")

    def __init__(self, rows: Tensor) -> None:
        self._storage = WeakStorage(rows.untyped_storage())
        self._changes = rows.detach()
        self._changes.data = rows.new_empty(0)  # now it shares only the count of changes
        self._version = version_of(rows)

    def tensor(self) -> Tensor | None:
        """Return all of the memory, if anything holds it and nothing has changed it."""
        storage = self._storage.storage()
        if storage is None or version_of(self._changes) != self._version:
            return None
        whole, rows = torch.empty(0, dtype=self._changes.dtype, device=storage.device), self._changes.detach()
        rows.data = whole.set_(storage, 0, (storage.nbytes() // whole.element_size(),), (1,))
        return rows


class Compression:
    """Makes `Compressed` tensors of one pass: what is saved twice is stored once."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[WeakStorage, weakref.ref[Compressed]]] = {}

    def known(self, saved: Tensor, lane: str) -> Compressed | None:
        """Return what stands for this tensor already on a lane."""
        storage, made = self._made.get((_key(saved), lane), (None, None))
        return made() if storage is not None and made is not None and not storage.is_gone else None

    def remember(self, saved: Tensor, lane: str, made: Compressed) -> None:
        self._made[_key(saved), lane] = WeakStorage(saved.untyped_storage()), weakref.ref(made)

    def clear(self) -> None:
        self._made.clear()


def compressible(saved: Tensor) -> int:
    """Return how many features the rows of a tensor have in float8; 0 if it is not stored so."""
    if type(saved) is not Tensor or saved.dtype not in _DTYPES or saved.layout is not torch.strided:
        return 0
    nbytes = saved.numel() * saved.element_size()
    if not 0 < nbytes <= saved.untyped_storage().nbytes():
        return 0  # an expanded tensor would become larger
    order = _memory_order(saved)
    features = saved.shape[order[-1]] if order else 1
    if _TILE <= features <= _LONGEST:
        return features
    return _TILE if saved.numel() % _TILE == 0 and saved.permute(order).is_contiguous() else 0


def compressed_bytes(saved: Tensor, features: int) -> Tensor:
    """Return the bytes that stand for a tensor, in rows of so many features."""
    with torch.no_grad():
        return pack(saved.detach().permute(_memory_order(saved)).reshape(-1, features))


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    strides: tuple[int, ...] = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def _key(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), version_of(tensor)
