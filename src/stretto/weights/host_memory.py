"""Host memory for versions, pinned once and reused, and parallel copies into it."""

import gc
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.sources.shard import Stored, view_of

Copy = tuple[Tensor, Tensor | Stored]
"""A (destination, source) pair."""
_PAGE = mmap.PAGESIZE
_PART = 8 << 20  # bytes a thread copies at a time
_THREADS = min(16, os.cpu_count() or 1)


class Arena:
    """A block of host memory, pinned on request so that copies to a device are fast."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._map = mmap.mmap(-1, max(nbytes, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # not every kernel supports huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned: Pinned | None = None
        if pinned:
            # Pinning is faster once the pages exist, and several threads can fault them in.
            in_parallel(lambda part: part[::_PAGE].zero_(), _parts(self.memory))
            self._pinned = Pinned(self.memory)

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None


class Pinned:
    """Pins host memory, however it was allocated, until `close`."""

    def __init__(self, memory: Tensor) -> None:
        begin = memory.data_ptr() // _PAGE * _PAGE
        self._begin, self._memory = begin, memory
        end = -(-(memory.data_ptr() + memory.numel()) // _PAGE) * _PAGE
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(self._runtime.cudaHostRegister(begin, end - begin, 0))
        if status:
            raise WeightsError(f"cannot pin {end - begin:,} bytes of host memory (CUDA error {status}); see ulimit -l")

    def close(self) -> None:
        self._runtime.cudaHostUnregister(self._begin)


def _parts(memory: Tensor) -> Iterator[Tensor]:
    yield from torch.split(memory, _PART)


def threads() -> ThreadPoolExecutor:
    """Return a thread pool for copies and checksums; torch and numpy release the GIL during both."""
    return ThreadPoolExecutor(_THREADS, "stretto copies")


def in_parallel(act: Callable[[Tensor], object], parts: Iterable[Tensor]) -> None:
    with threads() as pool:
        for _ in pool.map(act, parts):
            pass


def copy_in_parallel(copies: Iterable[Copy], pool: ThreadPoolExecutor) -> None:
    """Copy the source of each pair into its destination, which is in host memory.

    Large copies are split and small ones are batched. Bytes are copied with numpy, which uses one thread for each copy;
    PyTorch would use several.
    """

    def copy(batch: list[Copy]) -> None:
        for into, source in batch:
            if not isinstance(source, Tensor):
                source.read_into(into)
            elif source.dtype == torch.uint8:
                np.copyto(_as_numpy(into), _as_numpy(source))
            else:
                into.copy_(source)

    devices: set[torch.device] = set()

    def on_host() -> Iterator[Copy]:
        for into, source in copies:
            if isinstance(source, Tensor) and source.is_cuda:  # on the caller's stream, in order with its work
                into.copy_(source, non_blocking=True)
                devices.add(source.device)
            else:
                yield into, source

    batches = list(_batches(on_host()))  # before any copy starts: preparing at the same time would slow the copies down
    for _ in pool.map(copy, batches):
        pass
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _as_numpy(tensor: Tensor) -> NDArray[np.uint8]:
    return np.frombuffer(view_of(tensor), np.uint8)


def _batches(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    batch_bytes = 0
    for into, source in copies:
        splittable = not isinstance(source, Tensor) or (source.dtype == torch.uint8 and source.dim() == 1)
        if into.nbytes > _PART and splittable:
            yield from ([pair] for pair in zip(torch.split(into, _PART), source.split(_PART), strict=True))
            continue
        batch.append((into, source))
        batch_bytes += into.nbytes
        if batch_bytes > _PART:
            yield batch
            batch, batch_bytes = [], 0
    yield batch


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in this process: there can be hundreds of thousands of small objects, and traversing
    them takes longer than a push of several GB."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Arenas:
    """A pool of arenas: the next version reuses an arena that no version needs any more."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned, self._free = pinned, list[Arena]()

    def take(self, nbytes: int) -> Arena:
        fits = [arena for arena in self._free if arena.memory.numel() >= nbytes]
        if fits:
            best = min(fits, key=lambda arena: arena.memory.numel())
            self._free.remove(best)
            return best
        self.close()  # the free arenas have become too small
        if nbytes > (available := _machine_bytes()):
            raise WeightsError(f"a version needs {nbytes:,} bytes here, and this machine has {available:,}")
        return Arena(nbytes, pinned=self._pinned)

    def give(self, arena: Arena) -> None:
        self._free.append(arena)

    def close(self) -> None:
        for arena in self._free:
            arena.close()
        self._free.clear()
