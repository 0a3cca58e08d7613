"""SGLang's server against a stand-in over HTTP that answers as sglang/srt/entrypoints/http_server.py does (its routes,
bodies of managers/io_struct.py, 400 with success: false); its worker follows checkpoint-engine's wire. No SGLang."""

import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from pushes import begun
from stretto.ir.errors import WeightsError
from stretto.weights.adapters import Http
from stretto.weights.adapters.sglang import SglangServer
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.layout import lay_out
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.send.endpoint import Offer

zmq = pytest.importorskip("zmq", reason="checkpoint-engine's wire needs pyzmq (the extra adapters)")
UUID = f"GPU-sglang-{os.getpid()}"
DEADLINE = 60.0


class Sglang(ThreadingHTTPServer):
    """Records what it is asked, and loads what its worker is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.calls: list[tuple[str, Any]] = []
        self.loaded: dict[str, list[float]] = {}
        self.refuses: set[str] = set()
        self.context = zmq.Context()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def update(self, path: str) -> None:
        with self.context.socket(zmq.REP) as socket:
            socket.connect(path)
            rebuild, args = pickle.loads(socket.recv())
            buffer = rebuild(*args)
            socket.send(b"")
            while (told := pickle.loads(socket.recv())) is not None:
                if isinstance(told, Exception):
                    raise told
                for each in told:
                    size = each["dtype"].itemsize * each["shape"].numel()
                    data = buffer[each["offset"] : each["offset"] + size].view(each["dtype"])
                    self.loaded[each["name"]] = data.view(each["shape"]).tolist()
                socket.send(b"wrong shape" if "load" in self.refuses else b"")
            del buffer
            socket.send(b"")
            socket.recv()
            socket.send(b"")


class Answering(BaseHTTPRequestHandler):
    server: Sglang

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        self.server.calls.append((path, body))
        try:
            assert path not in self.server.refuses, f"{path} is refused"
            if path == "/update_weights_from_ipc":
                self.server.update(body["zmq_handles"][UUID])
            self.answer(200, {"success": True, "message": ""})
        except Exception as error:
            self.answer(400, {"success": False, "message": str(error)})

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sglang() -> Iterator[Sglang]:
    server = Sglang()
    yield server
    server.shutdown()
    server.server_close()
    server.context.destroy(linger=0)


@pytest.fixture
def endpoint(sglang: Sglang) -> Iterator[Any]:
    made = SglangServer(sglang.url).endpoint(UUID, device="cpu")
    yield made
    made.close()


@pytest.fixture
def offer() -> Iterator[Offer]:
    manifest = Manifest("step-7", (TensorSpec("a", "float32", (2, 2)), TensorSpec("b", "float32", (3,))))
    shared = SharedBuffers(256, torch.device("cpu"))
    shared.tensors[0].view(torch.float32)[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    shared.tensors[1].view(torch.float32)[:3] = torch.tensor([5.0, 6.0, 7.0])
    yield Offer(manifest, lay_out(manifest, 256), 256, False, shared, "")
    shared.close()


def load(to: Any, offer: Offer) -> None:
    to.open(offer, seconds=DEADLINE)
    begun(to, "keep", seconds=DEADLINE)
    for number in range(2):
        to.load(number, number, b"", seconds=DEADLINE)
    to.end(seconds=DEADLINE)


def test_a_push_pauses_updates_flushes_and_continues_in_this_order(sglang: Sglang, endpoint: Any, offer: Offer) -> None:
    for number in (1, 2):
        sglang.calls.clear()
        sglang.loaded.clear()
        load(endpoint, offer)
        handles = {UUID: f"ipc://@checkpoint-engine-{UUID}-{number}.sock"}
        update = {"zmq_handles": handles, "flush_cache": False, "weight_version": "step-7"}
        before = [("/pause_generation", {"mode": "retract"}), ("/update_weights_from_ipc", update)]
        assert sglang.calls == before  # nobody goes on until all have loaded
        endpoint.commit(seconds=DEADLINE)
        assert sglang.calls == [*before, ("/flush_cache", {}), ("/continue_generation", {})]
        assert sglang.loaded == {"a": [[1.0, 2.0], [3.0, 4.0]], "b": [5.0, 6.0, 7.0]}


def test_an_update_that_failed_leaves_it_paused_and_the_next_resumes_it(
    sglang: Sglang, endpoint: Any, offer: Offer
) -> None:
    sglang.refuses = {"load"}
    with pytest.raises(WeightsError, match=rf"{UUID} failed at bucket 0 \(a … a\): wrong shape"):
        load(endpoint, offer)
    endpoint.abandon("wrong shape")
    assert [path for path, _ in sglang.calls] == ["/pause_generation", "/update_weights_from_ipc"]
    sglang.refuses = set()
    load(endpoint, offer)
    endpoint.commit(seconds=DEADLINE)
    assert sglang.calls[-1][0] == "/continue_generation"


def test_a_push_that_comes_to_nothing_before_it_begins_leaves_it_running(
    sglang: Sglang, endpoint: Any, offer: Offer
) -> None:
    endpoint.open(offer, seconds=DEADLINE)
    endpoint.pause("keep", patience=DEADLINE, seconds=DEADLINE)
    endpoint.abandon("another engine could not pause")
    assert [path for path, _ in sglang.calls] == ["/pause_generation", "/continue_generation"]
    sglang.refuses = {"load"}
    with pytest.raises(WeightsError, match="wrong shape"):
        load(endpoint, offer)
    endpoint.abandon("wrong shape")
    endpoint.open(offer, seconds=DEADLINE)
    endpoint.pause("keep", patience=DEADLINE, seconds=DEADLINE)
    endpoint.abandon("another engine could not pause")
    assert sglang.calls[-1][0] == "/pause_generation"  # its weights are mixed since the push before


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_ipc"])
def test_a_refused_start_is_named(sglang: Sglang, endpoint: Any, offer: Offer, path: str) -> None:
    sglang.refuses = {path}
    endpoint.open(offer, seconds=DEADLINE)
    with pytest.raises(WeightsError, match=f"{UUID}.*{sglang.url}: POST {path} was answered with 400.*is refused"):
        begun(endpoint, "abort", seconds=DEADLINE)


def test_it_stays_paused_if_the_cache_cannot_be_flushed(sglang: Sglang, endpoint: Any, offer: Offer) -> None:
    load(endpoint, offer)
    sglang.refuses = {"/flush_cache"}
    with pytest.raises(WeightsError, match=r"/flush_cache.* was answered with 400"):
        endpoint.commit(seconds=DEADLINE)
    assert "/continue_generation" not in [path for path, _ in sglang.calls]


def test_waiting_for_requests_in_flight_is_refused_before_anything_happens(
    sglang: Sglang, endpoint: Any, offer: Offer
) -> None:
    endpoint.open(offer, seconds=DEADLINE)
    with pytest.raises(WeightsError, match="'keep' or 'abort'"):
        begun(endpoint, "wait", seconds=DEADLINE)
    assert sglang.calls == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_error_and_the_key_goes_nowhere(status: int) -> None:
    came: list[tuple[str, str, str | None]] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.command, self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        http = Http(f"http://127.0.0.1:{server.server_port}", key="secret")
        for call in (http.get, http.post):
            with pytest.raises(WeightsError, match=f"was answered with {status}"):
                call("/pause", seconds=DEADLINE)
        server.shutdown()
    assert came == [("GET", "/pause", "Bearer secret"), ("POST", "/pause", "Bearer secret")]


@pytest.mark.parametrize("how", ["drips", "mute body", "nested"])
def test_odd_answers_are_told_in_one_line_and_in_time(how: str) -> None:
    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if how == "mute body" else 200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            for _ in range(100 if how == "drips" else 0):
                self.wfile.write(b".")
                time.sleep(0.3)
            if how == "nested":
                self.wfile.write(b"[" * 100_000)
            over.wait(DEADLINE)

        def log_message(self, *_: object) -> None:
            pass

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        http, began = Http(f"http://127.0.0.1:{server.server_port}"), time.monotonic()
        if how == "nested":
            assert http.get("/health", seconds=DEADLINE) == "[" * 100_000
        else:
            with pytest.raises(WeightsError, match=r"GET /health was not answered for 1 s"):
                http.get("/health", seconds=1)
            assert time.monotonic() - began < 15  # and not until it has dripped for 30 s
        over.set()
        server.shutdown()


@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "http://127.0.0.1:9/\n"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(WeightsError, match="GET /health failed: "):
        Http(url).get("/health", seconds=DEADLINE)


def test_a_server_that_is_not_there_is_named() -> None:
    server = SglangServer("http://127.0.0.1:9")
    assert not server.alive(seconds=1)
    with pytest.raises(WeightsError, match=r"http://127.0.0.1:9: POST /pause_generation failed: .*refused"):
        server.pause("v", "abort", seconds=DEADLINE)


def test_a_server_that_is_there_is_alive(sglang: Sglang) -> None:
    assert SglangServer(sglang.url).alive()
