"""Ranks' memory that the broker has mapped: for messages in flight, and for messages that may follow soon."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stretto import cuda

KEPT = 4 * 2**30
"""Bytes that stay mapped though no message in flight uses them, where memory is short. Mapping and unmapping 64 MiB
takes 60 µs: in a model whose experts exchange that much, a step took 1.5 times as long when only `KEPT` stayed mapped.
"""


@dataclass(slots=True)
class _Mapping:
    address: int
    size: int
    users: dict[int, int] = field(default_factory=dict)
    """The last message of each channel that uses it, by the channel's block."""
    is_freed: bool = False
    """Whether its owner has freed the allocation."""


class Mappings:
    """Mapped allocations by owner and handle; the last one in the dict was used last.

    Memory that its owner has freed stays allocated on the device until the broker unmaps it. So the broker unmaps it
    when the owner reports that, or is gone. An allocator that runs out of memory frees what it can and retries at once,
    before the owner can report anything: so where memory is short, the broker unmaps what was used longest ago in
    advance. It never unmaps memory that a message in flight uses.

    Unmapping makes the driver wait for everything that this process has queued. So nothing is unmapped while a stream
    waits for a rank: once there is something to unmap, no stream begins such a wait until it is unmapped.
    """

    def __init__(self, is_in_flight: Callable[[int, int], bool], is_waiting: Callable[[], bool]) -> None:
        """`is_in_flight` says whether a message, by block and number, has yet to arrive; `is_waiting` whether a stream
        waits for a rank.
        """
        self._is_in_flight, self._is_waiting = is_in_flight, is_waiting
        self._open: dict[tuple[object, bytes], _Mapping] = {}
        self._bytes = 0
        self.is_short = False
        """Whether little of the device's memory is free."""
        self.has_work = False
        """Whether something must be unmapped as soon as no stream waits."""

    def open(self, owner: object, handle: bytes, size: int, *, block: int, number: int) -> int:
        """Return the address of an allocation in this process, for a message that is about to be in flight."""
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
        """Unmap an allocation that its owner has freed."""
        mapping = self._open.get((owner, handle))
        if mapping is not None:
            mapping.is_freed = True
            self.trim()

    def forget(self, owner: object) -> None:
        """Unmap all memory of a process that is gone."""
        for (other, _), mapping in self._open.items():
            mapping.is_freed |= other is owner
        self.trim()

    def ended(self, blocks: range) -> None:
        """Forget the messages of these blocks: all have arrived, and the numbers will be used again."""
        for mapping in self._open.values():
            mapping.users = {block: number for block, number in mapping.users.items() if block not in blocks}

    def trim(self) -> None:
        """Unmap what is freed and, where memory is short, what was used longest ago beyond `KEPT` bytes.

        Messages in flight keep their memory. While a stream waits for a rank, only set `has_work`.
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
