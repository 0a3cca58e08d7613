"""Memory of ranks that the broker has open: while messages in flight use it, and as much again as may be used soon."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stretto import cuda

KEPT = 4 * 2**30
"""Bytes that stay open though no message in flight uses them, where memory is short. Opening and closing takes 60 µs
for 64 MiB: in a model whose experts exchange that much, a step took 1.5 times as long when only so much stayed open."""


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
    says so, or is gone. An allocator that finds no more memory frees what it can and tries again at once, before
    anybody could say so: where memory is short, what has not been used for long is closed before. What a message in
    flight uses is never closed.

    To close memory, the driver waits for all that this process has queued. So nothing is closed while a stream waits
    for a rank: from when there is something to close until it is closed, streams begin no such wait.
    """

    def __init__(self, is_in_flight: Callable[[int, int], bool], is_waiting: Callable[[], bool]) -> None:
        """The functions say whether a message, by block and number, has yet to arrive; and whether a stream waits."""
        self._is_in_flight, self._is_waiting = is_in_flight, is_waiting
        self._open: dict[tuple[object, bytes], _Mapping] = {}
        self._bytes = 0
        self.is_short = False
        """Whether little of the device's memory is free."""
        self.has_work = False
        """Whether something is to be closed, as soon as no stream waits."""

    def open(self, owner: object, handle: bytes, size: int, *, block: int, number: int) -> int:
        """Where an allocation lies here, for a message that is about to be in flight."""
        mapping = self._open.pop((owner, handle), None)
        is_new = mapping is None
        if mapping is None:
            mapping = _Mapping(cuda.open_shared(handle), size)
            self._bytes += size
        self._open[owner, handle] = mapping
        mapping.users[block] = number
        if is_new and self.is_short and self._bytes > KEPT:
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
        """Close what nothing in flight uses: all that is freed, and where memory is short, what was used longest ago
        beyond what is kept; or see that no stream begins to wait until that can be done.
        """
        kept, closing = 0, []
        for key, mapping in reversed(self._open.items()):
            if self._is_used(mapping):
                continue
            if mapping.is_freed or (self.is_short and kept + mapping.size > KEPT):
                closing.append(key)
            else:
                kept += mapping.size
        self.has_work = bool(closing) and self._is_waiting()
        for key in closing if not self.has_work else ():
            mapping = self._open.pop(key)
            self._bytes -= mapping.size
            with contextlib.suppress(cuda.DriverError):
                cuda.close_shared(mapping.address)

    def _is_used(self, mapping: _Mapping) -> bool:
        if mapping.users and not any(self._is_in_flight(*user) for user in mapping.users.items()):
            mapping.users.clear()
        return bool(mapping.users)
