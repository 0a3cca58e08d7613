"""vLLM as a receiver: a weight-transfer engine inside its workers, and its server."""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.adapters import Asked, Http, Served, seconds_left
from stretto.weights.conversation import Hooks
from stretto.weights.endpoint import Remote
from stretto.weights.messages import InFlight
from stretto.weights.receiver import Receiver
from stretto.weights.shared import device_name

log = logging.getLogger(__name__)
T = TypeVar("T")
_EXPERT = re.compile(r"experts\.\d+\.[^.]+\.")  # of the names that models map to their fused experts
_STEP = 0.1  # seconds between two looks at what else may have ended a wait
_PATIENCE = 60.0  # seconds between a sender's start and vLLM's call to /update_weights


def register() -> None:
    """Make the backend "stretto" known to vLLM: its entry point, called any number of times in each process of it."""
    try:
        _ = import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine.start_weight_update
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    except (ImportError, AttributeError):
        log.warning("stretto's weight transfer needs vLLM 0.25 or later; not registered")
        return
    with contextlib.suppress(ValueError):  # it is there already
        factory.register_engine("stretto", __name__, "StrettoEngine")


def __getattr__(name: str) -> Any:
    if name == "StrettoEngine":
        return _engine()
    raise AttributeError(name)


@cache
def _engine() -> type:
    """The class, made only where there is a vLLM to inherit from."""
    base = import_module("vllm.distributed.weight_transfer.base")

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc, name-defined]
        address: str
        """With {uuid} and {rank} where a worker's own come, as in unix:///run/user/1000/engine-0/{uuid}"""

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc, name-defined]
        seconds: float = 30.0
        """In which a push must begin."""

    class StrettoEngine(base.WeightTransferEngine):  # type: ignore[misc, name-defined]
        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        supports_draft_weight_update = True
        _worker: WorkerReceiver | None = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.shutdown()
            names = {"uuid": device_name(self.device), "rank": self.parallel_config.rank}
            self._worker = WorkerReceiver(self, init_info.address.format(**names))

        def start_weight_update(self) -> None:
            if self._worker is None:
                raise WeightsError("no receiver is open; POST /init_weight_transfer_engine with its address first")

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.start_weight_update()
            self._worker.lend(update_info.seconds)  # type: ignore[union-attr]

        def finish_weight_update(self) -> None:
            pass  # all is done when a push was committed

        def shutdown(self) -> None:
            if self._worker is not None:
                self._worker.receiver.close()
                self._worker = None

        @staticmethod
        def trainer_send_weights(*_: object, **__: object) -> None:  # abstract in vLLM 0.25, gone later
            raise WeightsError("push with stretto.weights.Sender, to the addresses of the workers")

    return StrettoEngine


