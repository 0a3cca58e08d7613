"""A client of inference servers' HTTP APIs, and calls that may take long."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError
from typing import Any, TypeVar

from stretto.ir.errors import WeightsError, one_line
from stretto.ir.extras import require

_MAX_ANSWER_BYTES = 1 << 20
_R = TypeVar("_R")


class Http:
    """A client of an inference server's HTTP API. Every error names the server, the request and the answer.

    It follows no redirects: one would send our key to another server, and turn a POST into a GET. It uses no proxies:
    an engine on our devices is never behind one.
    """

    def __init__(self, base_url: str, *, key: str | None = None) -> None:
        require("httpx", extra="adapters", what="an engine's server")
        import httpx

        self.url = base_url.rstrip("/")
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(headers=headers, trust_env=False, follow_redirects=False)

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
        import httpx

        call = in_background(lambda: self._answer(method, path, data, max(0.01, seconds)))
        try:  # httpx's timeouts alone never end an answer that comes byte by byte
            code, text = call.result(max(0.0, seconds))
        except (NotDoneError, httpx.TimeoutException):
            raise WeightsError(f"{self.url}: {method} {path} was not answered for {seconds:g} s") from None
        except Exception as error:
            raise WeightsError(f"{self.url}: {method} {path} failed: {one_line(error)}") from None
        if not 200 <= code < 300:
            raise WeightsError(f"{self.url}: {method} {path} was answered with {code}: {text.strip():.500}")
        answer: Any = text
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(text)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightsError(f"{self.url}: {method} {path} was no success: {text:.500}")
        return answer

    def _answer(self, method: str, path: str, data: bytes | None, seconds: float) -> tuple[int, str]:
        """Send a request; return the status code and the text of the answer, of which it reads the first MiB."""
        with self._client.stream(method, self.url + path, content=data, timeout=seconds) as response:
            answer = bytearray()
            for part in response.iter_bytes():
                answer += part
                if len(answer) >= _MAX_ANSWER_BYTES:
                    break
            return response.status_code, answer[:_MAX_ANSWER_BYTES].decode(errors="replace")


def in_background(call: Callable[[], _R]) -> "Future[_R]":
    """Call a function in a daemon thread of its own, which a process does not wait for when it ends."""
    future: Future[_R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="stretto request", daemon=True).start()
    return future


def failure_of(call: "Future[Any] | None") -> BaseException | None:
    """Return the error that a call has ended with; None if it has not ended, or went well."""
    return call.exception() if call is not None and call.done() else None


def wait_for(call: "Future[Any]", who: str, seconds: float) -> None:
    """Wait until a call has returned; raise WeightsError, naming `who`, if it failed or takes too long."""
    try:
        error = call.exception(max(0.0, seconds))
    except NotDoneError:
        raise WeightsError(f"{who} did not return from the update in time") from None
    if error is not None:
        raise WeightsError(f"{who} says: {error}") from error


def seconds_left(seconds: float) -> Callable[[], float]:
    """Return a function that returns how many of these seconds are left."""
    deadline = time.monotonic() + seconds
    return lambda: max(0.01, deadline - time.monotonic())
