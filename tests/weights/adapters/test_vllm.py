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
from unittest import mock

import pytest
import torch

from pushes import begun, total_of
from stretto.ir.errors import WeightsError
from stretto.weights.adapters import vllm_worker as adapter
from stretto.weights.adapters.http import in_background, wait_for
from stretto.weights.adapters.vllm import VllmServer
from stretto.weights.adapters.vllm_model import Account, Packed, Shapes, unfinished, unreloadable
from stretto.weights.adapters.vllm_worker import register
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.layout import lay_out
from stretto.weights.manifest import Manifest, TensorSpec
from stretto.weights.send.endpoint import Offer, Remote

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


class Layer:
    """LayerReloadingInfo."""

    def __init__(self) -> None:
        self.loaded_weights: list[tuple[str, torch.Tensor]] = []
        self.load_numel, self.load_numel_total = 0, None
        self.kernel_tensors: Any = None

    def can_load(self) -> bool:
        return self.load_numel_total is not None


class Model:
    """One layer of a fused qk and a norm. While it is reloaded, tensors are kept until it has all of them."""

    packed_modules_mapping: ClassVar = {"qk": ["q", "k"]}

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.info: Any = Layer()
        self.threads: set[int] = set()
        self.fails = False
        self.skips = ""

    def modules(self) -> list[Any]:
        return [self]

    def parameters(self, *, recurse: bool) -> list[torch.Tensor]:
        assert not recurse
        return [torch.zeros(2 * 64, device="meta"), torch.zeros(64, device="meta")]

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("layer", self)]

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        assert self.info.can_load()
        self.threads.add(threading.get_ident())
        for name, tensor in weights:
            if self.fails and name == "k":
                self.info.loaded_weights.append((name, tensor[:3]))
                self.info.load_numel += 3
                raise ValueError("no room for k")
            self.info.loaded_weights.append((name, tensor))
            self.info.load_numel += tensor.numel()
            if self.info.load_numel == 3 * 64:
                self.process()
        return {{"q": "qk", "k": "qk"}.get(name, name) for name, _ in weights if name != self.skips}

    def process(self) -> None:
        for name, tensor in self.info.loaded_weights:
            assert tensor.numel() == 64, f"{name} is too small"
        self.live, self.info = dict(self.info.loaded_weights), Layer()


def initialize(model: Model) -> None:
    model.info.load_numel_total = 3 * 64


def finalize(model: Model, config: str) -> None:
    assert config in ("main config", "draft config")
    if model.info.load_numel:
        model.process()  # as vLLM does, for what is padded
    model.info = Layer()


class Linear(torch.nn.Module):
    """LinearBase."""

    def __init__(self, output_size: int, input_size: int, **more: Any) -> None:
        super().__init__()
        self.output_size, self.input_size, self.quant_method = output_size, input_size, Unquantized()
        vars(self).update(more)


class Unquantized:
    """UnquantizedLinearMethod."""


class Fused(Linear):
    """MergedColumnParallelLinear."""


class QKV(Linear):
    """QKVParallelLinear."""


class Vocabulary(torch.nn.Module):
    """VocabParallelEmbedding."""

    org_vocab_size, embedding_dim = 100, 16

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.quant_method = 0, self
        self.shard_indices = SimpleNamespace(num_org_elements=100, num_added_elements=0)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        assert layer is self
        self.packed += 1


class Latent(torch.nn.Module):
    """MLAAttention."""


class ExpertsMethod:
    """FusedMoEMethodBase."""

    moe_kernel: Any = None


