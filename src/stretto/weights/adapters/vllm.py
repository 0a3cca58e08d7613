"""vLLM as a receiver: a weight-transfer engine inside its workers, and its server."""

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
from stretto.weights.adapters import Asked, Http, Served, seconds_left
from stretto.weights.adapters.vllm_model import Account, Packed, Shapes, forget_kept, unfinished, unreloadable
from stretto.weights.connection import PeerClosed
from stretto.weights.ipc_buffers import device_name
from stretto.weights.manifest import TensorSpec
from stretto.weights.messages import InFlight, Status
from stretto.weights.receive.loaders import listed
from stretto.weights.receive.receiver import Receiver
from stretto.weights.receive.session import Hooks
from stretto.weights.send.endpoint import Remote

log = logging.getLogger(__name__)
T = TypeVar("T")
_STEP = 0.1  # seconds between two looks at what else may have ended a wait
_PATIENCE = 10.0  # seconds for vLLM's call to /update_weights, which is made before a receiver is asked to pause


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
    import_module("vllm.v1.worker.worker_base").WorkerBase.stretto_told = _told


def _told(worker: Any) -> dict[str, Any]:
    """How a worker is, for `VllmServer` to ask by /collective_rpc."""
    engine = getattr(worker, "weight_transfer_engine", None)
    own: WorkerReceiver | None = getattr(engine, "worker", None)
    told = own.receiver.status if own is not None else None
    return {
        "active": bool(getattr(worker, "_weight_update_active", False)),
        "address": str(own.receiver.address) if own is not None else "",
        "version": told.version if told is not None else "",
        "problem": getattr(engine, "problem", "") or (own.problem if own is not None else ""),
    }


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
        worker: WorkerReceiver | None = None
        before: Status | None = None
        """How the last receiver was that was closed: what it served, or that it was dirty, is so still."""
        problem = ""
        """Why there is no receiver. Nothing here raises: vLLM would leave the answers of the other workers unread, and
        take them for those to its next calls."""

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
            pass  # when a push begins

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if self.worker is not None:
                self.worker.lend(update_info.seconds)

        def finish_weight_update(self) -> None:
            pass  # all is done when a push was committed

        def shutdown(self) -> None:
            if self.worker is not None:
                self.before = self.worker.receiver.status
                self.worker.receiver.close()
                self.worker = None

        @staticmethod
        def trainer_send_weights(*_: object, **__: object) -> None:  # abstract in vLLM 0.25, gone later
            raise WeightsError("push with stretto.weights.Sender, to the addresses of the workers")

    return StrettoEngine


