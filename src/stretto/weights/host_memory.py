"""Host memory that versions are kept in: pinned once, and used again for the next version."""

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
"""Into the first, from the second."""
_PAGE = mmap.PAGESIZE
_PART = 8 << 20  # bytes that a thread copies at a time
_THREADS = min(16, os.cpu_count() or 1)


class Arena:
    """A piece of host memory, from where copies to a device are fast."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._map = mmap.mmap(-1, max(nbytes, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # not every kernel has them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned: Pinned | None = None
        if pinned:
            # Pages that are there already are pinned quickly, and several threads can make them at a time.
            in_parallel(lambda part: part[::_PAGE].zero_(), _parts(self.memory))
            self._pinned = Pinned(self.memory)

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None


class Pinned:
    """Host memory, wherever it came from, as long as it is pinned."""

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
    """As many as help; torch and numpy let others run while they copy."""
    return ThreadPoolExecutor(_THREADS, "stretto copies")


def in_parallel(act: Callable[[Tensor], object], parts: Iterable[Tensor]) -> None:
    with threads() as pool:
        for _ in pool.map(act, parts):
            pass


def copy_in_parallel(copies: Iterable[Copy], pool: ThreadPoolExecutor) -> None:
    """From the second of each pair into the first, which is on the host; large ones in parts, small ones together.

    PyTorch would use several threads for each copy; numpy uses one.
    """

    def copy(batch: list[Copy]) -> None:
        for into, source in batch:
            if not isinstance(source, Tensor):
                source.read_into(into)
            elif source.dtype == torch.uint8:
                np.copyto(_seen(into), _seen(source))
            else:
                into.copy_(source)

    devices: set[torch.device] = set()

    def on_host() -> Iterator[Copy]:
        for into, source in copies:
            if isinstance(source, Tensor) and source.is_cuda:  # from the caller's stream, in order with what is there
                into.copy_(source, non_blocking=True)
                devices.add(source.device)
            else:
                yield into, source

    batches = list(_batches(on_host()))  # all first: a thread that prepares would hold up those that copy
    for _ in pool.map(copy, batches):
        pass
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _seen(tensor: Tensor) -> NDArray[np.uint8]:
    return np.frombuffer(view_of(tensor), np.uint8)


def _batches(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    held = 0
    for into, source in copies:
        whole = not isinstance(source, Tensor) or (source.dtype == torch.uint8 and source.dim() == 1)
        if into.nbytes > _PART and whole:
            yield from ([pair] for pair in zip(torch.split(into, _PART), source.split(_PART), strict=True))
            continue
        batch.append((into, source))
        held += into.nbytes
        if held > _PART:
            yield batch
            batch, held = [], 0
    yield batch


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looking for garbage, in this whole process: there can be hundreds of thousands of small objects, and
    going through them takes longer than a push of several GB."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Arenas:
    """Arenas by use: what no version needs any more is taken for the next one."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned, self._free = pinned, list[Arena]()

    def take(self, nbytes: int) -> Arena:
        fits = [arena for arena in self._free if arena.memory.numel() >= nbytes]
        if fits:
            best = min(fits, key=lambda arena: arena.memory.numel())
            self._free.remove(best)
            return best
        self.close()  # too small for what versions have become
        if nbytes > (there := _machine_bytes()):
            raise WeightsError(f"a version needs {nbytes:,} bytes here, and this machine has {there:,}")
        return Arena(nbytes, pinned=self._pinned)

    def give(self, arena: Arena) -> None:
        self._free.append(arena)

    def close(self) -> None:
        for arena in self._free:
            arena.close()
        self._free.clear()
