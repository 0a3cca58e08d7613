"""Blocks of host memory, pinned on request so that copies to and from a device are fast."""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import StrettoError

PART = 8 << 20  # bytes that a thread handles at a time
_PAGE = mmap.PAGESIZE
_THREADS = min(16, os.cpu_count() or 1)


class HostMemoryError(StrettoError):
    """Host memory cannot be allocated or pinned."""


class Arena:
    """A block of host memory, pinned on request."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        try:
            self._map = mmap.mmap(-1, max(nbytes, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(f"cannot allocate {nbytes:,} bytes of host memory ({error})") from None
        with suppress(OSError):  # not every kernel supports huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned: Pinned | None = None
        if pinned:
            # Pinning is faster once the pages exist, and several threads can fault them in.
            in_parallel(lambda part: part[::_PAGE].zero_(), parts_of(self.memory))
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
            raise HostMemoryError(
                f"cannot pin {end - begin:,} bytes of host memory (CUDA error {status}); see ulimit -l"
            )

    def close(self) -> None:
        self._runtime.cudaHostUnregister(self._begin)


def parts_of(memory: Tensor) -> Iterator[Tensor]:
    yield from torch.split(memory, PART)


def threads() -> ThreadPoolExecutor:
    """Return a thread pool for copies and checksums; torch and numpy release the GIL during both."""
    return ThreadPoolExecutor(_THREADS, "stretto copies")


def in_parallel(act: Callable[[Tensor], object], parts: Iterable[Tensor]) -> None:
    with threads() as pool:
        for _ in pool.map(act, parts):
            pass


def machine_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
