"""The plan of a push: how large buckets are, and which mode is the fastest that fits."""

from dataclasses import dataclass

import msgspec

from stretto.check import demand_sound
from stretto.costs import BucketTimes, Costs
from stretto.ir.errors import WeightsError
from stretto.program.program import Program
from stretto.program.update import MODES, Mode, weight_update
from stretto.simulate import simulate
from stretto.timeline import Timeline
from stretto.weights.layout import ALIGNMENT, aligned, least_bucket
from stretto.weights.manifest import Manifest

BUCKET_BYTES = 512 << 20
_ROUNDS = 8  # of a model that is smaller than that many buckets from each device
_SMALLEST = 4 << 20
_SHARE = 0.9  # of the free memory


class Speeds(msgspec.Struct, frozen=True):
    """Bytes in a second, of each step."""

    h2d: float
    broadcast: float
    reload: float

    def like(self, other: "Speeds") -> bool:
        """Whether none differs by more than a tenth."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return all(abs(one - two) <= 0.1 * two for one, two in pairs)


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, its program, and how it should go."""

    mode: Mode
    program: Program
    predicted: Timeline
    speeds: Speeds
    """From which that was foreseen."""


def bucket_bytes_for(manifest: Manifest, devices: int, free: int, *, split: bool = False) -> int:
    """As large as helps: several rounds, buffers that fit, and room for the largest tensor if that stays whole."""
    wanted = min(BUCKET_BYTES, max(_SMALLEST, manifest.nbytes // (devices * _ROUNDS)))
    most = int(free * _SHARE) // buffers(devices, "two") // ALIGNMENT * ALIGNMENT
    least = ALIGNMENT if split else least_bucket(manifest)
    if least > most:
        raise WeightsError(
            f"the largest tensor has {least:,} bytes, and {buffers(devices, 'two')} buffers of that size do not fit "
            f"{free:,} free bytes; free some, or take tensors in parts: Sender(split=True)"
        )
    return max(least, min(aligned(wanted), most))


def buffers(devices: int, mode: Mode) -> int:
    """How many buffers a device has, of a bucket each."""
    return 2 if devices == 1 else 4 if mode == "three" else 3


def choose(
    devices: int, buckets: int, bucket_bytes: int, speeds: Speeds, free: int, *, mode: Mode | None = None
) -> Choice:
    """The mode that should be fastest among those whose buffers fit, or the one that is asked for."""
    if mode is not None and mode not in MODES:
        raise WeightsError(f"{mode!r:.40} is no mode; there are {', '.join(MODES)}")
    wanted: tuple[Mode, ...] = MODES if mode is None else (mode,)
    fits = [it for it in wanted if buffers(devices, it) * bucket_bytes <= free]
    if not fits:
        need = buffers(devices, wanted[0]) * bucket_bytes
        raise WeightsError(
            f"{need:,} bytes of buffers are needed, and {free:,} are free; free some, or register with smaller buckets"
        )
    times = BucketTimes(
        h2d=bucket_bytes / speeds.h2d, broadcast=bucket_bytes / speeds.broadcast, reload=bucket_bytes / speeds.reload
    )
    best: Choice | None = None
    for it in fits:
        program = weight_update(devices=devices, buckets=buckets, mode=it)
        predicted = simulate(program, Costs(unit="s", bucket=times))
        if best is None or predicted.makespan < best.predicted.makespan:
            best = Choice(it, program, predicted, speeds)
    assert best is not None
    demand_sound(best.program, "push")
    return best


def busy(timeline: Timeline) -> dict[str, float]:
    """Seconds that each step is under way, on the device where that is longest."""
    program, length = timeline.program, timeline.end - timeline.start
    found: dict[str, float] = {}
    for index, lane in enumerate(program.lanes):
        found[lane.name] = max(found.get(lane.name, 0.0), float(length[program.lane == index].sum()))
    return found
