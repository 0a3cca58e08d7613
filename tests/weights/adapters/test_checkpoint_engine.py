"""checkpoint-engine's wire against a worker in a process of its own: a small stand-in that follows it, and the
package's own worker function where it is installed, on CPU with its choice of a device replaced. No engine is run."""

import ast
import hashlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pushes import begun
from stretto.ir.errors import WeightsError
from stretto.weights.adapters import checkpoint_engine as adapter
from stretto.weights.adapters.checkpoint_engine import CheckpointEngineWorkers
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.layout import lay_out, least_bucket
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.send.endpoint import Offer, Wanted

zmq = pytest.importorskip("zmq", reason="checkpoint-engine's wire needs pyzmq (the extra adapters)")
UUID = f"GPU-{os.getpid()}"
DEADLINE = 60.0
INSTALLED = all(importlib.util.find_spec(name) for name in ("checkpoint_engine", "fastapi", "httpx", "loguru"))
KINDS = [
    "stand-in",
    pytest.param("package", marks=pytest.mark.skipif(not INSTALLED, reason="checkpoint-engine is not installed")),
]

# Reads a socket's path from each line, and writes a line of what came of the update.
WORKER = """
import gc, hashlib, json, os, pickle, signal, sys, traceback, types
import torch, zmq

context = zmq.Context()

def cut(buffer, name, shape, dtype, offset):
    return buffer[offset : offset + dtype.itemsize * shape.numel()].view(dtype).view(shape)

def stand_in(context, path, device, *, run, post_hook):
    socket = context.socket(zmq.REP)
    socket.connect(path)
    try:
        rebuild, args = pickle.loads(socket.recv())
        buffer = rebuild(*[*args[:6], device, *args[7:]])
        socket.send(b"")
        while (told := pickle.loads(socket.recv())) is not None:
            if isinstance(told, Exception):
                raise told
            try:
                run([(t["name"], cut(buffer, **t)) for t in told])
                socket.send(b"")
            except Exception:
                socket.send_string(traceback.format_exc())
        socket.send(b"")
        assert pickle.loads(socket.recv()) is None
        post_hook()
        socket.send(b"")
    finally:
        socket.close()

def update(*args, **kwargs):
    if sys.argv[1] == "stand-in":
        return stand_in(*args, **kwargs)
    from checkpoint_engine import worker
    nothing = lambda: None
    module = types.SimpleNamespace(synchronize=nothing, ipc_collect=nothing, empty_cache=nothing)
    worker.DeviceManager = lambda: types.SimpleNamespace(device_module=module)
    worker.update_weights_from_ipc(*args, **kwargs)

for line in sys.stdin:
    loaded, hooked = {}, []
    def run(weights):
        for name, tensor in weights:
            if name == "refused" and not os.path.exists(sys.argv[2]):
                open(sys.argv[2], "w").close()
                raise ValueError("no room for refused")
            if name == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "stopped" and not os.path.exists(sys.argv[2]):
                open(sys.argv[2], "w").close()
                os.kill(os.getpid(), signal.SIGSTOP)
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            loaded[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
    try:
        update(context, line.strip(), 0, run=run, post_hook=lambda: hooked.append(1))
        error = ""
    except Exception as caught:
        error = repr(caught)
    print(json.dumps({"loaded": loaded, "hooked": len(hooked), "error": error}), flush=True)
"""


