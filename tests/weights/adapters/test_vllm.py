"""vLLM's side against stand-ins: modules that mimic vllm/distributed/weight_transfer/{base,factory}.py, the lifecycle
of vllm/v1/worker/gpu_worker.py, the contract of model_loader/reload/layerwise.py (loaders keep tensors until a layer is
complete; what is half loaded stays so until finalized), and a server with the routes of entrypoints/rl. No vLLM."""

import importlib
import json
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pushes import begun, total_of
from stretto.ir.errors import WeightsError
from stretto.weights.adapters import vllm as adapter
from stretto.weights.adapters.vllm import Account, VllmServer, register
from stretto.weights.endpoint import Offer, Remote
from stretto.weights.layout import lay_out
from stretto.weights.manifest import Entry, Manifest
from stretto.weights.shared import SharedBuffers

DEADLINE = 60.0


@dataclass
class Info(ABC):  # noqa: B024 (as theirs)
    pass


class Base(ABC):
    """WeightTransferEngine."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self._default = model, self.model_config

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self) -> None:
        self.model, self.model_config = self._default

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...
    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class Factory:
    """WeightTransferEngineFactory."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = module_path, class_name

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: Any) -> Any:
        module_path, class_name = cls._registry[config.backend]
        return getattr(importlib.import_module(module_path), class_name)(config, vllm_config, device, model)


class Model:
    """One layer of a fused qk and a norm. While it is reloaded, tensors are kept until there are three."""

    packed_modules_mapping: ClassVar = {"qk": ["q", "k"]}

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.kept: list[tuple[str, torch.Tensor]] | None = None
        self.threads: set[int] = set()
        self.fails = False
        self.skips = ""

    def modules(self) -> list[Any]:
        return [self]

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        assert self.kept is not None
        self.threads.add(threading.get_ident())
        for name, tensor in weights:
            if self.fails and name == "k":
                raise ValueError("no room for k")
            self.kept.append((name, tensor))
            if len(self.kept) == 3:
                self.live, self.kept = dict(self.kept), []
        return {{"q": "qk", "k": "qk"}.get(name, name) for name, _ in weights if name != self.skips}


def initialize(model: Model) -> None:
    model.kept = [] if model.kept is None else model.kept


def finalize(model: Model, config: str) -> None:
    assert config in ("main config", "draft config")
    model.kept = None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Base,
            "WeightTransferInitInfo": Info,
            "WeightTransferUpdateInfo": Info,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": finalize,
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Factory, "_registry", {})
    adapter._engine.cache_clear()
    yield
    adapter._engine.cache_clear()


