"""SGLang as a receiver: its workers are fed over checkpoint-engine's protocol, and its server pauses around a push."""

from collections.abc import Sequence

from stretto.ir.errors import WeightsError
from stretto.weights.adapters.checkpoint_engine import CheckpointEngineWorkers
from stretto.weights.adapters.http import Http, seconds_left
from stretto.weights.adapters.served import Served
from stretto.weights.messages import InFlight

# "keep" maps to SGLang's "retract": requests go back to the queue and are computed again. Kept in place, they would
# continue with keys and values of the old weights, and the cache could not be flushed.
_MODES: dict[InFlight, str] = {"abort": "abort", "keep": "retract"}


class SglangServer(Http):
    """A server of SGLang (0.5.6 or later, with checkpoint-engine installed).

    A push calls /pause_generation, /update_weights_from_ipc, /flush_cache and /continue_generation. SGLang cannot wait
    for requests in flight: they are aborted or kept. In older releases its update takes the writer lock even while
    generation is paused; there, a push that keeps requests runs into its deadline, so abort them.

    Tested only against a stand-in server written from SGLang's sources, never against SGLang. `key` is its admin key.
    """

    def __init__(self, base_url: str, *, key: str | None = None, update_seconds: float = 3600.0) -> None:
        """`update_seconds` is how long a whole update may take: one of SGLang's HTTP calls lasts that long."""
        super().__init__(base_url, key=key)
        self._update_seconds = update_seconds
        self._version = ""

    def endpoint(self, uuid: str, *, devices: Sequence[str] = (), device: str | None = None) -> Served:
        """Return the endpoint for the sender on this device.

        For the engine's other devices, use `CheckpointEngineWorkers(uuid, None, …)`.
        """
        return Served(CheckpointEngineWorkers(uuid, self.update, devices=devices, device=device), self)

    def pause(self, version: str, in_flight: InFlight, *, seconds: float) -> None:
        mode = _MODES.get(in_flight)
        if mode is None:
            raise WeightsError(
                f"SGLang cannot {in_flight} for requests in flight; push with in_flight='keep' or 'abort'"
            )
        self._version = version
        self.post("/pause_generation", {"mode": mode}, seconds=seconds)

    def update(self, sockets: list[tuple[str, str]]) -> None:
        """Ask SGLang to update from these sockets; return when all its workers have loaded."""
        body = {"zmq_handles": dict(sockets), "flush_cache": False, "weight_version": self._version}
        self.post("/update_weights_from_ipc", body, seconds=self._update_seconds)

    def resume(self, version: str, *, seconds: float) -> None:  # noqa: ARG002 (the update carried it)
        left = seconds_left(seconds)
        self.post(f"/flush_cache?timeout={seconds / 2:g}", seconds=left())
        self.post("/continue_generation", seconds=left())

    def withdraw(self, *, seconds: float) -> None:
        self.post("/continue_generation", seconds=seconds)

    def trouble(self) -> str:
        """Return nothing: the workers' endpoint reports the server's errors already."""
        return ""
