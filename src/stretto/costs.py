"""Cost tables: how long each kind of task takes, and how many bytes it holds."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import tomli_w
from numpy.typing import NDArray

from stretto.ir.errors import CostError, TextError
from stretto.ir.files import read_text, write_text
from stretto.ir.units import parse_bytes

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one per stage."""

Unit: TypeAlias = Literal["s"] | None
"""The unit of times: seconds, or None for any unit of the user's choice."""

LANES = ("compute", "comm", "send", "recv", "d2h", "h2d", "reduce", "broadcast", "reload")
"""The names of lanes that a `SharedResource` may list."""
_TIMES = ("F", "B", "I", "W", "FB", "BW", "R", "reduce")
BYTES = (
    "activation_bytes",
    "offload_bytes",
    "recompute_bytes",
    "pending_bytes",
    "parameter_bytes",
    "message_bytes",
)
"""The costs in bytes."""
_OPTIONAL = ("B", "FB", "R", "activation_bytes", "offload_bytes", "recompute_bytes", "slowdown")


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


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times, all in one unit of your choice, and sizes in bytes.

    >>> Costs(F=1, I=1, W=1).per_stage("B", stages=2).tolist()
    [2.0, 2.0]
    """

    unit: Unit = None
    """"s" if times are seconds; simulated times are then comparable with measured ones."""
    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741
    W: PerStage = 1.0
    B: PerStage | None = None
    """A full backward; I + W unless given."""
    FB: PerStage | None = None
    """A woven pair, which takes at least as long as either pass alone; F + B unless given."""
    BW: PerStage = 0.0
    """The part of B, and of a pair, that runs after the gradient is sent. 0 is a fused backward, as the closed forms
    in the literature assume; W is Kimi K2's decoupled weight gradient."""
    R: PerStage | None = None
    """Recompute of what a forward discarded; F unless given."""
    reduce: PerStage = 0.0
    """The sum of a stage's gradients over its devices, if it lives on several."""
    reduce_tied: float = 0.0
    """The same for weights that stages share."""
    slowdown: tuple[float, ...] | None = None
    """A factor on all compute times, per device."""
    link: Link = Link()
    links: dict[str, Link] = {}
    """Links that differ from `link`, by "source>target" device, e.g. "3>4"."""
    phases: dict[str, PhaseTimes] = {}
    """Times of phases, by "phase" or "layer.phase", e.g. "attn" or "moe.mlp"; for programs with layers."""
    calls: dict[str, float] = {}
    """Times of calls in a user's own program, by name, or by name without the number at its end; if empty, every call
    takes 1."""
    bucket: BucketTimes = BucketTimes()
    """Times of a weight update."""
    host: Link = Link()
    """Each direction between a device and host memory, for offloading."""
    shared: dict[str, SharedResource] = {}
    """Resources that lanes share, by any name."""
    message_bytes: PerStage = 0.0
    """The size of a stage's output, and of the gradient of that output."""
    activation_bytes: PerStage | None = None
    """Held from the start of a stage's forward to the end of its B or I."""
    offload_bytes: PerStage | None = None
    """The part of `activation_bytes` that goes to host memory, if a program offloads; unless given, all that is not
    recomputed."""
    recompute_bytes: PerStage | None = None
    """The part of `activation_bytes` that is discarded after the forward, if a program recomputes."""
    pending_bytes: PerStage = 0.0
    """Held between I (or B's input part) and the end of the weight part."""
    parameter_bytes: PerStage = 0.0
    """Held throughout, for each stage on a device."""

    def save(self, path: str | Path) -> None:
        """Write a TOML file, for `load_costs` and the command line's --costs."""
        if Path(path).suffix.lower() != ".toml":
            raise TextError(f"costs are saved as .toml (got {path})")
        write_text(path, tomli_w.dumps(self._table()))

    def _table(self) -> dict[str, Any]:
        """Return what differs from the defaults, and F, I and W, which have no defaults in seconds."""
        defaults = msgspec.to_builtins(Costs())
        return {
            name: _without_none(value)
            for name, value in msgspec.to_builtins(self, enc_hook=float).items()
            if value != defaults[name] or name in ("F", "I", "W")
        }

    def __post_init__(self) -> None:
        if self.unit not in (None, "s"):
            raise CostError(f'unit is "s" if times are seconds, or left out (got {self.unit!r:.40})')
        for name in (*_TIMES, *BYTES, "slowdown", "reduce_tied"):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, list):
                msgspec.structs.force_setattr(self, name, value := tuple(value))
            _validate(name, value)
        named = {"link": self.link, "host": self.host, **{f"links.{key}": link for key, link in self.links.items()}}
        for name, link in named.items():
            if not isinstance(link, Link):
                raise CostError(f"{name} must be a Link (got {link!r:.40})")
            _validate(f"{name}.latency", link.latency)
            if math.isnan(link.bandwidth) or link.bandwidth <= 0:
                raise CostError(f"{name}.bandwidth must be above 0 (got {link.bandwidth})")
        for key in self.links:
            link_ends(key)
        for key, times in self.phases.items():
            if not isinstance(times, PhaseTimes):
                raise CostError(f"phases.{key} must be PhaseTimes (got {times!r:.40})")
            for name in ("F", "I", "W", "recompute"):
                _validate(f"phases.{key}.{name}", getattr(times, name))
        if not isinstance(self.calls, dict):
            raise CostError(f"calls are times by name (got {self.calls!r:.40})")
        for key, time in self.calls.items():
            _validate(f"calls.{key}", time)
        if not isinstance(self.bucket, BucketTimes):
            raise CostError(f"bucket must be BucketTimes (got {self.bucket!r:.40})")
        for name in BucketTimes.__struct_fields__:
            _validate(f"bucket.{name}", getattr(self.bucket, name))
        for key, shared in self.shared.items():
            _validate_shared(f"shared.{key}", shared, any_lane=bool(self.calls))

    def per_stage(self, name: str, *, stages: int) -> NDArray[np.float64]:
        """Return a time such as F, or a size, for each stage."""
        value = getattr(self, name)
        if value is None and name == "B":
            return self.per_stage("I", stages=stages) + self.per_stage("W", stages=stages)
        if value is None and name == "FB":
            return self.per_stage("F", stages=stages) + self.per_stage("B", stages=stages)
        if value is None and name == "R":
            return self.per_stage("F", stages=stages)
        return _spread(name, 0.0 if value is None else value, stages, "stages")

    def call_time(self, name: str) -> float:
        """Return how long a call of a user's own program takes."""
        for key in (name, family(name)):
            if key in self.calls:
                return self.calls[key]
        if self.unit == "s" or self.calls:
            raise CostError(f"no time is given for the call {name!r:.40}: give calls.{family(name)} too")
        return 1.0

    def leaving_bytes(self, *, stages: int, recompute: bool) -> NDArray[np.float64]:
        """Return the bytes that a pass of each stage offloads to host memory, with or without recompute."""
        if self.offload_bytes is not None:
            return self.per_stage("offload_bytes", stages=stages)
        held, again = (self.per_stage(name, stages=stages) for name in ("activation_bytes", "recompute_bytes"))
        return np.maximum(0.0, held - again * recompute)

    def device_factors(self, *, devices: int) -> NDArray[np.float64]:
        return _spread("slowdown", 1.0 if self.slowdown is None else self.slowdown, devices, "devices")

    def for_stages(self, stages: int, *, devices: int) -> "Costs":
        """Return the costs of the same model cut into this many stages.

        A single number is the cost of one of `devices` equal slices of the model; a list gives the
        model's slices in order, any number of them. Message sizes stay the same.

        >>> Costs(F=(1, 3)).for_stages(4, devices=2).F
        (0.5, 0.5, 1.5, 1.5)
        """
        changed: dict[str, PerStage | None] = {}
        for name in (*_TIMES, *BYTES[:-1]):
            value = getattr(self, name)
            if isinstance(value, tuple):
                total = np.interp(
                    np.linspace(0, 1, stages + 1), np.linspace(0, 1, len(value) + 1), [0.0, *np.cumsum(value)]
                )
                changed[name] = tuple(np.diff(total).tolist()) if len(value) != stages else value
            elif value is not None:
                changed[name] = value * devices / stages
        return msgspec.structs.replace(self, **changed)

    def validate(self, *, stages: int, devices: int, recompute: bool = False) -> None:
        """Raise CostError if a list has the wrong length or a part exceeds its whole."""
        sizes = {name: self.per_stage(name, stages=stages) for name in BYTES}
        parts, whole = sizes["offload_bytes"] + sizes["recompute_bytes"] * recompute, sizes["activation_bytes"]
        if (parts > whole * (1 + 1e-9)).any():
            stage = int((parts > whole).argmax())
            raise CostError(
                "offload_bytes and recompute_bytes are parts of activation_bytes, but exceed them on stage "
                f"{stage} ({parts[stage]:g} > {whole[stage]:g})"
            )
        self.device_factors(devices=devices)
        times = {name: self.per_stage(name, stages=stages) for name in ("F", "B", "FB", "BW")}
        for name, of in (("BW", "B"), ("BW", "FB"), ("F", "FB"), ("B", "FB")):
            part, whole = times[name], times[of]
            if (part > whole).any():
                stage = int((part > whole).argmax())
                raise CostError(
                    f"{name} is a part of {of}, but exceeds it on stage {stage} ({part[stage]:g} > {whole[stage]:g})"
                )
        for key in self.links:
            for device in link_ends(key):
                if device >= devices:
                    raise CostError(f'link "{key}" names device {device}, but there are only {devices} devices')