class Worker(ThreadingHTTPServer):
    """A server and its one worker, which runs one call at a time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.calls: list[str] = []
        self.main, self.draft = Model(), Model()
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config="main config")
        self.engine = Factory.create_engine(SimpleNamespace(backend="stretto"), config, torch.device("cpu"), self.main)
        self.version: str | None = None
        self.active = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path.partition("?")[0]:
            case "/init_weight_transfer_engine":
                self.engine.init_transfer_engine(self.engine.init_info_cls(**body["init_info"]))
            case "/start_weight_update" | "/start_draft_weight_update":
                assert not self.active, "a weight update is already active"
                if "draft" in path:
                    self.engine.set_weight_update_target(self.draft, "draft config")
                self.engine.start_weight_update()
                self.active = True
            case "/update_weights":
                try:
                    self.engine.update_weights(body["update_info"])
                except BaseException:
                    self.active = False
                    self.engine.reset_weight_update_target()
                    raise
            case "/finish_weight_update":
                assert self.active, "no weight update is active"
                self.engine.finish_weight_update()
                self.engine.reset_weight_update_target()
                self.active, self.version = False, body.get("weight_version")
            case "/pause" | "/resume" | "/reset_prefix_cache" | "/health":
                pass
            case "/weight_info":
                return {"weight_version": self.version}
            case _:
                raise AssertionError(f"no route {path}")
        return {}


class Answering(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        self.server.calls.append(self.path)
        try:
            status, told = 200, self.server.answer(self.path, body)
        except Exception as error:
            status, told = 500, {"error": str(error)}
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def worker(vllm: None) -> Iterator[Worker]:  # noqa: ARG001
    register()
    server = Worker()
    yield server
    server.shutdown()
    server.server_close()
    server.engine.shutdown()


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"unix://{tmp_path}/{{uuid}}-{{rank}}"


def offered(version: str, values: dict[str, float]) -> Offer:
    manifest = Manifest(version, tuple(Entry(name, "float32", (64,)) for name in values))
    return Offer(manifest, lay_out(manifest, 256), 256, False, SharedBuffers(256, torch.device("cpu")), "")


def push(to: Any, version: str, values: dict[str, float]) -> str:
    """One bucket per tensor; both buffers are used again and again."""
    offer = offered(version, values)
    try:
        to.open(offer, seconds=DEADLINE)
        begun(to, "keep", seconds=DEADLINE)
        for number, value in enumerate(values.values()):
            buffer = offer.shared.tensors[number % 2]
            buffer.view(torch.float32).fill_(value)
            to.load(number, number % 2, total_of(offer.buckets[number], buffer), seconds=DEADLINE)
        to.end(seconds=DEADLINE)
        return str(to.commit(seconds=DEADLINE))
    except WeightsError as error:
        to.abandon(str(error))
        raise
    finally:
        offer.shared.close()


def values(model: Model) -> dict[str, float]:
    return {name: tensor.unique().item() for name, tensor in model.live.items()}


NEW = {"q": 1.0, "k": 2.0, "norm": 3.0}


def test_a_push_goes_through_the_lifecycle_into_the_model(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    for add in (0.0, 10.0):
        worker.calls.clear()
        wanted = {name: value + add for name, value in NEW.items()}
        assert push(to, f"step-{add:g}", wanted) == "delivered"
        assert values(worker.main) == wanted
        assert worker.main.kept is None  # reload was finalized
        assert [call.partition("?")[0] for call in worker.calls] == [
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert worker.calls[0] == "/pause?mode=keep"
        assert server.version() == f"step-{add:g}"
    assert server.alive()
    to.close()


def test_the_model_is_touched_only_in_the_thread_that_vllm_lends(worker: Worker, address: str) -> None:
    lent: list[int] = []
    receive = worker.engine.receive_weights

    def noting(info: Any) -> None:
        lent.append(threading.get_ident())
        receive(info)

    worker.engine.receive_weights = noting
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    push(to, "v", NEW)
    assert worker.main.threads == set(lent)
    to.close()


def test_a_tensor_that_vllm_skips_is_unaccounted(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    for skips, told in (("norm", "unaccounted"), ("", "delivered")):
        worker.main.skips = skips
        assert push(to, "v", NEW) == told
    to.close()


class Experts(torch.nn.Module):
    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        kinds = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
        return [
            (f"experts.{to}_", f"experts.{expert}.{of}.", expert, of) for expert in range(2) for of, to in kinds.items()
        ]


class Mapper:
    def apply_list(self, names: list[str]) -> list[str]:
        return [name.replace("language_model.", "model.") for name in names]


def test_parts_of_fused_parameters_and_experts_are_accounted_for() -> None:
    layer = Experts()
    layer.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # type: ignore[assignment]
    model = torch.nn.Sequential(layer)
    model.hf_to_vllm_mapper = Mapper()  # type: ignore[assignment]
    account = Account(model)
    dense = ["a.mlp.gate_proj.weight", "language_model.a.mlp.up_proj.bias"]
    assert account.add(dense, {"a.mlp.gate_up_proj.weight", "model.a.mlp.gate_up_proj.bias"}) == dense
    experts = [
        f"a.experts.{k}.{part}.weight_scale_inv" for k in (0, 1) for part in ("gate_proj", "up_proj", "down_proj")
    ]
    assert account.add(experts, {"a.experts.w13_weight_scale_inv"}) is None  # down_proj is not there yet
    assert account.add([], {"b.experts.w2_weight_scale_inv"}) is None  # of another layer
    assert account.add([], {"a.experts.w2_weight_scale_inv"}) == dense + experts
    assert account.add(["a.mlp.up_proj.weight"], {"a.mlp.gate_up_proj.bias"}) is None  # not with this call
    assert account.add(["lm_head.weight"], set()) is None
    assert Account(model).add(["w"], None) is None
    assert Account(model).add(["experts.7.gate_proj.weight"], {"experts.w13_weight"}) is None  # an expert nobody knows


def test_a_draft_model_is_a_second_update(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    push(to, "step-1", NEW)
    to.close()
    to = VllmServer(worker.url, address=address, draft=True).endpoint("cpu")
    push(to, "step-1-draft", {name: -value for name, value in NEW.items()})
    to.close()
    assert values(worker.main) == NEW
    assert values(worker.draft) == {name: -value for name, value in NEW.items()}
    assert "/start_draft_weight_update" in worker.calls


def test_an_error_of_the_loader_leaves_it_paused_and_the_next_push_loads_all_anew(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    worker.main.fails = True
    with pytest.raises(WeightsError, match=r"the loader failed at bucket 1 \(k\): ValueError: no room for k"):
        push(to, "v", NEW)
    assert "/resume" not in worker.calls
    assert server._asked is not None
    with pytest.raises(WeightsError, match=r"the push failed: .*no room for k"):
        server._asked.wait("vLLM", DEADLINE)
    assert worker.main.kept is None  # q of the failed push is not taken for one of the next
    worker.main.fails = False
    again = {name: value + 1 for name, value in NEW.items()}
    push(to, "w", again)
    assert values(worker.main) == again
    assert worker.calls[-1] == "/resume"
    to.close()


def test_a_sender_that_leaves_ends_the_update(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    offer = offered("v", NEW)
    to.open(offer, seconds=DEADLINE)
    begun(to, "keep", seconds=DEADLINE)
    to.close()
    assert server._asked is not None
    with pytest.raises(WeightsError, match="the push failed: the sender"):
        server._asked.wait("vLLM", DEADLINE)
    offer.shared.close()


def test_a_push_without_the_servers_update_is_refused_and_touches_nothing(
    worker: Worker, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_PATIENCE", 0.1)
    VllmServer(worker.url, address=address).init()
    to = Remote(address.format(uuid="cpu", rank=0))
    with pytest.raises(WeightsError, match="vLLM does not wait for weights"):
        push(to, "v", NEW)
    assert to.status().state == "serving"
    assert worker.main.kept is None
    to.close()


def test_an_update_to_which_no_push_comes_ends(worker: Worker, address: str) -> None:
    VllmServer(worker.url, address=address).init()
    with pytest.raises(WeightsError, match=r"no push has begun at unix://.* within 0.1 s"):
        worker.engine.update_weights({"seconds": 0.1})


def test_an_update_that_a_dead_sender_left_open_is_finished_first(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    server.post("/start_weight_update", seconds=DEADLINE)
    to = server.endpoint("cpu")
    push(to, "v", NEW)
    assert values(worker.main) == NEW
    to.close()


def test_a_push_that_comes_to_nothing_before_it_begins_leaves_the_engine_running(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    push(to, "v", NEW)
    worker.calls.clear()
    offer = offered("w", NEW)
    to.open(offer, seconds=DEADLINE)
    to.pause("keep", patience=DEADLINE, seconds=DEADLINE)
    to.abandon("another engine could not pause")
    offer.shared.close()
    assert worker.calls[-1] == "/resume"
    assert (worker.version, worker.active, to._endpoint.status().state) == ("v", False, "serving")
    push(to, "x", {name: value + 1 for name, value in NEW.items()})
    assert worker.version == "x"
    to.close()


def test_what_the_server_says_of_a_failed_start_is_told(
    worker: Worker, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_PATIENCE", 0.5)
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")

    def refuse(_: object) -> None:
        raise RuntimeError("out of memory")

    worker.engine.update_weights = refuse
    with pytest.raises(WeightsError, match=r"vLLM does not wait for weights.*out of memory"):
        push(to, "v", NEW)
    to.close()


@pytest.mark.usefixtures("vllm")
def test_it_is_registered_once_and_only_where_vllm_has_the_lifecycle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    register()
    assert Factory._registry == {"stretto": ("stretto.weights.adapters.vllm", "StrettoEngine")}
    Factory._registry.clear()
    monkeypatch.setattr(sys.modules["vllm.distributed.weight_transfer.base"], "WeightTransferEngine", object)
    register()
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", None)
    register()
    assert Factory._registry == {}
    assert caplog.text.count("needs vLLM 0.25 or later") == 2


def test_an_engine_without_a_receiver_says_so(worker: Worker, address: str) -> None:
    with pytest.raises(WeightsError, match=r"POST /start_weight_update was answered with 500: .*no receiver is open"):
        VllmServer(worker.url, address=address).pause("v", "abort", seconds=DEADLINE)
    with pytest.raises(WeightsError, match="without an address"):
        VllmServer(worker.url).endpoint("cpu")
