"""Endpoints whose engine a server pauses and resumes."""

from collections.abc import Callable
from typing import Protocol

from stretto.ir.errors import WeightsError
from stretto.weights.adapters.http import seconds_left
from stretto.weights.messages import Assurance, InFlight
from stretto.weights.send.endpoint import Endpoint, Offer, Wanted

_WITHDRAW_SECONDS = 10.0


class Server(Protocol):
    """Pauses an engine before a push and resumes it afterwards."""

    def pause(self, version: str, in_flight: InFlight, *, seconds: float) -> None:
        """Stop generating, and prepare for this version."""

    def resume(self, version: str, *, seconds: float) -> None:
        """The version is loaded: drop everything computed with the old weights, and generate."""

    def withdraw(self, *, seconds: float) -> None:
        """The update was cancelled before any weight changed: generate as before."""

    def trouble(self) -> str:
        """Return the server's explanation of a failed update, or an empty string."""


class Served:
    """An endpoint whose engine is paused and resumed through its server.

    For an engine on several devices, wrap only one of its endpoints; the others wait for it. An update that fails after
    it has begun leaves the engine paused, because its weights may be mixed; the next successful push resumes it.
    """

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self.name, self.device = endpoint.name, endpoint.device
        self._endpoint, self._server = endpoint, server
        self._version = ""
        self._untouched = False
        """Whether we have paused the engine, and its weights are unchanged."""
        self._failed = False
        """Whether the last update failed after it had begun, so that the engine must stay paused."""

    def open(self, offer: Offer, *, seconds: float) -> Wanted:
        self._version = offer.manifest.version
        return self._endpoint.open(offer, seconds=seconds)

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        left = seconds_left(seconds)
        self._untouched = not self._failed
        self._named(lambda: self._server.pause(self._version, in_flight, seconds=left()))
        self._explained(lambda: self._endpoint.pause(in_flight, patience=patience, seconds=left()))

    def begin(self, *, seconds: float) -> None:
        self._untouched = False
        self._failed = True  # until the push succeeds
        self._explained(lambda: self._endpoint.begin(seconds=seconds))

    def load(self, bucket: int, slot: int, total: bytes, *, seconds: float) -> None:
        self._endpoint.load(bucket, slot, total, seconds=seconds)

    def end(self, *, seconds: float) -> None:
        self._endpoint.end(seconds=seconds)

    def commit(self, *, seconds: float) -> Assurance:
        left = seconds_left(seconds)
        assurance = self._endpoint.commit(seconds=left())
        self._named(lambda: self._server.resume(self._version, seconds=left()))
        self._failed = False
        return assurance

    def abandon(self, why: str) -> None:
        try:
            self._endpoint.abandon(why)
        finally:
            if self._untouched:
                self._untouched = False
                self._named(lambda: self._server.withdraw(seconds=_WITHDRAW_SECONDS))

    def close(self) -> None:
        self._endpoint.close()

    def _explained(self, act: Callable[[], None]) -> None:
        """Call a function; add the server's explanation to its errors."""
        try:
            act()
        except WeightsError as error:
            trouble = self._server.trouble()
            raise WeightsError(f"{error}; {trouble}" if trouble else str(error)) from None

    def _named(self, act: Callable[[], None]) -> None:
        """Call a function; name this endpoint in its errors."""
        try:
            act()
        except WeightsError as error:
            raise WeightsError(f"{self.name}: {error}") from None
