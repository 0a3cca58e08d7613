"""Device allocations of this process that the broker may have mapped."""

import threading
from dataclasses import dataclass

from stretto import cuda


@dataclass(frozen=True, slots=True)
class Allocation:
    base: int
    size: int
    handle: bytes


class Allocations:
    """Allocations by their driver ID, which differs from that of an earlier allocation at the same address."""

    def __init__(self) -> None:
        self._by_id: dict[int, Allocation] = {}
        self._lock = threading.Lock()

    def find(self, address: int) -> Allocation:
        """Return the allocation that contains an address."""
        number = cuda.buffer_id(address)
        with self._lock:
            if number not in self._by_id:
                base, size = cuda.extent(address)
                self._by_id[number] = Allocation(base, size, cuda.export(base))
            return self._by_id[number]

    def take_freed(self) -> list[Allocation]:
        """Remove and return the allocations that were freed since the last call."""
        with self._lock:
            allocations = list(self._by_id.items())
        freed = [number for number, allocation in allocations if not _exists(number, allocation)]
        with self._lock:
            return [self._by_id.pop(number) for number in freed]


def _exists(number: int, allocation: Allocation) -> bool:
    try:
        return cuda.buffer_id(allocation.base) == number
    except cuda.DriverError:
        return False
