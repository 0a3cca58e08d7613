"""Host memory for offloaded activations: buffers that the program numbers, made once and reused in every step."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.execute.host_memory import Arena, HostMemoryError, machine_bytes
from stretto.execute.ring import machine
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.ir.units import bytes_text
from stretto.memory import host_buffer_bytes
from stretto.pipeline.offload import Stored, packed_bytes

log = logging.getLogger(__name__)


class HostPool:
    """The host buffers of a rank. Which pass uses which buffer, and when it is free again, is in the program."""

    def __init__(self, buffers: Mapping[int, int], device: torch.device, *, rank: int, limit: int | None) -> None:
        """`buffers` are the numbers of the buffers, each with the stage whose passes it holds."""
        self._stage_of, self._pinned = buffers, device.type == "cuda"
        self._rank, self._limit = rank, limit
        self._arenas: dict[int, Arena] = {}
        self._read: dict[int, Any] = {}
        self._replaced: list[tuple[Any, Arena]] = []
        """Buffers that larger ones have replaced, each with the event at which the device has read it."""
        self._refused: int | None = None  # the size of the smallest buffer for which there was no room

    @property
    def nbytes(self) -> int:
        """How much host memory is allocated."""
        replaced = (arena for _, arena in self._replaced)
        return sum(arena.memory.numel() for arena in (*self._arenas.values(), *replaced))

    def take(self, number: int, chosen: Sequence[Stored]) -> tuple[Tensor, list[Stored]]:
        """Return a buffer, and as many of the storages, from the first, as fit it.

        A buffer that is too small grows. If it cannot, some storages stay on the device.
        """
        if not chosen:
            return torch.empty(0, dtype=torch.uint8), []
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
        size = host_buffer_bytes(needed)
        told = self._validate_room({self._stage_of[number]: size})
        try:
            return Arena(size, pinned=self._pinned)
        except HostMemoryError as error:
            raise PipelineError(f"{told}: {error}") from None

    def foresee(self, needed: Mapping[int, int]) -> int:
        """Return how much host memory there will be, if a pass of each stage takes so much of it.

        Raise PipelineError, as a step would, if there is no room for it.
        """
        sizes = {stage: host_buffer_bytes(needed[stage]) for stage in dict.fromkeys(self._stage_of.values())}
        self._validate_room(sizes)
        return self.nbytes + sum(size * self._missing(stage) for stage, size in sizes.items())

    def _missing(self, stage: int) -> int:
        """Return how many buffers of a stage are not made yet."""
        return sum(of == stage and number not in self._arenas for number, of in self._stage_of.items())

    def _validate_room(self, sizes: Mapping[int, int]) -> str:
        """Return in words how much host memory this rank takes with the missing buffers of stages, of these sizes.

        Raise PipelineError if there is no room for them.
        """
        self._close_replaced()
        missing = {stage: self._missing(stage) for stage in sizes}
        planned = sum(size * missing[stage] for stage, size in sizes.items())
        parts = [f"{bytes_text(self.nbytes)} are there already"] if self._arenas else []
        parts += [
            f"{count} buffer{'s' * (count > 1)} of {bytes_text(sizes[stage])} for passes of stage {stage}"
            for stage, count in missing.items()
            if count and sizes[stage]
        ]
        later = sorted({of for number, of in self._stage_of.items() if of not in sizes and number not in self._arenas})
        if later:
            parts.append(f"more for stage {', '.join(map(str, later))}: dry_run() says how much")
        told = (
            f"offloading takes {bytes_text(self.nbytes + planned)} of host memory on rank {self._rank} "
            f"({', '.join(parts)})"
        )
        if self._limit is not None and self.nbytes + planned > self._limit:
            raise PipelineError(f"{told}; host_bytes allows {bytes_text(self._limit)}")
        if planned > (available := _available_bytes()):
            raise PipelineError(f"{told}; its machine has {bytes_text(available)} left")
        return told

    def _larger(self, number: int, needed: int, arena: Arena) -> Arena:
        """Return a larger buffer, or the same one if there is no room."""
        size = host_buffer_bytes(needed)
        self._close_replaced()
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
            if not self._replaced:  # else there may be room once the device has read those
                self._refused = size
            return arena
        self._replaced.append((self._read.pop(number, None), arena))
        self._close_replaced()
        self._arenas[number] = larger
        return larger

    def _close_replaced(self) -> None:
        """Return the memory of replaced buffers that the device has read. The host does not wait for the others: what
        the device waits for may have failed.
        """
        waiting = []
        for event, arena in self._replaced:
            if event is None or event.query():
                arena.close()
            else:
                waiting.append((event, arena))
        self._replaced = waiting

    def close(self) -> None:
        """Return all memory, once the device has read it."""
        used = [(self._read.get(number), arena) for number, arena in self._arenas.items()]
        for event, arena in (*used, *self._replaced):
            if event is not None:
                event.synchronize()
            arena.close()
        self._arenas.clear()
        self._read.clear()
        self._replaced.clear()


def validate_together(team: Team, more: int) -> None:
    """Raise PipelineError on all ranks if the ranks of one machine do not together have room for so much more each."""
    every = team.gather((machine(), more, _available_bytes()), tuple[str, int, int])
    for name in dict.fromkeys(where for where, _, _ in every):
        there = {rank: row for rank, row in enumerate(every) if row[0] == name}
        needed, available = sum(more for _, more, _ in there.values()), min(left for _, _, left in there.values())
        if needed > available:
            raise PipelineError(
                f"offloading takes {bytes_text(needed)} more of host memory on ranks {', '.join(map(str, there))}, "
                f"which share a machine that has {bytes_text(available)} left"
            )


def _available_bytes() -> int:
    """Return how much memory this machine could still give."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = machine_bytes()
    return min(available, _container_bytes(Path("/sys/fs/cgroup")))


def _container_bytes(folder: Path) -> int:
    """Return how much memory the container that this runs in may still take; more than any machine has without one."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sys.maxsize if limit == "max" else max(0, int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return sys.maxsize
