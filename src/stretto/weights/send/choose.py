"""Chooses how to push: the bucket size, and the fastest mode whose buffers fit."""

from dataclasses import dataclass

import msgspec

from stretto.check import validate_sound
from stretto.costs import BucketTimes, Costs
from stretto.ir.errors import WeightsError
from stretto.program.program import Program
from stretto.program.update import MODES, Mode, weight_update
from stretto.simulate import simulate
from stretto.timeline import Timeline
from stretto.weights.layout import ALIGNMENT, aligned, least_bucket
from stretto.weights.manifest import Manifest

BUCKET_BYTES = 512 << 20
_ROUNDS = 8  # buckets that each device should send at least, if a model is small
_SMALLEST = 4 << 20  # bytes of a bucket, unless memory is short
_SHARE = 0.9  # of the free memory that buffers may take


class Speeds(msgspec.Struct, frozen=True):
    """Bytes per second of each step."""

    h2d: float
    broadcast: float
    reload: float

    def like(self, other: "Speeds") -> bool:
        """Return whether no speed differs by more than 10 %."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return all(abs(one - two) <= 0.1 * two for one, two in pairs)


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, its program, and the predicted timeline."""

    mode: Mode
    program: Program
    predicted: Timeline
    speeds: Speeds
    """The speeds that the prediction is based on."""


def bucket_bytes_for(manifest: Manifest, devices: int, free: int, *, split: bool = False) -> int:
    """Return a bucket size that gives several rounds, whose buffers fit, and that holds the largest tensor if tensors
    are not split."""
    preferred = min(BUCKET_BYTES, max(_SMALLEST, manifest.nbytes // (devices * _ROUNDS)))
    most = int(free * _SHARE) // buffers(devices, "overlap_reload") // ALIGNMENT * ALIGNMENT
    least = ALIGNMENT if split else least_bucket(manifest)
    if least > most:
        raise WeightsError(
            f"the largest tensor has {least:,} bytes, and {buffers(devices, 'overlap_reload')} buffers of that size do "
            f"not fit {free:,} free bytes; free some, or take tensors in parts: Sender(split=True)"
        )
    return max(least, min(aligned(preferred), most))


def buffers(devices: int, mode: Mode) -> int:
    """Return how many buffers of one bucket each a device has."""
    return 2 if devices == 1 else 4 if mode == "overlap_all" else 3


def choose(
    devices: int, buckets: int, bucket_bytes: int, speeds: Speeds, free: int, *, mode: Mode | None = None
) -> Choice:
    """Return the fastest mode by prediction whose buffers fit; only consider `mode` if it is given."""
    if mode is not None and mode not in MODES:
        raise WeightsError(f"{mode!r:.40} is no mode; there are {', '.join(MODES)}")
    candidates: tuple[Mode, ...] = MODES if mode is None else (mode,)
    fitting = [candidate for candidate in candidates if buffers(devices, candidate) * bucket_bytes <= free]
    if not fitting:
        need = buffers(devices, candidates[0]) * bucket_bytes
        raise WeightsError(
            f"{need:,} bytes of buffers are needed, and {free:,} are free; free some, or register with smaller buckets"
        )
    times = BucketTimes(
        h2d=bucket_bytes / speeds.h2d, broadcast=bucket_bytes / speeds.broadcast, reload=bucket_bytes / speeds.reload
    )
    best: Choice | None = None
    for candidate in fitting:
        program = weight_update(devices=devices, buckets=buckets, mode=candidate)
        predicted = simulate(program, Costs(unit="s", bucket=times))
        if best is None or predicted.makespan < best.predicted.makespan:
            best = Choice(candidate, program, predicted, speeds)
    assert best is not None
    validate_sound(best.program, "push")
    return best


def busy(timeline: Timeline) -> dict[str, float]:
    """Return how many seconds each step is running, on the device where it runs longest."""
    program, length = timeline.program, timeline.end - timeline.start
    seconds: dict[str, float] = {}
    for index, lane in enumerate(program.lanes):
        seconds[lane.name] = max(seconds.get(lane.name, 0.0), float(length[program.lane == index].sum()))
    return seconds
