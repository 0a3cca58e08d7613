"""SGLang as a receiver: its server pauses, is fed over checkpoint-engine's wire, flushes its cache and goes on."""

from collections.abc import Sequence

from stretto.ir.errors import WeightsError
from stretto.weights.adapters import Http, Served, seconds_left
from stretto.weights.adapters.checkpoint_engine import CheckpointEngineWorkers
from stretto.weights.messages import InFlight

# "keep" is their retract: requests go back to the queue and are computed anew. In place, they would go on with keys and
# values of the old weights, and the cache could not be flushed.
_MODES: dict[InFlight, str] = {"abort": "abort", "keep": "retract"}


class SglangServer(Http):
    """A server of SGLang (0.5.6 or later, with checkpoint-engine installed).

    A push goes: /pause_generation, /update_weights_from_ipc, /flush_cache, /continue_generation. SGLang cannot wait for
    requests in flight: they are aborted, or kept. Where its update takes the writer lock although generation is paused
    (releases before that was mended), a push with kept requests fails by its deadline; abort them there.

    Never run against SGLang: only against a server that answers as its sources do. `key` is its admin key.
    """

    def __init__(self, base_url: str, *, key: str | None = None, update_seconds: float = 3600.0) -> None:
        """`update_seconds` is how long a whole update may take: one call of theirs lasts that long."""
        super().__init__(base_url, key=key)
        self._update_seconds = update_seconds
        self._version = ""

    def endpoint(self, uuid: str, *, devices: Sequence[str] = (), device: str | None = None) -> Served:
        """For the sender on this device. An engine's other devices get `CheckpointEngineWorkers(uuid, None, …)`."""
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
        """Returns when all its workers have loaded."""
        body = {"zmq_handles": dict(sockets), "flush_cache": False, "weight_version": self._version}
        self.post("/update_weights_from_ipc", body, seconds=self._update_seconds)

    def resume(self, version: str, *, seconds: float) -> None:  # noqa: ARG002 (it was told with the update)
        left = seconds_left(seconds)
        self.post(f"/flush_cache?timeout={seconds / 2:g}", seconds=left())
        self.post("/continue_generation", seconds=left())

    def withdraw(self, *, seconds: float) -> None:
        self.post("/continue_generation", seconds=seconds)

    def trouble(self) -> str:
        """Its workers' endpoint says so already."""
        return ""
