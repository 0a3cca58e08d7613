"""What each device holds, from a stage's forward to its weight part."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.costs import Costs
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, FORWARDS, WEIGHTS, Kind
from stretto.program.work import Bools, Ints, stable_order

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """One device's holdings after each change, in order.

    They change when a compute task starts or ends. Between a full backward and a weight part that
    takes no time nothing is held.
    """

    time: Floats
    activations: Ints
    """Stage passes held from the start of F to the end of B or I."""
    pending: Ints
    """Stage passes held between I (or B's input part) and the end of the weight part."""
    bytes: Floats | None
    """All held bytes, parameters included; None where the costs name no bytes."""
    task: Ints
    """The task whose start or end made each change."""

    @property
    def peak_activations(self) -> int:
        return int(self.activations.max(initial=0))

    @property
    def peak_pending(self) -> int:
        return int(self.pending.max(initial=0))

    @property
    def peak_live(self) -> int:
        """Stage passes held at once from F to the weight part."""
        return int((self.activations + self.pending).max(initial=0))

    @property
    def peak_bytes(self) -> float | None:
        return None if self.bytes is None else float(self.bytes.max(initial=0.0))


def memory_in_order(
    program: Program, costs: Costs, start: Floats | None = None, end: Floats | None = None
) -> list[DeviceMemory]:
    """What every device holds. The order of compute alone tells; without times they are all 0."""
    events = _Events.of(program, costs)
    fixed = _parameters(program, costs)
    counts_bytes = costs.activation_bytes is not None or bool(costs.pending_bytes) or bool(fixed.any())
    if start is None or end is None:
        when = np.zeros(len(events.task))
        late = costs.per_stage("BW", stages=program.placement.stages)
        instant = late[program.work.stage[events.task]] == 0
    else:
        when = np.where(np.arange(len(events.task)) % 2, end[events.task], start[events.task])
        instant = start[events.task] == end[events.task]
    kept = events.change & ~_fused(program, events, instant)
    order = np.lexsort((when, events.device))  # where lanes run beside each other; otherwise as it is
    devices = []
    bounds = np.searchsorted(events.device, np.arange(program.devices + 1))
    for device_bytes, a, b in zip(fixed, bounds[:-1], bounds[1:], strict=True):
        here = order[a:b]
        shown = kept[here]
        devices.append(
            DeviceMemory(
                time=when[here][shown],
                activations=np.cumsum(events.held[here])[shown],
                pending=np.cumsum(events.owed[here])[shown],
                bytes=device_bytes + np.cumsum(events.size[here])[shown] if counts_bytes else None,
                task=events.task[here][shown],
            )
        )
    return devices


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """Two for each task that is no transfer, its start and its end; by device, in issue order."""

    task: Ints
    device: Ints
    held: Ints
    """The change in activations, in what waits for a weight part, and in bytes."""
    owed: Ints
    size: Floats
    change: Bools
    """Whether there is any."""

    @staticmethod
    def of(program: Program, costs: Costs) -> "_Events":
        task = np.flatnonzero(~program.moving)
        device = program.device[task]
        order = stable_order(device, program.devices)
        task, device = task[order], device[order]
        stage, back_stage, part = (
            column[task] for column in (program.work.stage, program.work.backward[0], program.work.part)
        )
        last, last_weight = (np.diff(rows) - 1 for rows in (program.anatomy.pass_rows, program.anatomy.weight_rows))
        forward, backward, weight = (
            program.work.among(kinds)[task].astype(np.int64) for kinds in (FORWARDS, BACKWARDS, WEIGHTS)
        )
        # A forward's first part takes memory, a backward's last part gives it back; what is then owed, the last
        # weight part settles. When no backward will come, a forward keeps nothing beyond its own last part.
        takes, gives = forward * (part == 0), backward * (part == last[back_stage])
        settles = weight * (part == last_weight[stage])
        ends = gives if backward.any() else forward * (part == last[stage])
        size, size_owed = (
            costs.per_stage(name, stages=program.placement.stages) for name in ("activation_bytes", "pending_bytes")
        )
        return _Events(
            task=np.repeat(task, 2),
            device=np.repeat(device, 2),
            held=_both(takes, -ends),
            owed=_both(0 * takes, gives - settles),
            size=_both(
                takes * size[stage],
                gives * size_owed[back_stage] - ends * size[back_stage] - settles * size_owed[stage],
            ),
            change=_both(takes, ends + settles) > 0,
        )


def _both(at_start: NDArray[Any], at_end: NDArray[Any]) -> NDArray[Any]:
    return np.stack((at_start, at_end), axis=1).ravel()


def _fused(program: Program, events: _Events, instant: Bools) -> Bools:
    """The end of a full backward whose WGRAD takes no time: both end at once, with nothing held between."""
    fused = np.zeros(len(events.task), dtype=np.bool_)
    if program.anatomy.is_whole:
        begins = np.arange(len(events.task)) % 2 == 0
        at = np.flatnonzero(begins & instant & (program.work.kind[events.task] == Kind.WGRAD))
        fused[at[events.device[at] == events.device[at - 1]] - 1] = True
    return fused


def _parameters(program: Program, costs: Costs) -> Floats:
    size = costs.per_stage("parameter_bytes", stages=program.placement.stages)
    homes = {(device, stage) for route in program.placement.routes for stage, device in enumerate(route)}
    total = np.zeros(program.devices)
    for device, stage in sorted(homes):
        total[device] += size[stage]
    return total
