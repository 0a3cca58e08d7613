"""The gate that generations pass before each token, and that an update closes."""

import threading
import time
from collections.abc import Callable

from stretto.ir.errors import WeightsError
from stretto.weights.messages import InFlight


class Unavailable(WeightsError):  # noqa: N818
    """The engine cannot generate now."""


class Aborted(Unavailable):
    """An update ended this generation."""


class Gate:
    """Open while no rank has paused."""

    def __init__(self, serving: Callable[[], str], dirty: Callable[[], bool], *, patience: float) -> None:
        """`serving` gives the version, or raises while there is none; `dirty` says whether to wait is in vain."""
        self._serving, self._dirty, self._patience = serving, dirty, patience
        self.changed = threading.Condition()
        self.paused: set[int] = set()
        """The ranks that have."""
        self._in_flight: InFlight = "wait"
        self._running = self._stepping = 0

    # An update.

    def pause(self, rank: int, in_flight: InFlight) -> None:
        """Nothing is computed from here until this rank resumes."""
        with self.changed:
            self.paused.add(rank)
            self._in_flight = in_flight
            self.changed.notify_all()
            still = self.changed.wait_for(
                lambda: not (self._stepping if in_flight == "keep" else self._running), self._patience
            )
            if not still:
                raise WeightsError(f"{self._running} generations went on for {self._patience:g} s; abort or keep them")

    def resume(self, rank: int) -> None:
        with self.changed:
            self.paused.discard(rank)
            self.changed.notify_all()

    # A generation.

    def enter(self) -> str:
        """Begin one, with the version that is returned."""
        with self.changed:
            version = self._open()
            self._running += 1
            return version

    def leave(self) -> None:
        with self.changed:
            self._running -= 1
            self.changed.notify_all()

    def before_token(self, version: str) -> str:
        """Go on, with the version that is returned: another one if the generation was kept during an update."""
        with self.changed:
            if self.paused and self._in_flight == "keep":
                version = self._open()
            if self.paused and self._in_flight == "abort":
                raise Aborted("aborted by an update of the weights; ask again")
            self._stepping += 1
            return version

    def after_token(self) -> None:
        with self.changed:
            self._stepping -= 1
            self.changed.notify_all()

    def _open(self) -> str:
        """Wait for it, within limits."""
        deadline = time.monotonic() + self._patience
        while True:
            in_vain = self._dirty()  # asked first, so that what is raised then says why it is dirty
            try:
                version = self._serving()
                if not self.paused:
                    return version
                raise Unavailable(f"not serving: rank {min(self.paused)} has paused")
            except WeightsError as error:
                left = deadline - time.monotonic()
                if left <= 0 or in_vain:
                    raise Unavailable(str(error)) from None
            self.changed.wait(min(left, 0.1))  # not every change of a receiver's state is told
