"""The memory of tensors, and weak references to it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class WeakStorage:
    """A weak reference to a storage. While it lives, no other storage can have the same address."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        reference: Any = StorageWeakRef
        self._reference = reference(storage)

    @property
    def is_gone(self) -> bool:
        return bool(self._reference.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage if anything else holds it."""
        return torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Return the memory of a tensor, also of one that consists of others."""
    if hasattr(tensor, "__tensor_flatten__"):  # a DTensor, say
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor also names its mesh
                yield from storages_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (part.untyped_storage() for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (part.untyped_storage() for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def weak_storages(tensors: Iterable[Tensor]) -> list[WeakStorage]:
    """Return weak references to the memory of tensors."""
    return [WeakStorage(storage) for tensor in tensors for storage in storages_of(tensor)]


def alive(references: Iterable[WeakStorage]) -> list[torch.UntypedStorage]:
    """Return the storages that are still there."""
    return [storage for reference in references if (storage := reference.storage()) is not None]
