"""The clock of a simulated link: when each message of a channel may arrive."""

import time
from collections import deque
from collections.abc import Iterator


class LinkClock:
    """The messages on one simulated link, which carries one after the other."""

    __slots__ = ("_arrivals",)

    def __init__(self) -> None:
        self._arrivals: deque[tuple[int, float]] = deque()  # numbers and times

    def __len__(self) -> int:
        """Return how many messages are still on the link."""
        return len(self._arrivals)

    def start(self, number: int, seconds: float) -> None:
        """Put a message on the link, behind those already there."""
        begin = max(time.perf_counter(), self._arrivals[-1][1] if self._arrivals else 0.0)
        self._arrivals.append((number, begin + seconds))

    def take_arrived(self) -> Iterator[int]:
        """Yield the numbers of the messages whose time has passed."""
        while self._arrivals and time.perf_counter() >= self._arrivals[0][1]:
            yield self._arrivals.popleft()[0]

    def clear(self) -> None:
        self._arrivals.clear()
