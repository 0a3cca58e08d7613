"""Engines of others as receivers: their servers over HTTP, and how a push goes around one."""

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

_MOST = 1 << 20  # bytes of an answer
_WITHDRAWING = 10.0  # seconds


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would carry our key to whoever it names, and make a GET of a POST."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = build_opener(ProxyHandler({}), _NoRedirects())  # an engine that shares our devices is never behind a proxy


class Http:
    """An inference server's HTTP side. Every error names the server, the call and what it answered."""

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
        """The answer, read as JSON if it is. Servers that answer 200 may still say that it was no success."""
        asked = Asked(lambda: self._answer(method, path, data, seconds))
        if not asked.over(seconds):  # a server that sends a byte now and then would never be late otherwise
            raise WeightsError(f"{self.url}: {method} {path} was not answered for {seconds:g} s")
        if asked.error is not None:
            late = isinstance(getattr(asked.error, "reason", asked.error), TimeoutError)
            why = f"was not answered for {seconds:g} s" if late else f"failed: {one_line(asked.error)}"
            raise WeightsError(f"{self.url}: {method} {path} {why}") from None
        code, text = asked.result
        if code is not None:
            raise WeightsError(f"{self.url}: {method} {path} was answered with {code}: {text.strip():.500}")
        told: Any = text
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(text)
        if isinstance(told, dict) and told.get("success") is False:
            raise WeightsError(f"{self.url}: {method} {path} was no success: {text:.500}")
        return told

    def _answer(self, method: str, path: str, data: bytes | None, seconds: float) -> tuple[int | None, str]:
        """What it says, with a code if that says that it is an error."""
        request = Request(self.url + path, data=data, method=method, headers=self._headers)
        try:
            with _OPENER.open(request, timeout=max(0.01, seconds)) as response:
                return None, response.read(_MOST).decode(errors="replace")
        except HTTPError as error:
            with error:
                return error.code, error.read(_MOST).decode(errors="replace")


class Asked:
    """A call that may take long, in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(call,), name="stretto request", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()

    def over(self, seconds: float) -> bool:
        """Whether it has returned, after that long at most."""
        return self._over.wait(max(0.0, seconds))

    def wait(self, who: str, seconds: float) -> None:
        """Until it has returned; raises what it has raised."""
        if not self.over(seconds):
            raise WeightsError(f"{who} did not return from the update in time")
        if self.error is not None:
            raise WeightsError(f"{who} says: {self.error}") from self.error


class Server(Protocol):
    """What stops an engine before a push, and lets it go on after it."""

    def pause(self, version: str, in_flight: InFlight, *, seconds: float) -> None:
        """Stop generating, and expect this version."""

    def resume(self, version: str, *, seconds: float) -> None:
        """All is loaded: forget what was computed with the old weights, and generate."""

    def withdraw(self, *, seconds: float) -> None:
        """Nothing was touched, and no update comes: generate as before."""

    def trouble(self) -> str:
        """What the server says of an update that failed, if it says anything."""


class Served:
    """An endpoint whose engine is paused and resumed by its server.

    Of the endpoints of an engine on several devices, one is served; the others just wait for it. An update that failed
    once it had begun leaves the engine paused, for its weights may be mixed: the next push that goes well resumes it.
    """

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self.name, self.device = endpoint.name, endpoint.device
        self._endpoint, self._server = endpoint, server
        self._version = ""
        self._untouched = False
        """Whether its engine is paused by us, and as it was."""
        self._failed = False
        """Whether an update that had begun has not ended well, so that its engine must stay paused."""

    def open(self, offer: Offer, *, seconds: float) -> Wanted:
        self._version = offer.manifest.version
        return self._endpoint.open(offer, seconds=seconds)

    def pause(self, in_flight: InFlight, *, patience: float, seconds: float) -> None:
        left = seconds_left(seconds)
        self._untouched = not self._failed
        self._named(lambda: self._server.pause(self._version, in_flight, seconds=left()))
        self._troubled(lambda: self._endpoint.pause(in_flight, patience=patience, seconds=left()))

    def begin(self, *, seconds: float) -> None:
        self._untouched = False
        self._failed = True  # until all has gone well
        self._troubled(lambda: self._endpoint.begin(seconds=seconds))

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
                self._named(lambda: self._server.withdraw(seconds=_WITHDRAWING))

    def close(self) -> None:
        self._endpoint.close()

    def _troubled(self, act: Callable[[], None]) -> None:
        """With what the server says of it."""
        try:
            act()
        except WeightsError as error:
            trouble = self._server.trouble()
            raise WeightsError(f"{error}; {trouble}" if trouble else str(error)) from None

    def _named(self, act: Callable[[], None]) -> None:
        try:
            act()
        except WeightsError as error:
            raise WeightsError(f"{self.name}: {error}") from None


def seconds_left(seconds: float) -> Callable[[], float]:
    """How much is left of so many seconds, at every call."""
    deadline = time.monotonic() + seconds
    return lambda: max(0.01, deadline - time.monotonic())