class _Session:
    """The time for which vLLM lends us a worker's thread."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self.begun = self.over = self.ended = False

    def work(self) -> None:
        with contextlib.suppress(Empty):
            future, act = self.tasks.get(timeout=_STEP)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act())
                except BaseException as error:
                    future.set_exception(error)


class WorkerReceiver:
    """A receiver inside a vLLM worker. Its own thread talks to the sender; only the worker's thread, which vLLM lends
    us in `update_weights`, touches the model.

    Layerwise reload keeps tensors until a layer is complete, so that they are copied first. It starts and ends with the
    push, as the sender must hear of an error in either. A push with tensors that vLLM skips is unaccounted.
    """

    def __init__(self, engine: Any, address: str, before: Status | None = None) -> None:
        """`before` is how the engine's receiver was that this one replaces."""
        self._engine = engine  # whose model is the one to update, a draft's at times
        self._lent: SimpleQueue[_Session] = SimpleQueue()
        self._session = _Session()
        self._reloading: tuple[Any, Any] | None = None
        self._packed: Packed | None = None
        self._account = Account(engine.model)
        self.problem = ""
        """Why the last update came to nothing here."""
        hooks = Hooks(
            pause=self._pause,
            begin=lambda: self._in_worker(self._begin),
            finish=lambda: self._in_worker(self._finish),
            resume=self._resume,
        )
        options: dict[str, Any] = {"retains": True, "hooks": hooks, "device": engine.device}
        self.receiver = Receiver(address, self._load, expects=self._wrong, **options)
        if before is not None:
            self.receiver.go_on_from(before)
        self.receiver.start()

    def lend(self, seconds: float) -> None:
        """In the worker's thread: do what the receiver's asks for, until a push is over."""
        session, self.problem = _Session(), ""
        deadline = time.monotonic() + seconds
        self._lent.put(session)
        try:
            while not session.over and not self.problem:
                session.work()
                if session.begun and (status := self.receiver.status).state == "dirty":  # it was paused before
                    self.problem = f"the push failed: {status.error}"
                elif not session.begun and time.monotonic() > deadline:
                    self.problem = f"no push has begun at {self.receiver.address} within {seconds:g} s"
        finally:
            session.ended = True
            try:
                self._give_up()
            except Exception as error:
                self.problem = f"{self.problem}; and layers could not be given back: {named(error)}"
                log.exception("layers could not be given back what they had")

    # In the receiver's thread.

    def _wrong(self, entries: Sequence[TensorSpec]) -> list[str]:
        if getattr(self._engine.vllm_config, "speculative_config", None) is not None:
            return []  # it may be for the draft, which nobody knows yet
        never = unreloadable(self._engine.model) if self._engine.device.type == "cpu" else []
        return never or Shapes(self._engine.model).wrong(entries)

    def _pause(self, _: InFlight) -> None:
        """Wait for the thread that is lent for this push; those of others that came to nothing are over."""
        self._session.over = True  # if it did not see yet that its push has failed
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                session = self._lent.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise WeightsError(
                    "vLLM does not wait for weights; push to VllmServer(…).endpoint(…), which asks it to"
                ) from None
            if not session.ended:
                session.begun, self._session = True, session
                return

    def _in_worker(self, act: Callable[[], T]) -> T:
        session = self._session
        future: Future[T] = Future()
        session.tasks.put((future, act))
        while not wait([future], timeout=_STEP).done:
            if session.ended and future.cancel():
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
        self._session.over = True  # also if nothing has begun

    # In the worker's thread.

    def _begin(self) -> None:
        self._give_up()  # else half-loaded layers would take the new tensors for the rest of the old
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
        """An update that was left in the middle: layers get back what they had."""
        if self._reloading is not None:
            forget_kept(self._reloading[0])
            self._finalize()

    def _finalize(self) -> None:
        assert self._reloading is not None
        import_module("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(*self._reloading)
        if self._packed is not None:
            self._packed.restore()
        _settle(self._engine.device)
        self._reloading = None


class VllmServer(Http):
    """A server of vLLM (0.25 or later, VLLM_SERVER_DEV_MODE=1), which pauses around a push and tells the version.

    With an `address` for its workers, as in unix:///run/user/1000/engine-0/{uuid}, they take pushes by our engine
    (--weight-transfer-config '{"backend": "stretto"}'); `init` opens their receivers, once. Without, they are fed by
    others: `Served(CheckpointEngineWorkers(uuid, vllm_request(url)), VllmServer(url))`. A draft model is a second
    update, by a server with `draft`.
    """

    def __init__(self, base_url: str, *, address: str | None = None, draft: bool = False, key: str | None = None):
        super().__init__(base_url, key=key)
        try:
            (address or "").format(uuid="", rank=0)
        except (LookupError, ValueError) as error:
            raise WeightsError(
                f"address has {{uuid}} and {{rank}} where a worker's own come, and no others (got {address!r:.80})"
            ) from error
        self._address, self._draft = address, draft
        self._asked: Asked | None = None
        self._was_paused = False
        """Whether somebody else had paused it, as an update does that has failed; then it stays so."""

    def init(self, *, seconds: float = 60.0) -> None:
        """Open a receiver in each worker, or again; what they serve stays known."""
        left = seconds_left(seconds)
        if self._address is None:
            raise WeightsError("a VllmServer without an address has no receivers of ours")
        try:
            self.post("/init_weight_transfer_engine", {"init_info": {"address": self._address}}, seconds=left())
        except WeightsError as error:
            raise WeightsError(
                f"{error}; it takes our pushes if it was started with VLLM_SERVER_DEV_MODE=1 and "
                """--weight-transfer-config '{"backend": "stretto"}'"""
            ) from None
        for rank, told in enumerate(self._workers(left())):
            if told["problem"]:
                raise WeightsError(f"{self.url}: worker {rank} has no receiver: {told['problem']}")

    def _workers(self, seconds: float) -> list[dict[str, Any]]:
        """How each worker is. They are asked, since what they raise would leave vLLM's other workers unheard."""
        return self.post("/collective_rpc", {"method": "stretto_told"}, seconds=seconds)["results"]  # type: ignore[no-any-return]

    def endpoint(self, uuid: str, *, rank: int = 0) -> Served:
        """For the sender on this device. An engine's other devices are pushed to by their plain addresses."""
        if self._address is not None:
            try:
                return Served(Remote(self._address.format(uuid=uuid, rank=rank)), self)
            except PeerClosed as error:
                raise PeerClosed(f"{error}; VllmServer.init() opens the workers' receivers") from None
        raise WeightsError("a VllmServer without an address has no receivers of ours")

    def version(self, *, seconds: float = 5.0) -> str | None:
        return self.get("/weight_info", seconds=seconds)["weight_version"]  # type: ignore[no-any-return]

    def pause(self, version: str, in_flight: InFlight, *, seconds: float) -> None:  # noqa: ARG002 (told at the end)
        left = seconds_left(seconds)
        workers = self._workers(left()) if self._address is not None else []
        for rank, told in enumerate(workers):
            if not told["address"]:
                raise WeightsError(f"{self.url}: worker {rank} has no receiver; VllmServer.init() opens them")
        self._was_paused = bool(self.get("/is_paused", seconds=left())["is_paused"])
        self.post(f"/pause?mode={in_flight}", seconds=left())
        if self._address is not None:
            if any(told["active"] for told in workers):  # an update that failed, or whose sender died
                self.post("/finish_weight_update", seconds=left())
            self.post("/start_draft_weight_update" if self._draft else "/start_weight_update", seconds=left())
            self._asked = Asked(lambda: self.post("/update_weights", {"update_info": {}}, seconds=3600.0))

    def resume(self, version: str, *, seconds: float) -> None:
        left = seconds_left(seconds)
        if self._asked is not None:
            self._asked.wait("vLLM", left())
            for rank, told in enumerate(self._workers(left())):
                if told["problem"] or told["version"] != version:
                    why = told["problem"] or f"it has {told['version']}"
                    raise WeightsError(f"{self.url}: worker {rank} got no {version}: {why}")
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
        if not self._was_paused:
            self.post("/resume", seconds=left())

    def trouble(self) -> str:
        return f"vLLM says: {self._asked.error}" if self._asked is not None and self._asked.error else ""


def _settle(device: torch.device) -> None:
    """Wait for what this thread has given its stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
