"""The result of a push: a report, or an error that lists what each receiver serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from stretto.ir.errors import WeightsError
from stretto.timeline import Timeline
from stretto.weights.messages import Assurance


@dataclass(frozen=True, slots=True)
class Step:
    """A step's predicted and actual time in seconds, on the device where it took longest."""

    predicted: float
    actual: float


@dataclass(frozen=True, slots=True)
class Report:
    """A successful push: all receivers serve the version."""

    version: str
    content: str
    """The digest of all values: equal for two versions with the same content, whatever their names."""
    nbytes: int
    buckets: int
    bucket_bytes: int
    mode: str
    seconds: float
    """From the first receiver's pause to the last receiver's resume."""
    moving: Step
    """The time of the program, from the first copy to the last reload."""
    steps: dict[str, Step]
    """The time of each step: h2d (host to device), broadcast, reload."""
    receivers: dict[str, Assurance]
    """What is known about each receiver's weights: "verified", "delivered" or "unaccounted"."""
    timeline: Timeline | None = field(default=None, repr=False)
    """With record=True, on the first rank: when each task of each sender ran."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9

    def __str__(self) -> str:
        steps = ", ".join(
            f"{name} {_time(step.actual)} ({_time(step.predicted)} predicted)" for name, step in self.steps.items()
        )
        assurances = "; ".join(
            f"{assurance}: {', '.join(names)}" if len(names) < len(self.receivers) else f"all {assurance}"
            for assurance in get_args(Assurance)
            if (names := [name for name, received in self.receivers.items() if received == assurance])
        )
        return (
            f"{self.version} ({self.content[:8]}): {size(self.nbytes)} to {counted(len(self.receivers), 'receiver')} "
            f"in {_time(self.seconds)} ({self.gb_per_second:.3g} GB/s), {counted(self.buckets, 'bucket')}, "
            f"mode {self.mode}: {steps}; {assurances}"
        )


class PushError(WeightsError):
    """A push that failed while receivers resumed, so that some of them may serve the new version."""

    def __init__(
        self, version: str, serving: Mapping[str, Assurance], failed: Mapping[str, str], unknown: Mapping[str, str]
    ) -> None:
        self.version = version
        self.serving = dict(serving)
        """The assurance of each receiver that serves the version."""
        self.failed = dict(failed)
        """Why each of the other receivers does not serve it."""
        self.unknown = dict(unknown)
        """Receivers that stopped answering, which may or may not serve it; `status` tells."""
        serving_text = f"{', '.join(serving) or 'nobody'} {'serve' if len(serving) > 1 else 'serves'} it"
        failed_texts = [f"{name} does not: {why}" for name, why in failed.items()]
        unknown_texts = [f"{name} may or may not: it {why}" for name, why in unknown.items()]
        details = "; ".join([serving_text, *failed_texts, *unknown_texts])
        super().__init__(f"the push of {version} failed at its end: {details}; push it again")


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def size(nbytes: int) -> str:
    """Format a number of bytes for people."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}"
    return f"{nbytes} bytes"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