class RoutedExperts(torch.nn.Module):
    """As theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = ExpertsMethod()


class WorkerBase:
    stretto_told: Any


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
        "vllm.model_executor.model_loader.reload.layerwise": {"get_layerwise_info": lambda layer: layer.info},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda _: False},
        "vllm.model_executor.layers.attention.mla_attention": {"MLAAttention": Latent},
        "vllm.model_executor.layers.fused_moe": {},
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": ExpertsMethod},
        "vllm.model_executor.layers.linear": {
            "LinearBase": Linear,
            "MergedColumnParallelLinear": Fused,
            "QKVParallelLinear": QKV,
            "UnquantizedLinearMethod": Unquantized,
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": Vocabulary,
            "UnquantizedEmbeddingMethod": Vocabulary,
        },
        "vllm.model_executor.layers.layernorm": {"RMSNorm": torch.nn.RMSNorm, "GemmaRMSNorm": torch.nn.GroupNorm},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.worker_base": {"WorkerBase": WorkerBase},
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
        self.active = self.paused = False
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
            case "/pause" | "/resume":
                self.paused = path.startswith("/pause")
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/reset_prefix_cache" | "/health":
                pass
            case "/weight_info":
                return {"weight_version": self.version}
            case "/collective_rpc":
                worker = SimpleNamespace(weight_transfer_engine=self.engine, _weight_update_active=self.active)
                return {"results": [getattr(WorkerBase, body["method"])(worker)]}
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
    manifest = Manifest(version, tuple(TensorSpec(name, "float32", (64,)) for name in values))
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
        assert not worker.main.info.can_load()  # reload was finalized
        assert [call.partition("?")[0] for call in worker.calls] == [
            "/collective_rpc",
            "/is_paused",
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/collective_rpc",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert worker.calls[2] == "/pause?mode=keep"
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
    assert server._update_call is not None
    wait_for(server._update_call, "vLLM", DEADLINE)  # which raises nothing: other workers would be left unheard
    assert "no room for k" in worker.engine.worker.problem
    assert not worker.main.info.can_load()  # q of the failed push is not taken for one of the next
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
    assert server._update_call is not None
    wait_for(server._update_call, "vLLM", DEADLINE)
    assert "the push failed: the sender" in worker.engine.worker.problem
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
    assert not worker.main.info.can_load()
    to.close()


def test_a_pause_that_never_came_is_not_taken_back(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    server._update_call, server._was_paused = in_background(lambda: None), False  # as a push before has left them
    worker.paused = True  # by somebody else, meanwhile
    with (
        mock.patch.object(server, "_workers", side_effect=WeightsError("no answer")),
        pytest.raises(WeightsError, match="no answer"),
    ):
        server.pause("v", "keep", seconds=DEADLINE)
    server.withdraw(seconds=DEADLINE)
    assert not {"/resume", "/finish_weight_update"} & set(worker.calls)


def test_an_update_to_which_no_push_comes_ends(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    worker.engine.update_weights({"seconds": 0.1})
    server._update_call = in_background(lambda: None)
    with pytest.raises(WeightsError, match=r"worker 0 got no v: no push has begun at unix://.* within 0.1 s"):
        server.resume("v", seconds=DEADLINE)
    assert "/resume" not in worker.calls


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
    monkeypatch.setattr(adapter, "_PATIENCE", 5.0)
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
    assert Factory._registry == {"stretto": ("stretto.weights.adapters.vllm_worker", "StrettoEngine")}
    Factory._registry.clear()
    monkeypatch.setattr(sys.modules["vllm.distributed.weight_transfer.base"], "WeightTransferEngine", object)
    register()
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", None)
    register()
    assert Factory._registry == {}
    assert caplog.text.count("needs vLLM 0.25 or later") == 2


def test_an_engine_without_a_receiver_says_so(worker: Worker, address: str) -> None:
    with pytest.raises(WeightsError, match=r"worker 0 has no receiver; VllmServer.init\(\) opens them"):
        VllmServer(worker.url, address=address).pause("v", "abort", seconds=DEADLINE)
    assert "/pause?mode=abort" not in worker.calls
    with pytest.raises(WeightsError, match="worker 0 has no receiver: WeightsError: 'nowhere' is no address"):
        VllmServer(worker.url, address="nowhere").init()
    with pytest.raises(WeightsError, match="without an address"):
        VllmServer(worker.url).endpoint("cpu")


def test_a_layer_that_did_not_get_all_is_refused_and_gets_back_what_it_had(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    push(to, "v", NEW)
    with pytest.raises(WeightsError, match="layer got 128 of its 192 elements"):
        push(to, "w", {"q": 5.0, "norm": 5.0})
    assert values(worker.main) == NEW
    assert server.version() == "v"
    push(to, "x", {name: value + 1 for name, value in NEW.items()})
    to.close()


def test_a_second_init_keeps_what_is_served(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    push(to, "v", NEW)
    before = to._endpoint.status()
    to.close()
    server.init()
    to = server.endpoint("cpu")
    after = to._endpoint.status()
    assert (after.state, after.version, after.assurance) == (before.state, before.version, before.assurance)
    assert after.version == "v"
    worker.main.fails = True
    with pytest.raises(WeightsError, match="no room"):
        push(to, "w", NEW)
    to.close()
    with pytest.raises(WeightsError, match="has no receiver"):
        VllmServer(worker.url, address="nowhere").init()
    server.init()
    assert server.endpoint("cpu")._endpoint.status().state == "dirty"


def test_an_update_that_ended_is_not_taken_for_the_next_one(
    worker: Worker, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that was lent, and to which no push came, must not be waited for by a push that comes later."""
    monkeypatch.setattr(adapter, "_PATIENCE", 0.3)
    server = VllmServer(worker.url, address=address)
    server.init()
    worker.engine.update_weights({"seconds": 0.1})
    to = Remote(address.format(uuid="cpu", rank=0))
    with pytest.raises(WeightsError, match="vLLM does not wait for weights"):
        push(to, "v", NEW)
    to.close()


