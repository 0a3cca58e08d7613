"""The receivers of one push, which all senders lead through it together: nobody goes on before all have come so far."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar, get_args

import msgspec

from stretto.execute.team import Team
from stretto.ir.errors import PeerError, WeightsError, named, one_line
from stretto.weights.connection import PeerClosed, PeerTimeout
from stretto.weights.messages import Assurance, InFlight
from stretto.weights.send.endpoint import Endpoint, Offer, Wanted, naming
from stretto.weights.send.report import PushError

S = TypeVar("S")
T = TypeVar("T")
_OPENING = 120.0  # seconds for a receiver to look at a manifest and to prepare; it still serves meanwhile
_AHEAD = 3  # buckets that are under way before a receiver gets the next


class _Committed(msgspec.Struct, frozen=True):
    """What came of the last word to a receiver."""

    name: str
    assurance: Assurance | None
    error: str = ""
    lost: bool = False
    """Whether it did not answer, so that nobody knows."""


class Fleet:
    """This sender's part of them. What goes wrong for one of any sender's is raised by all senders."""

    def __init__(self, team: Team, endpoints: Sequence[Endpoint], *, timeout: float, bucket_timeout: float) -> None:
        self._team, self._endpoints = team, endpoints
        self._timeout, self._bucket_timeout = timeout, bucket_timeout

    @contextlib.contextmanager
    def abandoning(self, version: str) -> Iterator[None]:
        """All are told if nothing comes of it."""
        try:
            yield
        except BaseException as error:
            why = f"the push of {version} failed: {one_line(error) or named(error)}"

            def abandon(endpoint: Endpoint) -> None:
                with contextlib.suppress(Exception):  # it has told why, or cannot be told
                    endpoint.abandon(why)

            _each(self._endpoints, abandon)
            raise

    def open(self, offer: Offer) -> list[Wanted]:
        """Offer a version; nothing has happened yet."""
        return self._jointly("", lambda it: it.open(offer, seconds=_OPENING))

    def pause(self, in_flight: InFlight, wanted: Sequence[Wanted], buckets: int) -> None:
        """They stop serving. A receiver may then have to wait for others that pause, begin and end, and for the buckets
        between two of its own."""

        def pause(asked: tuple[Endpoint, Wanted]) -> None:
            endpoint, wants = asked
            runs = groupby(range(buckets), wants.skips.__contains__)
            away = max((len(list(run)) for is_skipped, run in runs if is_skipped), default=0)
            patience = self._timeout + (away + _AHEAD) * self._bucket_timeout
            with self._limited(endpoint, "pause"):
                endpoint.pause(in_flight, patience=patience, seconds=self._timeout)

        self._team.jointly(lambda: _each(list(zip(self._endpoints, wanted, strict=True)), pause))

    def begin(self) -> None:
        """A round of its own after `pause`, so that one that cannot pause leaves the others as they were."""
        self._jointly("begin", lambda it: it.begin(seconds=self._timeout))

    def end(self) -> None:
        self._jointly("finish", lambda it: it.end(seconds=self._timeout))

    def commit(self, version: str) -> dict[str, Assurance]:
        """All serve the new version, or an error says who does."""

        def commit(endpoint: Endpoint) -> _Committed:
            try:
                with self._limited(endpoint, "resume"):
                    assurance = endpoint.commit(seconds=self._timeout)
                    if assurance not in get_args(Assurance):
                        raise WeightsError(f"its commit returned {assurance!r:.40}, which is no assurance")
            except WeightsError as error:
                why = one_line(error).removeprefix(endpoint.name).lstrip(": ")
                return _Committed(endpoint.name, None, why, lost=isinstance(error, PeerClosed))
            return _Committed(endpoint.name, assurance)

        here = _each(self._endpoints, commit)
        try:
            said = [it for rank in self._team.gather(here, list[_Committed]) for it in rank]
        except PeerError as error:
            serve = ", ".join(it.name for it in here if it.assurance is not None)
            raise PeerError(
                f"{error}, at the end of a push: {serve or 'nobody'} serves {version}, others may"
            ) from error
        serving = {it.name: it.assurance for it in said if it.assurance is not None}
        if len(serving) < len(said):
            failed, lost = (
                {it.name: it.error for it in said if it.error and it.lost == lost} for lost in (False, True)
            )
            raise PushError(version, serving, failed, lost)
        return serving

    def _jointly(self, step: str, ask: Callable[[Endpoint], T]) -> list[T]:
        def named_ask(endpoint: Endpoint) -> T:
            with self._limited(endpoint, step):
                return ask(endpoint)

        return self._team.jointly(lambda: _each(self._endpoints, named_ask))

    @contextlib.contextmanager
    def _limited(self, endpoint: Endpoint, step: str) -> Iterator[None]:
        """Who takes too long is told of by the step and by how long it may take."""
        try:
            with naming(endpoint):
                yield
        except PeerTimeout as error:
            raise PeerTimeout(f"{error} ({step}; timeout={self._timeout:g})" if step else str(error)) from error


def _each(asked: Sequence[S], ask: Callable[[S], T]) -> list[T]:
    """Ask all at the same time, also if one of them fails."""
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        asking = [pool.submit(ask, it) for it in asked]
    return [it.result() for it in asking]
