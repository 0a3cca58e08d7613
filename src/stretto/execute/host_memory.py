"""Blocks of host memory, pinned on request so that copies to and from a device are fast."""

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
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
        self._unpin: Any = None
        if pinned:
            with suppress(OSError, AttributeError):  # a forked process would copy pinned pages at once
                self._map.madvise(mmap.MADV_DONTFORK)
            # Pinning is faster once the pages exist, and several threads can fault them in.
            in_parallel(lambda part: part[::_PAGE].zero_(), parts_of(self.memory))
            begin = self.memory.data_ptr()
            _in_own_thread(partial(_pin, begin, len(self._map)))
            # It keeps the mapping: CUDA must not know the address any more when others get it.
            self._unpin = weakref.finalize(self, _unpin, begin, self._map)
            self._unpin.atexit = False

    def close(self) -> None:
        """Unpin the memory; nothing may copy it any more. An arena that nobody refers to does the same."""
        if self._unpin is not None:
            self._unpin()


def _pin(begin: int, nbytes: int) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(begin, nbytes, 0))  # type: ignore[no-untyped-call]
    if status:
        raise HostMemoryError(f"cannot pin {nbytes:,} bytes of host memory (CUDA error {status}); see ulimit -l")


def _unpin(begin: int, _: mmap.mmap) -> None:
    _in_own_thread(lambda: torch.cuda.cudart().cudaHostUnregister(begin))  # type: ignore[no-untyped-call]


def _in_own_thread(act: Callable[[], object]) -> None:
    """Call CUDA in a thread of its own: an error stays set in its thread, and would be raised by the next kernel."""
    device = torch.cuda.current_device()

    def on_device() -> None:
        torch.cuda.set_device(device)
        act()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_device).result()


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