@pytest.mark.usefixtures("vllm")
def test_shapes_that_cannot_go_into_the_model_are_told() -> None:
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate", "up"]}  # type: ignore[assignment]
    model.qkv_proj = QKV(64 + 2 * 16 * 2, 32, total_num_heads=4, total_num_kv_heads=1, head_size=16, v_head_size=16)
    model.gate_up = Fused(160, 32, output_sizes=[80, 80])
    model.o_proj, model.embed, model.norm = Linear(32, 64), Vocabulary(), torch.nn.LayerNorm(32)
    quantised = Linear(8, 8)
    quantised.quant_method = object()  # type: ignore[assignment]
    model.packed, model.h = quantised, torch.nn.ModuleDict({"c_attn": Linear(32, 24)})
    right = {
        "q_proj.weight": (64, 32),
        "k_proj.weight": (16, 32),
        "v_proj.bias": (16,),
        "qkv_proj.weight": (96, 32),
        "gate.weight": (80, 32),
        "up.weight": (80, 32),
        "o_proj.weight": (32, 64),
        "embed.weight": (100, 16),
        "norm.weight": (32,),
        "h.c_attn.weight": (32, 24),
    }
    unknown = {"packed.weight": (1, 2), "other.weight": (3,), "q_proj.weight_scale": (1,)}
    shapes = Shapes(model)
    for dtype in ("float32", "bfloat16"):
        assert not shapes.wrong([TensorSpec(name, dtype, shape) for name, shape in (right | unknown).items()])
    assert not shapes.wrong([TensorSpec("h.c_attn.weight", "float32", (24, 32))])  # GPT-2's, which vLLM turns round
    assert len(shapes.wrong([TensorSpec("o_proj.weight", "float32", (64, 32))])) == 1
    for dtype in ("int8", "bool", "complex64", "float8_e4m3fn"):
        (said,) = shapes.wrong(
            [TensorSpec("o_proj.weight", dtype, (32, 64)), TensorSpec("packed.weight", dtype, (8, 8))]
        )
        assert said == f"o_proj.weight is pushed as {dtype}, and vLLM's model has floating point there"
    for name, shape in right.items():
        (said,) = shapes.wrong([TensorSpec(name, "float32", (shape[0] + 16, *shape[1:]))])
        assert said.startswith(f"{name} is pushed with shape")
        assert said.endswith(f"vLLM's model has {shape}")