def _without_none(value: Any) -> Any:
    """Leave out None values: TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def family(name: str) -> str:
    """Return a call's name without the number at its end; calls of one family share a time.

    >>> family("load12"), family("7")
    ('load', '7')
    """
    return name.rstrip("0123456789") or name


def link_ends(key: str) -> tuple[int, int]:
    """Return the source and target device in a link's name."""
    if not isinstance(key, str):
        raise CostError(f'a link is named "source>target", e.g. "3>4" (got {key!r:.40})')
    source, arrow, target = key.partition(">")
    if not (arrow and source.isdecimal() and target.isdecimal() and len(key) < 20):
        raise CostError(f'a link is named "source>target", e.g. "3>4" (got {key!r:.40})')
    return int(source), int(target)


def parse_costs(text: str) -> Costs:
    """Read the command line's short form.

    >>> parse_costs("F=1,B=2.5").B
    2.5
    """
    table: dict[str, float | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name not in ("unit", *_TIMES, *BYTES):
            raise CostError(f"unknown cost {name!r:.40}; known are {', '.join((*_TIMES, *BYTES, 'unit'))}")
        if name in table:
            raise CostError(f"cost {name} is given twice")
        try:
            table[name] = value if name in ("unit", *BYTES) else float(value)
        except ValueError:
            raise CostError(f"cost {name} must be a number (got {value!r:.40})") from None
    return _user_costs(table)


def parse_costs_toml(text: str) -> Costs:
    """Read a TOML table with the fields of `Costs`."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also covers numbers with thousands of digits
        raise CostError(f"not valid TOML: {error}") from None
    return _user_costs(table)


def load_costs(path: str | Path) -> Costs:
    """Read the TOML file that `Costs.save` writes, or one written by hand.

    >>> from tempfile import TemporaryDirectory
    >>> from stretto import Costs, load_costs
    >>> with TemporaryDirectory() as folder:
    ...     Costs(F=1, I=1.1, W=0.9).save(f"{folder}/costs.toml")
    ...     print(load_costs(f"{folder}/costs.toml").I)
    1.1
    """
    try:
        return parse_costs_toml(read_text(path))
    except CostError as error:
        raise CostError(f"{path}: {error}") from None


def _user_costs(table: Mapping[str, Any]) -> Costs:
    """Make costs from user input; raise CostError if times in seconds would need defaults, which have no unit."""
    missing = [name for name in ("F", "I", "W") if name not in table]
    if table.get("unit") == "s" and missing and not any(map(table.get, ("phases", "bucket", "calls"))):
        raise CostError(f"times in seconds have no defaults: give {' and '.join(missing)} too")
    return costs_from(table)


def costs_from(table: Mapping[str, Any]) -> Costs:
    if table.get("unit") not in (None, "s"):
        raise CostError(f"unit is s if times are seconds, or left out (got {table['unit']!r:.40})")
    try:
        return msgspec.convert({name: _sized(name, value) for name, value in table.items()}, Costs)
    except msgspec.ValidationError as error:
        raise CostError(f"bad cost table: {error}") from None


def _sized(name: str, value: Any) -> Any:
    """Read numbers of bytes that have a unit, such as "2GB"."""
    if name in BYTES and isinstance(value, list):
        return [_sized(name, number) for number in value]
    if name not in BYTES or not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except TextError:
        raise CostError(f"cost {name} must be a number, or a size such as 2GB (got {value!r:.40})") from None


def _validate(name: str, value: PerStage) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        sensible = isinstance(number, int | float) and not isinstance(number, bool)
        if not sensible or not math.isfinite(number) or number < 0:
            raise CostError(f"{name} must be a number of at least 0 (got {number!r:.40})")


def _validate_shared(name: str, shared: SharedResource, *, any_lane: bool) -> None:
    if not isinstance(shared, SharedResource):
        raise CostError(f"{name} must be a SharedResource (got {shared!r:.40})")
    for lane, draws in {"capacity": shared.capacity, **shared.lanes}.items():
        _validate(f"{name}.{lane}", draws)
        if draws <= 0:
            raise CostError(f"{name}.{lane} must be above 0 (got {draws})")
    if not any_lane and (unknown := [lane for lane in shared.lanes if lane not in LANES]):
        raise CostError(f"{name} names lane {unknown[0]!r:.40}; known are {', '.join(LANES)}")
    if not isinstance(shared.devices, int) or shared.devices < 1:
        raise CostError(f"{name}.devices must be at least 1 (got {shared.devices!r:.40})")


def _spread(name: str, value: PerStage, count: int, what: str) -> NDArray[np.float64]:
    if isinstance(value, tuple) and len(value) != count:
        raise CostError(f"{name} has {len(value)} entries, but the plan has {count} {what}")
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
