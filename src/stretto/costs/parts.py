"""The parts of a cost table: links, phases, buckets, shared resources; and the names of its numbers."""

import math
from typing import Literal, TypeAlias

import msgspec

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one per stage."""

Loads: TypeAlias = tuple[float | tuple[float, ...], ...]
"""A number for each expert-parallel rank, or one for each of its microbatches."""

Unit: TypeAlias = Literal["s"] | None
"""The unit of times: seconds, or None for any unit of the user's choice."""

LANES = ("compute", "comm", "host", "send", "recv", "d2h", "h2d", "reduce", "broadcast", "reload")
"""The names of lanes that a `SharedResource` may list."""
TIMES = ("F", "B", "I", "W", "FB", "BW", "R", "reduce", "reduce_experts")
BYTES = (
    "activation_bytes",
    "offload_bytes",
    "recompute_bytes",
    "pending_bytes",
    "parameter_bytes",
    "message_bytes",
)
"""The costs in bytes."""
CUT = (*TIMES, *BYTES[:-1])
"""The costs that a model's stages share: all but the size of messages."""
PASSES = ("F", "I", "W")
OPTIONAL = (*PASSES, "B", "FB", "R", "activation_bytes", "offload_bytes", "recompute_bytes", "slowdown")


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer of n bytes takes `latency + n / bandwidth`."""

    latency: float = 0.0
    bandwidth: float = math.inf


class PhaseTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a phase: forward, input gradient, weight gradient, and recompute of what its forward discarded."""

    F: float = 0.0
    I: float = 0.0  # noqa: E741
    W: float = 0.0
    R: float | None = None

    @property
    def recompute(self) -> float:
        """R, or F if R is not given."""
        return self.F if self.R is None else self.R


class WovenTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a phase in woven pairs, as far as they differ from those in `PhaseTimes`."""

    F: float | None = None
    I: float | None = None  # noqa: E741
    W: float | None = None
    R: float | None = None

    def over(self, alone: PhaseTimes) -> PhaseTimes:
        """Return all times in pairs: these, and of what is not given, those outside of pairs.

        >>> WovenTimes(F=1.5).over(PhaseTimes(F=1, I=2, W=3))
        PhaseTimes(F=1.5, I=2, W=3, R=1)
        """
        given = {name: time for name, time in msgspec.structs.asdict(self).items() if time is not None}
        return msgspec.structs.replace(alone, **{"R": alone.recompute, **given})


class BucketTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a weight update's steps for one bucket: host to device, broadcast, reload."""

    h2d: float = 1.0
    broadcast: float = 1.0
    reload: float = 1.0


class SharedResource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that several lanes share, such as a PCIe link or the cores of a CPU.

    `lanes` maps a lane's name to what a task on it draws at full speed. If running tasks demand more than `capacity`,
    it is shared fairly: each task gets an equal share, or its whole demand if that is less, and its speed drops in
    proportion.
    """

    capacity: float
    lanes: dict[str, float]
    devices: int = 1
    """How many neighbouring devices share one."""
