"""vLLM as a receiver: a weight-transfer engine inside its workers."""

import contextlib
import logging
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

from stretto.ir.errors import WeightsError, named
from stretto.weights.adapters.vllm_model import Account, Packed, Shapes, discard_kept, unfinished, unreloadable
from stretto.weights.ipc_buffers import device_name
from stretto.weights.manifest import TensorSpec
from stretto.weights.messages import Status
from stretto.weights.receive.loaders import listed
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.state import Hooks

log = logging.getLogger(__name__)
T = TypeVar("T")
_STEP = 0.1  # seconds between two checks for other reasons to end a wait
_PATIENCE = 10.0  # seconds for vLLM's workers to enter /update_weights, which is called before receivers pause


def register() -> None:
    """Register the backend "stretto" with vLLM. This is our vLLM plugin; each process may call it several times."""
    try:
        _ = import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine.start_weight_update
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    except (ImportError, AttributeError):
        log.warning("stretto's weight transfer needs vLLM 0.25 or later; not registered")
        return
    with contextlib.suppress(ValueError):  # registered already
        factory.register_engine("stretto", __name__, "StrettoEngine")
    import_module("vllm.v1.worker.worker_base").WorkerBase.stretto_told = _worker_status


def _worker_status(worker: Any) -> dict[str, Any]:
    """Return the status of a worker; `VllmServer` calls this through /collective_rpc."""
    engine = getattr(worker, "weight_transfer_engine", None)
    in_worker: WorkerReceiver | None = getattr(engine, "worker", None)
    status = in_worker.receiver.status if in_worker is not None else None
    return {
        "active": bool(getattr(worker, "_weight_update_active", False)),
        "address": str(in_worker.receiver.address) if in_worker is not None else "",
        "version": status.version if status is not None else "",
        "problem": getattr(engine, "problem", "") or (in_worker.problem if in_worker is not None else ""),
    }


def __getattr__(name: str) -> Any:
    if name == "StrettoEngine":
        return _engine()
    raise AttributeError(name)


@cache
def _engine() -> type:
    """Return the engine class, defined on first use because it inherits from vLLM."""
    base = import_module("vllm.distributed.weight_transfer.base")

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc, name-defined]
        address: str
        """A template with {uuid} and {rank} for each worker's own, as in unix:///run/user/1000/engine-0/{uuid}"""

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc, name-defined]
        seconds: float = 30.0
        """The time within which a push must begin."""

    class StrettoEngine(base.WeightTransferEngine):  # type: ignore[misc, name-defined]
        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        supports_draft_weight_update = True
        worker: WorkerReceiver | None = None
        before: Status | None = None
        """The status of the last closed receiver; its version, or that it is dirty, still holds."""
        problem = ""
        """Why there is no receiver. Nothing here raises: vLLM would leave the answers of the other workers unread, and
        mistake them for the answers to its next calls."""

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.shutdown()
            try:
                names = {"uuid": device_name(self.device), "rank": self.parallel_config.rank}
                self.worker = WorkerReceiver(self, init_info.address.format(**names), self.before)
                self.problem = ""
            except Exception as error:
                self.problem = named(error)
                log.exception("no receiver at %s", init_info.address)

        def start_weight_update(self) -> None:
            pass  # the reload starts when a push begins

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if self.worker is not None:
                self.worker.lend(update_info.seconds)

        def finish_weight_update(self) -> None:
            pass  # the reload ended when the push was committed

        def shutdown(self) -> None:
            if self.worker is not None:
                self.before = self.worker.receiver.status
                self.worker.receiver.close()
                self.worker = None

        @staticmethod
        def trainer_send_weights(*_: object, **__: object) -> None:  # abstract in vLLM 0.25, removed later
            raise WeightsError("push with stretto.weights.Sender, to the addresses of the workers")

    return StrettoEngine


