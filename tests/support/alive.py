"""What is held in memory, counted by every tensor that was made."""

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Knows of every tensor that was made within, whoever holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for it in out if isinstance(out, tuple | list) else (out,):
            if isinstance(it, Tensor):
                storage = it.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self, but: nn.Module | None = None, others: Iterable[Tensor] = ()) -> int:
        """All that is held, but for a module's parameters and other tensors."""
        gc.collect()
        known = {it.untyped_storage()._cdata for it in (*(() if but is None else but.parameters()), *others)}
        return sum(size for key, (it, size) in self._made.items() if key not in known and not it.expired())


class MostAlive(Alive):
    """Knows the most that was held after any operation, but for these tensors."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self._others = [tensor.untyped_storage() for tensor in others]  # no other storage gets their addresses
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        known = {storage._cdata for storage in self._others}
        self.most = max(self.most, sum(size for key, (_, size) in self._made.items() if key not in known))
        return out