class Engine:
    """A worker's process, and the request that makes it update."""

    def __init__(self, kind: str, mark: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-c", WORKER, kind, str(mark)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answers: list[dict[str, Any]] = []
        self.sockets: list[list[tuple[str, str]]] = []
        self.answered = threading.Semaphore(0)

    def send(self, sockets: list[tuple[str, str]]) -> None:
        assert self.process.stdin is not None
        self.sockets.append(sockets)
        self.process.stdin.write(f"{sockets[0][1]}\n")
        self.process.stdin.flush()

    def request(self, sockets: list[tuple[str, str]]) -> None:
        self.send(sockets)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the engine is dead")
        self.answers.append(json.loads(line))
        self.answered.release()
        if self.answers[-1]["error"]:
            raise RuntimeError(self.answers[-1]["error"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    def make(kind: str) -> Engine:
        made.append(Engine(kind, tmp_path / "mark"))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def endpoint() -> Iterator[Callable[..., CheckpointEngineWorkers]]:
    made: list[CheckpointEngineWorkers] = []

    def make(request: Any, **options: Any) -> CheckpointEngineWorkers:
        made.append(CheckpointEngineWorkers(UUID, request, device="cpu", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def model(seed: int, *names: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {
        "embed": torch.randn(33, 7).bfloat16(),
        "scale": torch.tensor(1.5 + seed),
        "empty": torch.empty(0, 4),
        "codes": torch.randint(0, 255, (500,), dtype=torch.uint8),
        "fp8": torch.randn(64, 3).to(torch.float8_e4m3fn),
        "steps": torch.arange(9) * seed,
    }
    return tensors | {name: torch.full((3,), float(seed)) for name in names}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def offered(tensors: dict[str, torch.Tensor], version: str = "v") -> Offer:
    entries = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())
    manifest = Manifest(version, entries)
    size = least_bucket(manifest)
    return Offer(manifest, lay_out(manifest, size), size, False, SharedBuffers(size, torch.device("cpu")), "")


def push(to: CheckpointEngineWorkers, tensors: dict[str, torch.Tensor], *, seconds: float = DEADLINE) -> bool:
    offer = offered(tensors)
    try:
        assert to.open(offer, seconds=seconds) == Wanted(set())
        begun(to, "wait", seconds=DEADLINE)
        for number, bucket in enumerate(offer.buckets):
            slot = number % 2
            for piece in bucket.pieces:
                data = bytes_of(tensors[offer.manifest.entries[piece.entry].name])
                whole = offer.shared.tensors[slot]
                whole[piece.offset : piece.offset + piece.nbytes] = torch.tensor(list(data), dtype=torch.uint8)
            to.load(number, slot, b"", seconds=seconds)
        to.end(seconds=DEADLINE)
        return to.commit(seconds=DEADLINE)
    except WeightsError as error:
        to.abandon(str(error))
        raise
    finally:
        offer.shared.close()


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {n: [str(t.dtype), list(t.shape), hashlib.sha256(bytes_of(t)).hexdigest()] for n, t in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_arrive_bit_by_bit_over_two_updates(kind: str, engine: Any, endpoint: Any) -> None:
    worker = engine(kind)
    to = endpoint(worker.request)
    for seed in (1, 2):
        assert len(offered(model(seed)).buckets) > 2  # both buffers are used, one of them twice
        assert push(to, model(seed)) == "unaccounted"
        assert worker.answers[-1] == {"loaded": expected(model(seed)), "hooked": 1, "error": ""}
    assert worker.sockets == [[(UUID, f"ipc://@checkpoint-engine-{UUID}-{n}.sock")] for n in (1, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_loader_is_named_and_the_next_update_works(kind: str, engine: Any, endpoint: Any) -> None:
    worker = engine(kind)
    to = endpoint(worker.request)
    with pytest.raises(WeightsError, match=rf"{UUID} failed at bucket \d+ .*ValueError: no room for refused"):
        push(to, model(1, "refused"))
    assert worker.answered.acquire(timeout=DEADLINE)
    assert "the update was abandoned" in worker.answers[-1]["error"]
    push(to, model(2, "refused"))
    assert worker.answers[-1]["loaded"] == expected(model(2, "refused"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_noticed_before_the_deadline(kind: str, engine: Any, endpoint: Any) -> None:
    to = endpoint(engine(kind).send)  # so that nobody else says so
    with pytest.raises(WeightsError, match=rf"{UUID} is gone; it did not answer to bucket \d+ \(.*killed\)"):
        push(to, model(1, "killed"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_worker_ends_with_the_deadline_and_is_told_to_stop(kind: str, engine: Any, endpoint: Any) -> None:
    worker = engine(kind)
    to = endpoint(worker.request)
    with pytest.raises(WeightsError, match=rf"{UUID} did not answer to bucket \d+ \(.*stopped\) in time"):
        push(to, model(1, "stopped"), seconds=10.0)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.answered.acquire(timeout=DEADLINE)
    assert "the update was abandoned" in worker.answers[-1]["error"]
    push(to, model(2, "stopped"))
    assert worker.answers[-1]["loaded"] == expected(model(2, "stopped"))


def test_a_worker_that_never_connects_ends_with_the_deadline(endpoint: Any) -> None:
    to = endpoint(lambda _: None)
    to.open(offered(model(1)), seconds=1)
    with pytest.raises(WeightsError, match=rf"{UUID} did not connect for the buffers in time"):
        begun(to, "wait", seconds=0.2)
    with pytest.raises(WeightsError, match="did not connect"):
        to.load(0, 0, 0, seconds=0.2)


def test_an_engine_that_refuses_the_request_is_named_at_once(endpoint: Any) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("404: no such method")

    to = endpoint(refuse)
    to.open(offered(model(1)), seconds=1)
    with pytest.raises(WeightsError, match=rf"{UUID}.*404: no such method"):
        begun(to, "wait", seconds=1e6)


def test_a_wait_ends_when_another_thread_abandons(endpoint: Any) -> None:
    asked = threading.Event()
    to = endpoint(lambda _: asked.set())
    to.open(offered(model(1)), seconds=1)
    threading.Thread(target=lambda: asked.wait(DEADLINE) and to.abandon("another receiver failed")).start()
    with pytest.raises(WeightsError, match="another receiver failed"):
        begun(to, "wait", seconds=1e6)


def test_one_request_names_the_sockets_of_all_devices(endpoint: Any) -> None:
    asked: list[list[tuple[str, str]]] = []
    to = endpoint(asked.append, devices=[UUID, "GPU-other"])
    to.open(offered(model(1)), seconds=1)
    with pytest.raises(WeightsError, match="did not connect"):
        begun(to, "wait", seconds=0.2)
    assert asked == [[(uuid, f"ipc://@checkpoint-engine-{uuid}-1.sock") for uuid in (UUID, "GPU-other")]]
    with pytest.raises(WeightsError, match=f"{UUID} is not among"):
        endpoint(None, devices=["GPU-other"])


def test_answers_are_never_unpickled(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the source, nor when a worker answers with a pickle."""
    tree = ast.parse(Path(adapter.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & {"loads", "Unpickler", "recv_pyobj", "recv_serialized"}
    assert "dumps" in used

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    evil, context = pickle.dumps(SimpleNamespace()), zmq.Context()
    monkeypatch.setattr(pickle, "loads", forbidden)
    monkeypatch.setattr(pickle, "Unpickler", forbidden)

    def worker(sockets: list[tuple[str, str]]) -> None:
        with context.socket(zmq.REP) as socket:
            socket.connect(sockets[0][1])
            socket.recv()
            socket.send(evil)
            socket.recv()

    to = endpoint(worker)
    to.open(offered(model(1)), seconds=1)
    with pytest.raises(WeightsError, match="failed at the buffers"):
        begun(to, "wait", seconds=DEADLINE)
    to.abandon("enough")
    context.term()


def test_tensors_in_parts_are_refused(endpoint: Any) -> None:
    offer = offered(model(1))
    parts = Offer(offer.manifest, offer.buckets, offer.bucket_bytes, True, offer.shared, "")
    with pytest.raises(WeightsError, match="only whole tensors"):
        endpoint(None).open(parts, seconds=1)


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(WeightsError, match=r"stretto\[adapters\]"):
        CheckpointEngineWorkers(UUID, None)