class _LentThread:
    """A worker's thread, for as long as vLLM lends it to us in one call."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self.begun = False
        """Whether a push uses it."""
        self.over = False
        """Whether its push is over, so that the thread should return."""
        self.ended = False
        """Whether the thread no longer runs tasks."""

    def work(self) -> None:
        """Run one task, if one comes soon."""
        with contextlib.suppress(Empty):
            future, act = self.tasks.get(timeout=_STEP)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act())
                except BaseException as error:
                    future.set_exception(error)


class WorkerReceiver:
    """A receiver inside a vLLM worker. The receiver's thread talks to the sender; only the worker's thread, which vLLM
    lends us in `update_weights`, touches the model.

    vLLM's layerwise reload keeps tensors until a layer is complete, so they are copied first. The push starts and ends
    the reload, so that errors of both reach the sender. A push with tensors that vLLM skips is unaccounted.
    """

    def __init__(self, engine: Any, address: str, before: Status | None = None) -> None:
        """`before` is the status of the engine's receiver that this one replaces."""
        self._engine = engine  # its `model` is the one to update, sometimes a draft model
        self._lent_threads: SimpleQueue[_LentThread] = SimpleQueue()
        self._lent_thread = _LentThread()
        self._reloading: tuple[Any, Any] | None = None
        self._packed: Packed | None = None
        self._account = Account(engine.model)
        self.problem = ""
        """Why the last update failed in this worker."""
        hooks = Hooks(
            prepare=self._take_thread,
            begin=lambda: self._in_worker(self._begin),
            finish=lambda: self._in_worker(self._finish),
            resume=self._resume,
        )
        options: dict[str, Any] = {"retains": True, "hooks": hooks, "device": engine.device}
        self.receiver = Receiver(address, self._load, expects=self._problems, **options)
        if before is not None:
            self.receiver.go_on_from(before)
        self.receiver.start()

    def lend(self, seconds: float) -> None:
        """Run the receiver's tasks in the calling worker's thread until a push is over."""
        lent, self.problem = _LentThread(), ""
        deadline = time.monotonic() + seconds
        self._lent_threads.put(lent)
        try:
            while not lent.over and not self.problem:
                lent.work()
                # A push begins in the state "paused", so "dirty" means that this push has failed.
                if lent.begun and (status := self.receiver.status).state == "dirty":
                    self.problem = f"the push failed: {status.error}"
                elif not lent.begun and time.monotonic() > deadline:
                    self.problem = f"no push has begun at {self.receiver.address} within {seconds:g} s"
        finally:
            lent.ended = True
            try:
                self._give_up()
            except Exception as error:
                self.problem = f"{self.problem}; and layers could not be given back: {named(error)}"
                log.exception("layers could not be given back what they had")

    # In the receiver's thread.

    def _problems(self, entries: Sequence[TensorSpec]) -> list[str]:
        """Describe the problems with a version's tensors."""
        if getattr(self._engine.vllm_config, "speculative_config", None) is not None:
            return []  # the push may be for the draft model, which is not known yet
        unsupported = unreloadable(self._engine.model) if self._engine.device.type == "cpu" else []
        return unsupported or Shapes(self._engine.model).wrong(entries)

    def _take_thread(self) -> None:
        """Wait for the thread that vLLM lends for this push, and skip those of failed pushes."""
        self._lent_thread.over = True  # the last push may have failed without its thread noticing yet
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                lent = self._lent_threads.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise WeightsError(
                    "vLLM does not wait for weights; push to VllmServer(…).endpoint(…), which asks it to"
                ) from None
            if not lent.ended:
                lent.begun, self._lent_thread = True, lent
                return

    def _in_worker(self, act: Callable[[], T]) -> T:
        """Run a function in the worker's thread and return its result."""
        lent = self._lent_thread
        future: Future[T] = Future()
        lent.tasks.put((future, act))
        while not wait([future], timeout=_STEP).done:
            if lent.ended and future.cancel():
                raise WeightsError("vLLM has stopped waiting for weights")
        return future.result()

    def _load(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterable[str] | None:
        device = self._engine.device
        _synchronize(device)  # the tensors were copied on this thread's stream

        def load() -> Any:
            loaded = self._engine.model.load_weights(list(tensors))
            _synchronize(device)
            return loaded

        loaded = self._in_worker(load)
        return self._account.add([name for name, _ in tensors], loaded)

    def _resume(self) -> None:
        self._lent_thread.over = True  # even if the update never began

    # In the worker's thread.

    def _begin(self) -> None:
        self._give_up()  # or half-loaded layers would be completed with the new tensors
        self._reloading = self._engine.model, self._engine.model_config
        self._account = Account(self._engine.model)
        self._packed = Packed(self._engine.model) if self._engine.device.type == "cpu" else None
        import_module("vllm.model_executor.model_loader.reload").initialize_layerwise_reload(self._engine.model)

    def _finish(self) -> None:
        assert self._reloading is not None
        missing = unfinished(self._reloading[0])
        if missing:
            raise WeightsError(listed(missing))
        self._finalize()

    def _give_up(self) -> None:
        """End an unfinished update; its layers get their old weights back."""
        if self._reloading is not None:
            discard_kept(self._reloading[0])
            self._finalize()

    def _finalize(self) -> None:
        assert self._reloading is not None
        import_module("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(*self._reloading)
        if self._packed is not None:
            self._packed.restore()
        _synchronize(self._engine.device)
        self._reloading = None


def _synchronize(device: torch.device) -> None:
    """Wait for the work on this thread's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
