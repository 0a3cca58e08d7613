"""What a push tells in the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from stretto.ir.errors import WeightsError
from stretto.timeline import Timeline
from stretto.weights.messages import Assurance


@dataclass(frozen=True, slots=True)
class Step:
    """A step's time, as it was foreseen and as it was; on the device where it took longest."""

    predicted: float
    actual: float


@dataclass(frozen=True, slots=True)
class Report:
    """A push that went well: all receivers serve the version."""

    version: str
    content: str
    """The digest of all values: two versions of one content have the same, under whatever name."""
    nbytes: int
    buckets: int
    bucket_bytes: int
    mode: str
    seconds: float
    """From the first receiver's pause to the last one's resuming."""
    moving: Step
    """The program: from the first copy to the last reload."""
    steps: dict[str, Step]
    """Host to device, broadcast, reload."""
    receivers: dict[str, Assurance]
    """How sure it is that each has what was pushed: "verified", "delivered" or "unaccounted"."""
    timeline: Timeline | None = field(default=None, repr=False)
    """With record=True, on the first rank: when every task of every sender ran."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9

    def __str__(self) -> str:
        steps = ", ".join(
            f"{name} {_time(step.actual)} ({_time(step.predicted)} foreseen)" for name, step in self.steps.items()
        )
        told = "; ".join(
            f"{how}: {', '.join(names)}" if len(names) < len(self.receivers) else f"all {how}"
            for how in get_args(Assurance)
            if (names := [name for name, it in self.receivers.items() if it == how])
        )
        return (
            f"{self.version} ({self.content[:8]}): {size(self.nbytes)} to {counted(len(self.receivers), 'receiver')} "
            f"in {_time(self.seconds)} ({self.gb_per_second:.3g} GB/s), {counted(self.buckets, 'bucket')}, "
            f"mode {self.mode}: {steps}; {told}"
        )


class PushError(WeightsError):
    """A push that failed at its very end, when some of its receivers may serve the new version."""

    def __init__(
        self, version: str, serving: Mapping[str, Assurance], failed: Mapping[str, str], unknown: Mapping[str, str]
    ) -> None:
        self.version = version
        self.serving = dict(serving)
        """Receivers that serve it, and how sure that is."""
        self.failed = dict(failed)
        """Those that do not, and why."""
        self.unknown = dict(unknown)
        """Those that did not answer any more, and may serve it or not; their status tells."""
        there = f"{', '.join(serving) or 'nobody'} {'serve' if len(serving) > 1 else 'serves'} it"
        away = [f"{name} does not: {why}" for name, why in failed.items()]
        lost = [f"{name} may or may not: it {why}" for name, why in unknown.items()]
        super().__init__(f"the push of {version} failed at its end: {'; '.join([there, *away, *lost])}; push it again")


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def size(nbytes: int) -> str:
    """For people."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}"
    return f"{nbytes} bytes"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
