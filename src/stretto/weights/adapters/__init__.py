"""Adapters for other inference engines: an HTTP client for their servers, and endpoints that a server pauses."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from stretto.ir.errors import WeightsError, one_line
from stretto.weights.messages import Assurance, InFlight
from stretto.weights.send.endpoint import Endpoint, Offer, Wanted

_MAX_ANSWER_BYTES = 1 << 20
_WITHDRAW_SECONDS = 10.0


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirects: one would send our key to another server, and turn a POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = build_opener(ProxyHandler({}), _NoRedirects())  # an engine on our devices is never behind a proxy


class Http:
    """A client of an inference server's HTTP API. Every error names the server, the request and the answer."""

    def __init__(self, base_url: str, *, key: str | None = None) -> None:
        self.url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str, *, seconds: float) -> Any:
        return self._call("GET", path, None, seconds)

    def post(self, path: str, body: object = None, *, seconds: float) -> Any:
        return self._call("POST", path, json.dumps({} if body is None else body).encode(), seconds)

    def alive(self, *, seconds: float = 5.0) -> bool:
        try:
            self.get("/health", seconds=seconds)
        except WeightsError:
            return False
        return True

    def _call(self, method: str, path: str, data: bytes | None, seconds: float) -> Any:
        """Return the answer, parsed if it is JSON; raise WeightsError on failure, even if it came with status 200."""
        call = BackgroundCall(lambda: self._answer(method, path, data, seconds))
        if not call.finished(seconds):  # the socket timeout alone never ends an answer that comes byte by byte
            raise WeightsError(f"{self.url}: {method} {path} was not answered for {seconds:g} s")
        if call.error is not None:
            late = isinstance(getattr(call.error, "reason", call.error), TimeoutError)
            why = f"was not answered for {seconds:g} s" if late else f"failed: {one_line(call.error)}"
            raise WeightsError(f"{self.url}: {method} {path} {why}") from None
        code, text = call.result
        if code is not None:
            raise WeightsError(f"{self.url}: {method} {path} was answered with {code}: {text.strip():.500}")
        answer: Any = text
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(text)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightsError(f"{self.url}: {method} {path} was no success: {text:.500}")
        return answer

    def _answer(self, method: str, path: str, data: bytes | None, seconds: float) -> tuple[int | None, str]:
        """Send a request; return the text of the answer, preceded by the status code if that means an error."""
        request = Request(self.url + path, data=data, method=method, headers=self._headers)
        try:
            with _OPENER.open(request, timeout=max(0.01, seconds)) as response:
                return None, response.read(_MAX_ANSWER_BYTES).decode(errors="replace")
        except HTTPError as error:
            with error:
                return error.code, error.read(_MAX_ANSWER_BYTES).decode(errors="replace")


class BackgroundCall:
    """A function call that may take long, in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._finished = threading.Event()
        threading.Thread(target=self._run, args=(call,), name="stretto request", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except BaseException as error:
            self.error = error
        finally:
            self._finished.set()

    def finished(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether the call has returned."""
        return self._finished.wait(max(0.0, seconds))

    def wait(self, who: str, seconds: float) -> None:
        """Wait until the call has returned; raise WeightsError, naming `who`, if it failed or takes too long."""
        if not self.finished(seconds):
            raise WeightsError(f"{who} did not return from the update in time")
        if self.error is not None:
            raise WeightsError(f"{who} says: {self.error}") from self.error


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


def seconds_left(seconds: float) -> Callable[[], float]:
    """Return a function that returns how many of these seconds are left."""
    deadline = time.monotonic() + seconds
    return lambda: max(0.01, deadline - time.monotonic())