class WorkerReceiver:
    """A receiver inside a vLLM worker. Its own thread talks to the sender; only the worker's thread, which vLLM lends
    us in `update_weights`, touches the model.

    Layerwise reload keeps tensors until a layer is complete, so that they are copied first. It starts and ends with the
    push, as the sender must hear of an error in either. A push with tensors that vLLM skips is unaccounted.
    """

    def __init__(self, engine: Any, address: str) -> None:
        self._engine = engine  # whose model is the one to update, a draft's at times
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lent = threading.Event()
        self._begun = self._over = False
        self._reloading: tuple[Any, Any] | None = None
        self._account = Account(engine.model)
        hooks = Hooks(
            pause=self._pause,
            begin=lambda: self._in_worker(self._begin),
            finish=lambda: self._in_worker(self._finish),
            resume=self._resume,
        )
        self.receiver = Receiver(address, self._load, retains=True, hooks=hooks, device=engine.device).start()

    def lend(self, seconds: float) -> None:
        """In the worker's thread: do what the receiver's asks for, until a push is committed. Raises if it failed."""
        self._begun = self._over = False
        deadline = time.monotonic() + seconds
        self._lent.set()
        try:
            while not self._over:
                self._work()
                if self._begun and (status := self.receiver.status).state == "dirty":  # it was paused before
                    raise WeightsError(f"the push failed: {status.error}")
                if not self._begun and time.monotonic() > deadline:
                    raise WeightsError(f"no push has begun at {self.receiver.address} within {seconds:g} s")
        finally:
            self._lent.clear()
            if self._reloading is not None:
                with contextlib.suppress(Exception):  # tried again when the next push begins, and reported then
                    self._finish()

    # In the receiver's thread.

    def _pause(self, _: InFlight) -> None:
        self._await_thread()
        self._begun = True

    def _await_thread(self) -> None:
        if not self._lent.wait(_PATIENCE):
            raise WeightsError("vLLM does not wait for weights; POST /start_weight_update and /update_weights first")

    def _in_worker(self, act: Callable[[], T]) -> T:
        self._await_thread()
        future: Future[T] = Future()
        self._tasks.put((future, act))
        while not wait([future], timeout=_STEP).done:
            if not self._lent.is_set() and future.cancel():
                raise WeightsError("vLLM has stopped waiting for weights")
        return future.result()

    def _load(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterable[str] | None:
        device = self._engine.device
        _settle(device)  # the copies, which were made on this thread's stream

        def load() -> Any:
            taken = self._engine.model.load_weights(list(tensors))
            _settle(device)
            return taken

        taken = self._in_worker(load)
        return self._account.add([name for name, _ in tensors], taken)

    def _resume(self) -> None:
        self._over = True  # also if nothing has begun

    # In the worker's thread.

    def _work(self) -> None:
        with contextlib.suppress(Empty):
            future, act = self._tasks.get(timeout=_STEP)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act())
                except BaseException as error:
                    future.set_exception(error)

    def _begin(self) -> None:
        if self._reloading is not None:
            self._finish()  # else half-loaded layers would take the new tensors for the rest of the old
        self._reloading = self._engine.model, self._engine.model_config
        self._account = Account(self._engine.model)
        import_module("vllm.model_executor.model_loader.reload").initialize_layerwise_reload(self._engine.model)

    def _finish(self) -> None:
        assert self._reloading is not None
        import_module("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(*self._reloading)
        _settle(self._engine.device)
        self._reloading = None


class Account:
    """Which of the tensors that came are in vLLM's parameters. Its loaders return the names of those parameters: a
    tensor counts as taken once the parameter was returned that its model says it is a part of.

    >>> class Model(torch.nn.Module):
    ...     packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    >>> account = Account(Model())
    >>> account.add(["0.q_proj.weight", "0.norm.weight"], {"0.qkv_proj.weight", "0.norm.weight"})
    ['0.q_proj.weight', '0.norm.weight']
    >>> account.add(["0.k_proj.weight"], set())  # it was not loaded
    """

    def __init__(self, model: Any) -> None:
        self._parts: dict[str, set[str]] = {}
        self._experts: dict[str, set[str]] = {}
        for module in model.modules():
            for fused, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
                for part in parts:
                    self._parts.setdefault(part, set()).add(fused)
            for fused, part, *_ in module.get_expert_mapping() if hasattr(module, "get_expert_mapping") else ():
                self._experts.setdefault(part, set()).add(fused)
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._came: list[str] = []
        self._left: set[str] = set()
        self._loaded: set[str] = set()
        self._blind = False

    def add(self, came: Sequence[str], loaded: set[str] | None) -> list[str] | None:
        """All that was taken of all that ever came; None as long as any of it was not, or if nobody can say."""
        self._came += came
        self._blind = self._blind or loaded is None
        self._loaded |= loaded or set()
        now = {name for name in came if self._now(name).isdisjoint(loaded or ())}
        self._left = {name for name in self._left | now if self._loaded.isdisjoint(self._later(name))}
        return None if self._blind or self._left else self._came

    def _now(self, name: str) -> set[str]:
        """Parameters that a tensor may be, or be part of: one is returned when it is loaded."""
        found = set(self._names(name))
        for it in self._names(name):
            words = it.split(".")
            for place, word in enumerate(words):
                found |= {".".join([*words[:place], fused, *words[place + 1 :]]) for fused in self._parts.get(word, ())}
        return found

    def _later(self, name: str) -> set[str]:
        """Parameters of experts that it is one of: of those that are on other ranks, nothing is returned."""
        return {
            it.replace(expert, fused)
            for it in self._names(name)
            for expert in _EXPERT.findall(it)
            for fused in self._experts.get(expert, ())
        }

    def _names(self, name: str) -> list[str]:
        return [name, *(self._mapper.apply_list([name]) if self._mapper is not None else ())]


class VllmServer(Http):
    """A server of vLLM (0.25 or later, VLLM_SERVER_DEV_MODE=1), which pauses around a push and tells the version.

    With an `address` for its workers, as in unix:///run/user/1000/engine-0/{uuid}, they take pushes by our engine
    (--weight-transfer-config '{"backend": "stretto"}'); `init` opens their receivers, once. Without, they are fed by
    others: `Served(CheckpointEngineWorkers(uuid, vllm_request(url)), VllmServer(url))`. A draft model is a second
    update, by a server with `draft`.

    Never run against vLLM: only against a server and classes that answer as its sources do.
    """

    def __init__(self, base_url: str, *, address: str | None = None, draft: bool = False, key: str | None = None):
        super().__init__(base_url, key=key)
        self._address, self._draft = address, draft
        self._asked: Asked | None = None

    def init(self, *, seconds: float = 60.0) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": {"address": self._address}}, seconds=seconds)

    def endpoint(self, uuid: str, *, rank: int = 0) -> Served:
        """For the sender on this device. An engine's other devices are pushed to by their plain addresses."""
        if self._address is not None:
            return Served(Remote(self._address.format(uuid=uuid, rank=rank)), self)
        raise WeightsError("a VllmServer without an address has no receivers of ours")

    def version(self, *, seconds: float = 5.0) -> str | None:
        return self.get("/weight_info", seconds=seconds)["weight_version"]  # type: ignore[no-any-return]

    def pause(self, version: str, in_flight: InFlight, *, seconds: float) -> None:  # noqa: ARG002 (told at the end)
        left = seconds_left(seconds)
        self.post(f"/pause?mode={in_flight}", seconds=left())
        if self._address is not None:
            start = "/start_draft_weight_update" if self._draft else "/start_weight_update"
            try:
                self.post(start, seconds=left())
            except WeightsError as error:
                if "already" not in str(error):
                    raise
                self.post("/finish_weight_update", seconds=left())  # of a sender that died after its start
                self.post(start, seconds=left())
            self._asked = Asked(lambda: self.post("/update_weights", {"update_info": {}}, seconds=3600.0))

    def resume(self, version: str, *, seconds: float) -> None:
        left = seconds_left(seconds)
        if self._asked is not None:
            self._asked.wait("vLLM", left())
            self.post("/finish_weight_update", {"weight_version": version}, seconds=left())
        self.post("/reset_prefix_cache?reset_running_requests=true", seconds=left())
        self.post("/resume", seconds=left())

    def withdraw(self, *, seconds: float) -> None:
        left = seconds_left(seconds)
        if self._asked is not None:
            with contextlib.suppress(WeightsError):  # which may be why nothing comes of it, and ends the update too
                self._asked.wait("vLLM", left())
                served = {"weight_version": self.version(seconds=left())}
                self.post("/finish_weight_update", served, seconds=left())
        self.post("/resume", seconds=left())

    def trouble(self) -> str:
        return f"vLLM says: {self._asked.error}" if self._asked is not None and self._asked.error else ""


def _settle(device: torch.device) -> None:
    """Wait for what this thread has given its stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
