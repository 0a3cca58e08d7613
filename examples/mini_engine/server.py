"""Generation over HTTP on loopback: POST /generate {"tokens": […], "count": n} and GET /status."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from mini_engine.engine import Engine
from stretto.ir.errors import WeightsError

_LARGEST = 1 << 20  # bytes of a request


class Request(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    count: int = 16


class Server:
    """Serves an engine from threads of its own."""

    def __init__(self, engine: Engine, *, port: int = 0) -> None:
        class Answering(_Answering):
            pass

        Answering.engine = engine
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Answering)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Answering(BaseHTTPRequestHandler):
    engine: Engine
    timeout = 60

    def do_POST(self) -> None:
        if self.path != "/generate":
            return self._answer(404, {"error": f"there is no {self.path}; POST /generate"})
        try:
            size = int(self.headers.get("Content-Length", "0"))
            if not 0 <= size <= _LARGEST:
                raise ValueError(f"a request has at most {_LARGEST} bytes (got {size})")
            asked = msgspec.json.decode(self.rfile.read(size), type=Request)
            made = self.engine.generate(asked.tokens, asked.count)
        except WeightsError as error:
            return self._answer(503, {**self._status(), "error": str(error)})
        except ValueError as error:
            return self._answer(400, {"error": str(error)})
        return self._answer(200, {"tokens": made.tokens, "version": made.versions[-1], "versions": made.versions})

    def do_GET(self) -> None:
        if self.path != "/status":
            return self._answer(404, {"error": f"there is no {self.path}; GET /status"})
        return self._answer(200, self._status())

    def _status(self) -> dict[str, Any]:
        """A receiver's, of the first rank that does not serve if there is one; and of all ranks."""
        try:
            ranks = self.engine.ranks()
        except WeightsError as error:
            return {"state": "ended", "error": str(error), "ranks": []}
        first = next((status for status in ranks if status["state"] != "serving"), ranks[0])
        return {**first, "ranks": ranks}

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = msgspec.json.encode(body)
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
