"""Allocations of this process that its broker may have open, until they are freed."""

import threading
from dataclasses import dataclass

from stretto import cuda


@dataclass(frozen=True, slots=True)
class Allocation:
    base: int
    size: int
    handle: bytes


class Allocations:
    """By the number that the driver gives each allocation, so that another at the same address is another."""

    def __init__(self) -> None:
        self._known: dict[int, Allocation] = {}
        self._lock = threading.Lock()

    def find(self, address: int) -> Allocation:
        """The one that an address lies in."""
        number = cuda.buffer_id(address)
        with self._lock:
            if number not in self._known:
                base, size = cuda.extent(address)
                self._known[number] = Allocation(base, size, cuda.export(base))
            return self._known[number]

    def take_freed(self) -> list[Allocation]:
        """Those that were freed since the last time."""
        with self._lock:
            known = list(self._known.items())
        freed = [number for number, allocation in known if not _is_there(number, allocation)]
        with self._lock:
            return [self._known.pop(number) for number in freed]


def _is_there(number: int, allocation: Allocation) -> bool:
    try:
        return cuda.buffer_id(allocation.base) == number
    except cuda.DriverError:
        return False
