"""Host memory for versions, pinned once and reused, and parallel copies into it."""

import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.execute.host_memory import PART, Arena, HostMemoryError, machine_bytes
from stretto.ir.errors import WeightsError
from stretto.weights.sources.shard import Stored, view_of

Copy = tuple[Tensor, Tensor | Stored]
"""A (destination, source) pair."""


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
        if into.nbytes > PART and splittable:
            yield from ([pair] for pair in zip(torch.split(into, PART), source.split(PART), strict=True))
            continue
        batch.append((into, source))
        batch_bytes += into.nbytes
        if batch_bytes > PART:
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
        if nbytes > (available := machine_bytes()):
            raise WeightsError(f"a version needs {nbytes:,} bytes here, and this machine has {available:,}")
        try:
            return Arena(nbytes, pinned=self._pinned)
        except HostMemoryError as error:
            raise WeightsError(str(error)) from None

    def give(self, arena: Arena) -> None:
        self._free.append(arena)

    def close(self) -> None:
        for arena in self._free:
            arena.close()
        self._free.clear()
