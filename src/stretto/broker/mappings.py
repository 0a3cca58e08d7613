"""Memory of ranks that the broker has open: while messages in flight use it, and as much again as may be used soon."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stretto.broker import driver

KEPT = 4 * 2**30
"""Bytes that stay open though no message in flight uses them. Opening and closing takes 60 µs for 64 MiB."""


@dataclass(slots=True)
class _Mapping:
    address: int
    size: int
    users: dict[int, int] = field(default_factory=dict)
    """Of each channel, by its block, the last message that uses it."""
    is_freed: bool = False
    """By its owner: it is of no more use."""


class Mappings:
    """Allocations by owner and handle, the one that was used last at the end.

    Memory that its owner has freed stays taken on the device until it is closed here. So it is closed once its owner
    says so, or is gone; and if it has not been used for long. What a message in flight uses is never closed.
    """

    def __init__(self, is_in_flight: Callable[[int, int], bool]) -> None:
        """The function says whether a message, by block and number, has yet to arrive."""
        self._is_in_flight = is_in_flight
        self._open: dict[tuple[object, bytes], _Mapping] = {}
        self._bytes = 0

    def open(self, owner: object, handle: bytes, size: int, *, block: int, number: int) -> int:
        """Where an allocation lies here, for a message that is about to be in flight."""
        mapping = self._open.pop((owner, handle), None)
        is_new = mapping is None
        if mapping is None:
            mapping = _Mapping(driver.open_shared(handle), size)
            self._bytes += size
        self._open[owner, handle] = mapping
        mapping.users[block] = number
        if is_new and self._bytes > KEPT:
            self.trim()
        return mapping.address

    def freed(self, owner: object, handle: bytes) -> None:
        """Its owner has freed an allocation."""
        mapping = self._open.get((owner, handle))
        if mapping is not None:
            mapping.is_freed = True
            self.trim()

    def gone(self, owner: object) -> None:
        """A process is no more, nor is its memory."""
        for (other, _), mapping in self._open.items():
            mapping.is_freed |= other is owner
        self.trim()

    def ended(self, blocks: range) -> None:
        """All messages of these blocks have, and others will have the same numbers."""
        for mapping in self._open.values():
            mapping.users = {block: number for block, number in mapping.users.items() if block not in blocks}

    def trim(self) -> None:
        """Close what nothing in flight uses: all that is freed, and what was used longest ago beyond what is kept."""
        kept = 0
        for key, mapping in reversed(list(self._open.items())):
            if self._is_used(mapping):
                continue
            if mapping.is_freed or kept + mapping.size > KEPT:
                del self._open[key]
                self._bytes -= mapping.size
                with contextlib.suppress(driver.DriverError):
                    driver.close_shared(mapping.address)
            else:
                kept += mapping.size

    def _is_used(self, mapping: _Mapping) -> bool:
        if mapping.users and not any(self._is_in_flight(*user) for user in mapping.users.items()):
            mapping.users.clear()
        return bool(mapping.users)
