"""Offloaded activations: tensors that a pass saved leave for host memory, and come back for its backward."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import version_of

_ALIGNED = 512  # bytes between the beginnings of tensors in host memory


class Stored:
    """The memory of tensors that share a storage: on the device, in host memory, or on the way."""

    __slots__ = ("__weakref__", "device", "host", "nbytes", "version", "views")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.device: Tensor | None = _bytes_of(storage, tensor.device)
        self.host: Tensor | None = None
        self.version = 0
        """How often the memory had been changed in place when it was back."""
        self.views: list[weakref.ref[View]] = []


class View:
    """A saved tensor whose memory may leave the device."""

    __slots__ = ("__weakref__", "_geometry", "_site", "_stored", "_tensor", "_version", "is_stale")

    def __init__(self, saved: Tensor, stored: Stored, site: str) -> None:
        self._geometry = saved.dtype, saved.storage_offset(), saved.size(), saved.stride()
        self._stored, self._version, self._site = stored, version_of(saved), site
        self._tensor: Tensor | None = saved.detach()
        self.is_stale = False
        """Whether it was changed in place before its memory left."""
        stored.views.append(weakref.ref(self))

    def tensor(self) -> Tensor:
        if self._tensor is not None:
            self.validate()
            tensor = self._tensor
        else:
            dtype, offset, size, stride = self._geometry
            memory = self._stored.device
            assert memory is not None, "this activation is still in host memory"
            self.is_stale = self.is_stale or version_of(memory) != self._stored.version
            # A view, so that changes in place are counted for all tensors of this memory.
            whole = memory[: self._stored.nbytes - self._stored.nbytes % dtype.itemsize].view(dtype)
            tensor = whole.as_strided(size, stride, offset)
        if self.is_stale:
            raise PipelineError(f"a tensor that the backward needs was changed in place (saved by {self._site})")
        return tensor

    def validate(self) -> None:
        self.is_stale = self.is_stale or (self._tensor is not None and version_of(self._tensor) != self._version)

    def release(self) -> None:
        self._tensor = None


class Away:
    """What one pass of a stage may offload."""

    def __init__(self) -> None:
        self._stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[Stored]] = []
        self._left: list[weakref.ref[Stored]] = []
        self._arriving: list[Tensor] = []
        self.copied: Any = None
        """On a device, the event at which everything has been copied to host memory."""

    def view(self, saved: Tensor, site: str) -> View:
        """Return a handle to a tensor that a site saves, and whose memory leaves."""
        key = saved.untyped_storage()._cdata
        stored = self._stored.get(key)
        if stored is None:
            self._stored[key] = stored = Stored(saved)
            self._order.append(weakref.ref(stored))
        return View(saved, stored, site)

    def candidates(self) -> "list[Stored]":
        """Return what may leave, in the order in which it was saved: the backward needs the first of it last."""
        return [stored for reference in self._order if (stored := reference()) is not None]

    def leave(self, chosen: Sequence[Stored], host: Tensor) -> None:
        """Start to copy memory to host memory."""
        self._stored.clear()  # from now on another storage may have the same address
        self._order.clear()
        begin = 0
        for stored in chosen:
            for view in _alive(stored.views):
                view.validate()
            assert stored.device is not None
            stored.host = host[begin : begin + stored.nbytes]
            stored.host.copy_(stored.device, non_blocking=True)
            begin = _aligned(begin + stored.nbytes)
        self._left = [weakref.ref(stored) for stored in chosen]

    def release(self) -> None:
        """Return to the allocator what has been copied. What was changed while it was copied counts as changed."""
        for stored in _alive(self._left):
            stored.device = None
            for view in _alive(stored.views):
                view.validate()
                view.release()

    def come_back(self, empty: Callable[[int], Tensor], ready: Callable[[], object] = lambda: None) -> None:
        """Start to copy all of it back, into memory that `empty` makes. `ready` is called once it has made all of it:
        PyTorch may fill new memory (`torch.use_deterministic_algorithms`), and copies must come after that.
        """
        left = list(_alive(self._left))
        self._left.clear()
        self._arriving = [empty(stored.nbytes) for stored in left]
        ready()
        for stored, device in zip(left, self._arriving, strict=True):
            assert stored.host is not None
            device.copy_(stored.host, non_blocking=True)
            stored.device, stored.host, stored.version = device, None, version_of(device)

    def settle(self) -> None:
        """Note that the stream whose memory it is waits for the copies back: from now on it may be freed."""
        self._arriving.clear()


def within(candidates: Sequence[Stored], *, fraction: float, limit: int | None) -> "list[Stored]":
    """Return the first candidates that are no more than a fraction of all, and fit a limit of bytes."""
    room = fraction * sum(stored.nbytes for stored in candidates)
    room = min(room, room if limit is None else limit)
    chosen, end = [], 0
    for stored in candidates:
        if end + stored.nbytes <= room:
            chosen.append(stored)
            end = end + stored.nbytes
    return chosen


def packed_bytes(chosen: Sequence[Stored]) -> int:
    """Return how much host memory storages take."""
    end = 0
    for stored in chosen:
        end = _aligned(end + stored.nbytes)
    return end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _alive(references: Sequence[Any]) -> Iterator[Any]:
    return (value for reference in references if (value := reference()) is not None)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
