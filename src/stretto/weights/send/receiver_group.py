"""The receivers of one push: all senders take them through its phases together, one phase at a time."""

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
_OPENING = 120.0  # seconds for a receiver to check the manifest and to prepare; it still serves meanwhile
_AHEAD = 3  # buckets in flight before a receiver gets its next one


class _Committed(msgspec.Struct, frozen=True):
    """The result of one receiver's commit."""

    name: str
    assurance: Assurance | None
    error: str = ""
    lost: bool = False
    """Whether the receiver did not answer, so that the result is unknown."""


class ReceiverGroup:
    """This sender's receivers. If a receiver of any sender fails, all senders raise."""

    def __init__(self, team: Team, endpoints: Sequence[Endpoint], *, timeout: float, bucket_timeout: float) -> None:
        self._team, self._endpoints = team, endpoints
        self._timeout, self._bucket_timeout = timeout, bucket_timeout

    @contextlib.contextmanager
    def abandoning(self, version: str) -> Iterator[None]:
        """Tell all receivers to abandon the update if the body raises."""
        try:
            yield
        except BaseException as error:
            why = f"the push of {version} failed: {one_line(error) or named(error)}"

            def abandon(endpoint: Endpoint) -> None:
                with contextlib.suppress(Exception):  # it reported the failure itself, or cannot be reached
                    endpoint.abandon(why)

            _each(self._endpoints, abandon)
            raise

    def open(self, offer: Offer) -> list[Wanted]:
        """Offer a version. The receivers change nothing yet."""
        return self._jointly("", lambda endpoint: endpoint.open(offer, seconds=_OPENING))

    def pause(self, in_flight: InFlight, answers: Sequence[Wanted], buckets: int) -> None:
        """Make all receivers stop serving.

        Afterwards a receiver may have to wait while others pause, begin and end, and while buckets that it skips are
        pushed. `patience` covers that.
        """

        def pause(receiver: tuple[Endpoint, Wanted]) -> None:
            endpoint, answer = receiver
            runs = groupby(range(buckets), answer.skips.__contains__)
            longest_skip = max((len(list(run)) for is_skipped, run in runs if is_skipped), default=0)
            patience = self._timeout + (longest_skip + _AHEAD) * self._bucket_timeout
            with self._naming_timeouts(endpoint, "pause"):
                endpoint.pause(in_flight, patience=patience, seconds=self._timeout)

        self._team.jointly(lambda: _each(list(zip(self._endpoints, answers, strict=True)), pause))

    def begin(self) -> None:
        """Prepare all receivers to load. A separate phase: if one cannot pause, the others stay unchanged."""
        self._jointly("begin", lambda endpoint: endpoint.begin(seconds=self._timeout))

    def end(self) -> None:
        self._jointly("finish", lambda endpoint: endpoint.end(seconds=self._timeout))

    def commit(self, version: str) -> dict[str, Assurance]:
        """Make all receivers serve the new version. Raise PushError if not all do; it lists those that do."""

        def commit(endpoint: Endpoint) -> _Committed:
            try:
                with self._naming_timeouts(endpoint, "resume"):
                    assurance = endpoint.commit(seconds=self._timeout)
                    if assurance not in get_args(Assurance):
                        raise WeightsError(f"its commit returned {assurance!r:.40}, which is no assurance")
            except WeightsError as error:
                why = one_line(error).removeprefix(endpoint.name).lstrip(": ")
                return _Committed(endpoint.name, None, why, lost=isinstance(error, PeerClosed))
            return _Committed(endpoint.name, assurance)

        own_results = _each(self._endpoints, commit)
        try:
            results = [result for rank in self._team.gather(own_results, list[_Committed]) for result in rank]
        except PeerError as error:
            serve = ", ".join(result.name for result in own_results if result.assurance is not None)
            raise PeerError(
                f"{error}, at the end of a push: {serve or 'nobody'} serves {version}, others may"
            ) from error
        serving = {result.name: result.assurance for result in results if result.assurance is not None}
        if len(serving) < len(results):
            failed, lost = (
                {result.name: result.error for result in results if result.error and result.lost == lost}
                for lost in (False, True)
            )
            raise PushError(version, serving, failed, lost)
        return serving

    def _jointly(self, step: str, call: Callable[[Endpoint], T]) -> list[T]:
        """Call all receivers of all senders; return this sender's results. If one fails, all senders raise."""

        def named_call(endpoint: Endpoint) -> T:
            with self._naming_timeouts(endpoint, step):
                return call(endpoint)

        return self._team.jointly(lambda: _each(self._endpoints, named_call))

    @contextlib.contextmanager
    def _naming_timeouts(self, endpoint: Endpoint, step: str) -> Iterator[None]:
        """Add the step and its time limit to the error if an endpoint takes too long."""
        try:
            with naming(endpoint):
                yield
        except PeerTimeout as error:
            raise PeerTimeout(f"{error} ({step}; timeout={self._timeout:g})" if step else str(error)) from error


def _each(receivers: Sequence[S], call: Callable[[S], T]) -> list[T]:
    """Call all receivers at the same time, and wait for all of them even if one fails."""
    with ThreadPoolExecutor(max(1, len(receivers))) as pool:
        futures = [pool.submit(call, receiver) for receiver in receivers]
    return [future.result() for future in futures]
