"""Cost tables: how long each kind of task takes, and how many bytes it holds."""

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.costs.parts import (
    BYTES,
    CUT,
    PASSES,
    TIMES,
    BucketTimes,
    Link,
    Loads,
    PerStage,
    PhaseTimes,
    SharedResource,
    Unit,
    WovenTimes,
)
from stretto.costs.validate import link_ends, validate
from stretto.ir.errors import CostError


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times, all in one unit of your choice, and sizes in bytes.

    >>> Costs(F=1, I=1, W=1).per_stage("B", stages=2).tolist()
    [2.0, 2.0]
    """

    unit: Unit = None
    """"s" if times are seconds; simulated times are then comparable with measured ones."""
    F: PerStage | None = None
    I: PerStage | None = None  # noqa: E741
    W: PerStage | None = None
    """Forward, input gradient and weight gradient; 1 each unless given. Times in seconds have no defaults."""
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
    reduce_experts: PerStage = 0.0
    """The same for its experts, if they are shared out among expert-parallel ranks: `reduce` is then that of the
    rest."""
    reduce_tied: float = 0.0
    """The same for weights that stages share."""
    slowdown: tuple[float, ...] | None = None
    """A factor on the times of all tasks on compute lanes, per device."""
    loads: Loads | None = None
    """A factor on the times of expert-parallel ranks from a layer's dispatch to its combine, for uneven routing: one
    entry for each rank, which is a number, or a list with a number for each of a replica's microbatches. 1 is an even
    share, whose times `phases` has; the factors need not average 1."""
    link: Link = Link()
    links: dict[str, Link] = {}
    """Links that differ from `link`, by "source>target" device, e.g. "3>4"."""
    phases: dict[str, PhaseTimes] = {}
    """Times of phases, by "phase" or "layer.phase", e.g. "attn" or "moe.mlp"; for programs with layers. A phase without
    a backward, such as "counts", takes 0 if it is left out; every other phase must be there."""
    woven: dict[str, WovenTimes] = {}
    """Times of phases in woven pairs, where compute and communication slow each other down, by the same names. A phase
    that is not listed, and what an entry leaves out, takes its time in `phases`."""
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
        from stretto.costs.text import save_costs  # here, because it imports this module

        save_costs(self, path)

    def __post_init__(self) -> None:
        for name in (*TIMES, *BYTES, "slowdown", "loads"):
            if isinstance(value := getattr(self, name), list | tuple):
                value = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)
                msgspec.structs.force_setattr(self, name, value)
        validate(self)

    def per_stage(self, name: str, *, stages: int) -> NDArray[np.float64]:
        """Return a time such as F, or a size, for each stage."""
        value = getattr(self, name)
        if value is None and name == "B":
            return self.per_stage("I", stages=stages) + self.per_stage("W", stages=stages)
        if value is None and name == "FB":
            return self.per_stage("F", stages=stages) + self.per_stage("B", stages=stages)
        if value is None and name == "R":
            return self.per_stage("F", stages=stages)
        if value is None and name in PASSES:
            if self.unit == "s":
                raise CostError(f"times in seconds have no defaults: give {name} too")
            value = 1.0
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

    def load_factors(self, *, ranks: int, microbatches: int) -> NDArray[np.float64]:
        """Return `loads` for each expert-parallel rank and each of a replica's microbatches."""
        loads = (1.0,) * ranks if self.loads is None else self.loads
        if len(loads) != ranks:
            raise CostError(f"loads has {len(loads)} entries, but the plan has {ranks} expert-parallel ranks")
        for load in loads:
            if isinstance(load, tuple) and len(load) != microbatches:
                raise CostError(
                    f"loads has a list of {len(load)} entries, but each replica has {microbatches} microbatches"
                )
        return np.stack([np.broadcast_to(np.asarray(load, dtype=np.float64), (microbatches,)) for load in loads])

    def for_stages(self, stages: int, *, devices: int) -> "Costs":
        """Return the costs of the same model cut into this many stages.

        A cost is that of one of the model's equal slices: a list gives it slice by slice, a number says that it is the
        same for all. There are as many slices as the lists are long, or one for each device if there are no lists.
        Message sizes stay the same, and so do times of phases. Costs of as many slices as stages are returned as they
        are.

        >>> costs = Costs(F=(1, 3), W=2).for_stages(4, devices=2)
        >>> costs.F, costs.W
        ((0.5, 0.5, 1.5, 1.5), 1.0)
        """
        for name, count in (("stages", stages), ("devices", devices)):
            if type(count) is not int or count < 1:
                raise CostError(f"{name} is a whole number of at least 1 (got {count!r:.40})")
        values = {name: getattr(self, name) for name in CUT}
        if self.unit is None:
            values |= {name: 1.0 for name in PASSES if values[name] is None}
        lists = {name: len(value) for name, value in values.items() if isinstance(value, tuple)}
        slices = next(iter(lists.values()), devices)
        for name, length in lists.items():
            if length != slices:
                first = next(iter(lists))
                raise CostError(f"{first} is given for {slices} slices of the model, but {name} for {length}")
        if slices == stages:
            return self
        changed: dict[str, PerStage | None] = {}
        for name, value in values.items():
            if isinstance(value, tuple):
                total = np.interp(
                    np.linspace(0, 1, stages + 1), np.linspace(0, 1, slices + 1), [0.0, *np.cumsum(value)]
                )
                changed[name] = tuple(np.diff(total).tolist())
            elif value is not None:
                changed[name] = value * slices / stages
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
        for key in self.links:
            for device in link_ends(key):
                if device >= devices:
                    raise CostError(f'link "{key}" names device {device}, but there are only {devices} devices')

    def validate_passes(self, *, stages: int) -> None:
        """Raise CostError if a part of a pass takes longer than the whole."""
        times = {name: self.per_stage(name, stages=stages) for name in ("F", "B", "FB", "BW")}
        for name, of in (("BW", "B"), ("BW", "FB"), ("F", "FB"), ("B", "FB")):
            part, whole = times[name], times[of]
            exceeds = part > whole * (1 + 1e-9)  # sums of equal times differ in their last bits
            if exceeds.any():
                stage = int(exceeds.argmax())
                raise CostError(
                    f"{name} is a part of {of}, but exceeds it on stage {stage} ({part[stage]:g} > {whole[stage]:g})"
                )


def costs_or_default(costs: Costs | None) -> Costs:
    """Return costs, or the default table for None; raise CostError if they are no `Costs`."""
    if costs is not None and not isinstance(costs, Costs):
        raise CostError(f"costs are a stretto.Costs, e.g. Costs(F=1, I=1, W=1), or None (got {costs!r:.40})")
    return costs or Costs()


def family(name: str) -> str:
    """Return a call's name without the number at its end; calls of one family share a time.

    >>> family("load12"), family("7")
    ('load', '7')
    """
    return name.rstrip("0123456789") or name


def _spread(name: str, value: PerStage, count: int, what: str) -> NDArray[np.float64]:
    if isinstance(value, tuple) and len(value) != count:
        way = "" if what != "stages" else "; Costs.for_stages() cuts costs anew" if name in CUT else "; give one number"
        raise CostError(f"{name} has {len(value)} entries, but the plan has {count} {what}{way}")
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