def test_a_push_right_after_one_that_failed_does_not_wait_for_its_thread(
    worker: Worker, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was lent to the failed one looks only now and then at what became of it."""
    monkeypatch.setattr(adapter, "_STEP", 1.0)
    monkeypatch.setattr(adapter, "_PATIENCE", 5.0)
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    with pytest.raises(WeightsError, match="layer got 128 of its 192 elements"):
        push(to, "v", {"q": 5.0, "norm": 5.0})
    failed = worker.engine.worker._lent_thread
    to._endpoint.open(offered("w", NEW), seconds=DEADLINE)
    with pytest.raises(WeightsError, match="vLLM does not wait for weights"):
        to._endpoint.pause("keep", patience=DEADLINE, seconds=DEADLINE)
    assert failed.ended
    push(to, "w", NEW)
    assert values(worker.main) == NEW
    to.close()


class Reloaded(Vocabulary):
    """A vocabulary while it is reloaded, with its weight as it was before."""

    def __init__(self, before: torch.Tensor, got: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(104, 16, device="meta"))
        self.info = Layer()
        self.info.load_numel, self.info.load_numel_total = got, 104 * 16
        self.info.kernel_tensors = {"weight": before}, {}


@pytest.mark.usefixtures("vllm")
def test_a_vocabulary_is_padded_or_tied_and_otherwise_must_come() -> None:
    own, others = torch.zeros(104, 16), torch.zeros(104, 16)
    model = torch.nn.Module()
    model.info = Layer()  # type: ignore[assignment]
    model.embed, model.head = Reloaded(own, 1600), Reloaded(own, 0)
    assert unfinished(model) == []  # four rows are padding, and the head is tied
    model.head = Reloaded(others, 0)
    assert unfinished(model) == ["head got 0 of its 1664 elements"]
    model.embed, model.head = Reloaded(own, 0), Reloaded(own, 0)
    assert len(unfinished(model)) == 2
    model.embed.shard_indices = model.head.shard_indices = SimpleNamespace(num_org_elements=0, num_added_elements=0)  # type: ignore[assignment]
    assert unfinished(model) == []  # the last of several ranks may have nothing but padding


def test_what_a_cpu_has_packed_is_packed_again(vllm: None) -> None:  # noqa: ARG001
    """Experts are packed only if they have no kernel; a tied head is given nothing, and is packed from the words."""
    model = torch.nn.ModuleDict(
        {"words": Vocabulary(), "head": Vocabulary(), "one": RoutedExperts(), "other": RoutedExperts()}
    )
    for name in ("one", "other"):
        model[name].quant_method.moe_kernel = f"old {name}"
    packed = Packed(model)
    assert model["one"].quant_method.moe_kernel is None
    model["one"].quant_method.moe_kernel = "new one"
    packed.restore()
    assert model["one"].quant_method.moe_kernel == "new one"
    assert model["other"].quant_method.moe_kernel == "old other"
    assert (model["words"].packed, model["head"].packed) == (1, 1)


def test_latent_attention_on_a_cpu_is_refused(vllm: None) -> None:  # noqa: ARG001
    assert unreloadable(torch.nn.Sequential(torch.nn.Linear(2, 2))) == []
    assert unreloadable(torch.nn.Sequential(Latent())) == ["vLLM's CPU build cannot reload latent attention (0)"]


def test_experts_are_accounted_for_by_parameters_of_modules_within_them() -> None:
    class Mixed(torch.nn.Module):
        def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
            return [("experts.w13_", f"experts.{k}.w1.", k, "w1") for k in range(2)]

    account = Account(Mixed())
    came = [f"0.moe.experts.{k}.w1.weight" for k in range(2)]
    assert account.add(came, {"0.moe.experts.routed_experts.w13_weight"}) == came
    assert Account(Mixed()).add(came, {"1.moe.experts.routed_experts.w13_weight"}) is None


def test_an_engine_that_was_paused_before_stays_so_if_nothing_comes_of_a_push(worker: Worker, address: str) -> None:
    """It may be paused because a push has failed, which a sender that is started afterwards does not know."""
    VllmServer(worker.url, address=address).init()
    for is_failed in (False, True):
        to = VllmServer(worker.url, address=address).endpoint("cpu")
        if is_failed:
            with pytest.raises(WeightsError, match="layer got 128 of its 192 elements"):
                push(to, "v", {"q": 5.0, "norm": 5.0})
            to.close()
            to = VllmServer(worker.url, address=address).endpoint("cpu")
        to.open(offered("w", NEW), seconds=DEADLINE)
        to.pause("keep", patience=DEADLINE, seconds=DEADLINE)
        to.abandon("another receiver could not pause")
        assert worker.paused == is_failed
        to.close()
    to = VllmServer(worker.url, address=address).endpoint("cpu")
    push(to, "w", NEW)
    assert not worker.paused
    assert values(worker.main) == NEW
    to.close()


def test_an_endpoint_made_before_a_second_init_finds_the_new_receivers(worker: Worker, address: str) -> None:
    server = VllmServer(worker.url, address=address)
    server.init()
    to = server.endpoint("cpu")
    server.init()
    assert push(to, "v", NEW) == "delivered"
    assert values(worker.main) == NEW
    to.close()


def test_mistakes_say_what_to_do(worker: Worker, address: str) -> None:
    with pytest.raises(WeightsError, match=r"VllmServer.init\(\) opens the workers' receivers"):
        VllmServer(worker.url, address=address).endpoint("cpu")
    with pytest.raises(WeightsError, match="VLLM_SERVER_DEV_MODE=1"):
        VllmServer(f"{worker.url}/v1", address=address).init()
    with pytest.raises(WeightsError, match=r"address has \{uuid\} and \{rank\}"):
        VllmServer(worker.url, address="unix:///run/{gpu}")
    with pytest.raises(WeightsError, match="without an address"):
        VllmServer(worker.url).init()
