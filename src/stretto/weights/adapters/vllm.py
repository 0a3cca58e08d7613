"""vLLM's server, which pauses, updates and resumes its workers around a push."""

import contextlib
from concurrent.futures import Future
from typing import Any

from stretto.ir.errors import WeightsError
from stretto.weights.adapters.http import Http, failure_of, in_background, seconds_left, wait_for
from stretto.weights.adapters.served import Served
from stretto.weights.connection import PeerClosed
from stretto.weights.messages import InFlight
from stretto.weights.send.endpoint import Remote


class VllmServer(Http):
    """A server of vLLM (0.25 or later, VLLM_SERVER_DEV_MODE=1), which pauses around a push and reports the version.

    With an `address` for its workers, as in unix:///run/user/1000/engine-0/{uuid}, the workers take pushes through our
    weight-transfer engine (--weight-transfer-config '{"backend": "stretto"}'); `init` opens their receivers, once.
    Without an address, another endpoint feeds the workers:
    `Served(CheckpointEngineWorkers(uuid, vllm_request(url)), VllmServer(url))`. A draft model needs a push of its own,
    through a `VllmServer` with `draft=True`.
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
        self._update_call: Future[Any] | None = None
        self._was_paused = False
        """Whether the engine was paused before this push, by a failed update for example; then it stays paused."""

    def init(self, *, seconds: float = 60.0) -> None:
        """Open a receiver in each worker, or reopen it; a reopened receiver keeps its status."""
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
        for rank, worker in enumerate(self._workers(left())):
            if worker["problem"]:
                raise WeightsError(f"{self.url}: worker {rank} has no receiver: {worker['problem']}")

    def _workers(self, seconds: float) -> list[dict[str, Any]]:
        """Return the status of each worker. Workers report problems here instead of raising them: an error would leave
        the answers of vLLM's other workers unread."""
        return self.post("/collective_rpc", {"method": "stretto_told"}, seconds=seconds)["results"]  # type: ignore[no-any-return]

    def endpoint(self, uuid: str, *, rank: int = 0) -> Served:
        """Return the endpoint for the sender on this device; push to the engine's other devices by their addresses."""
        if self._address is not None:
            try:
                return Served(Remote(self._address.format(uuid=uuid, rank=rank)), self)
            except PeerClosed as error:
                raise PeerClosed(f"{error}; VllmServer.init() opens the workers' receivers") from None
        raise WeightsError("a VllmServer without an address has no receivers of ours")

    def version(self, *, seconds: float = 5.0) -> str | None:
        return self.get("/weight_info", seconds=seconds)["weight_version"]  # type: ignore[no-any-return]

    def pause(self, version: str, in_flight: InFlight, *, seconds: float) -> None:  # noqa: ARG002 (`resume` reports it)
        left = seconds_left(seconds)
        self._update_call, self._was_paused = None, True  # until we pause it, nothing is to be resumed
        workers = self._workers(left()) if self._address is not None else []
        for rank, worker in enumerate(workers):
            if not worker["address"]:
                raise WeightsError(f"{self.url}: worker {rank} has no receiver; VllmServer.init() opens them")
        self._was_paused = bool(self.get("/is_paused", seconds=left())["is_paused"])
        self.post(f"/pause?mode={in_flight}", seconds=left())
        if self._address is not None:
            if any(worker["active"] for worker in workers):  # an update that failed, or whose sender died
                self.post("/finish_weight_update", seconds=left())
            self.post("/start_draft_weight_update" if self._draft else "/start_weight_update", seconds=left())
            self._update_call = in_background(lambda: self.post("/update_weights", {"update_info": {}}, seconds=3600.0))

    def resume(self, version: str, *, seconds: float) -> None:
        left = seconds_left(seconds)
        if self._update_call is not None:
            wait_for(self._update_call, "vLLM", left())
            for rank, worker in enumerate(self._workers(left())):
                if worker["problem"] or worker["version"] != version:
                    why = worker["problem"] or f"it has {worker['version']}"
                    raise WeightsError(f"{self.url}: worker {rank} got no {version}: {why}")
            self.post("/finish_weight_update", {"weight_version": version}, seconds=left())
        self.post("/reset_prefix_cache?reset_running_requests=true", seconds=left())
        self.post("/resume", seconds=left())

    def withdraw(self, *, seconds: float) -> None:
        left = seconds_left(seconds)
        if self._update_call is not None:
            with contextlib.suppress(WeightsError):  # a failed call also ends the update, and may be why we withdraw
                wait_for(self._update_call, "vLLM", left())
                unchanged = {"weight_version": self.version(seconds=left())}
                self.post("/finish_weight_update", unchanged, seconds=left())
        if not self._was_paused:
            self.post("/resume", seconds=left())

    def trouble(self) -> str:
        error = failure_of(self._update_call)
        return "" if error is None else f"vLLM says: {error}"
