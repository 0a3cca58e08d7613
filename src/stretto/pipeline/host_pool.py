"""Host memory for offloaded activations: buffers that the program numbers, made once and reused in every step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.execute.host_memory import Arena, HostMemoryError, machine_bytes
from stretto.ir.errors import PipelineError
from stretto.ir.units import bytes_text
from stretto.pipeline.offload import Stored, packed_bytes

log = logging.getLogger(__name__)
_MARGIN = 1.125  # by which a buffer is larger than what it was made for, since microbatches differ
_UNIT = 1 << 21


class HostPool:
    """The host buffers of a rank. Which pass uses which buffer, and when it is free again, is in the program."""

    def __init__(self, buffers: Mapping[int, int], device: torch.device, *, limit: int | None) -> None:
        """`buffers` are the numbers of the buffers, each with the stage whose passes it holds."""
        self._stage_of, self._pinned, self._limit = buffers, device.type == "cuda", limit
        self._arenas: dict[int, Arena] = {}
        self._read: dict[int, Any] = {}
        self._refused: int | None = None  # the size of the smallest buffer for which there was no room

    @property
    def nbytes(self) -> int:
        """How much host memory is allocated."""
        return sum(arena.memory.numel() for arena in self._arenas.values())

    def take(self, number: int, chosen: Sequence[Stored]) -> tuple[Tensor, list[Stored]]:
        """Return a buffer, and as many of the storages, from the first, as fit it.

        A buffer that is too small grows. If it cannot, some storages stay on the device.
        """
        needed, arena = packed_bytes(chosen), self._arenas.get(number)
        if arena is None:
            self._arenas[number] = arena = self._first(number, needed)
        elif arena.memory.numel() < needed:
            arena = self._larger(number, needed, arena)
        fit = list(chosen)
        while packed_bytes(fit) > arena.memory.numel():
            fit.pop()
        return arena.memory, fit

    def read(self, number: int, event: Any) -> None:
        """Note that the device has read a buffer once it reaches this event."""
        self._read[number] = event

    def _first(self, number: int, needed: int) -> Arena:
        """Make a buffer. Raise PipelineError if there is no room for it and all others of its stage."""
        size = _rounded(needed)
        _, told = self._room(self._stage_of[number], size)
        try:
            return Arena(size, pinned=self._pinned)
        except HostMemoryError as error:
            raise PipelineError(f"{told}: {error}") from None

    def foresee(self, needed: Mapping[int, int]) -> int:
        """Return how much host memory there will be, if a pass of each stage takes so much of it.

        Raise the PipelineError that a step would if there is no room for it.
        """
        planned = 0
        for stage in dict.fromkeys(self._stage_of.values()):
            planned += self._room(stage, _rounded(needed[stage]), planned)[0]
        return self.nbytes + planned

    def _room(self, stage: int, size: int, planned: int = 0) -> tuple[int, str]:
        """Return how much the missing buffers of a stage take, and that in words.

        Raise PipelineError if there is no room for them, beside buffers that are planned but not made.
        """
        count = sum(number not in self._arenas and of == stage for number, of in self._stage_of.items())
        told = (
            f"offloading the passes of stage {stage} takes {count} more buffers of {bytes_text(size)} of host memory "
            f"on this rank, {bytes_text(size * count)} together"
        )
        beside = self.nbytes + planned
        used = f" beside {bytes_text(beside)} of other stages" if beside else ""
        if self._limit is not None and beside + size * count > self._limit:
            raise PipelineError(f"{told}{used}; host_bytes allows {bytes_text(self._limit)}")
        if planned + size * count > (available := _available_bytes()):
            raise PipelineError(f"{told}{used if planned else ''}, and this machine has {bytes_text(available)} left")
        return size * count, told

    def _larger(self, number: int, needed: int, arena: Arena) -> Arena:
        """Return a larger buffer, or the same one if there is no room."""
        size = _rounded(needed)
        if self._refused is not None and size >= self._refused:
            return arena
        room = min(_available_bytes(), self._limit - self.nbytes if self._limit is not None else size)
        try:
            if size > room:
                raise HostMemoryError(f"there is room for {bytes_text(max(room, 0))}")
            larger = Arena(size, pinned=self._pinned)
        except HostMemoryError as error:
            log.warning(
                "some activations stay on the device: %s of host memory are needed (%s)", bytes_text(size), error
            )
            self._refused = size
            return arena
        self._await(number)
        arena.close()
        self._arenas[number] = larger
        return larger

    def _await(self, number: int) -> None:
        """Wait until the device has read a buffer."""
        if (event := self._read.pop(number, None)) is not None:
            event.synchronize()

    def close(self) -> None:
        """Return all memory, once the device has read it."""
        for number, arena in self._arenas.items():
            self._await(number)
            arena.close()
        self._arenas.clear()


def _rounded(needed: int) -> int:
    return -(-int(needed * _MARGIN) // _UNIT) * _UNIT


def _available_bytes() -> int:
    """Return how much memory this machine could still give."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return machine_bytes()
