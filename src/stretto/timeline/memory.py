"""What each device holds, from a stage's forward to its weight part."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.costs import Costs
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, FORWARDS, WEIGHTS, Kind
from stretto.program.work import Ints, stable_order

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
    """What every device holds. Compute is in order, so this is known without times; then they are all 0."""
    stages = program.placement.stages
    task = np.flatnonzero(program.compute)
    device = program.device[task]
    order = stable_order(device, program.devices)
    task, device = task[order], device[order]
    stage, back_stage = program.work.stage[task], program.work.backward[0][task]
    forward, backward, weight = (
        program.work.among(kinds)[task].astype(np.int64) for kinds in (FORWARDS, BACKWARDS, WEIGHTS)
    )
    frees = backward if backward.any() else forward  # nothing is kept when no backward will come

    def events(at_start: Floats | Ints, at_end: Floats | Ints) -> Floats:
        return np.stack((at_start, at_end), axis=1).astype(np.float64).ravel()

    held = events(forward, -frees)
    owed = events(0 * stage, backward - weight)
    size = costs.per_stage("activation_bytes", stages=stages)
    size_owed = costs.per_stage("pending_bytes", stages=stages)
    changed = events(
        forward * size[stage],
        -frees * size[back_stage] + backward * size_owed[back_stage] - weight * size_owed[stage],
    )
    if start is None or end is None:
        when = np.zeros(2 * len(task))
        instant = costs.per_stage("BW", stages=stages)[stage] == 0
    else:
        when = events(start[task], end[task])
        instant = start[task] == end[task]
    # A WGRAD that takes no time ends with the backward before it: the state between the two is none.
    lasts = events(forward, backward + weight + frees) > 0  # only what changes something
    fused = np.flatnonzero(instant & (program.work.kind[task] == Kind.WGRAD))
    fused = fused[device[fused] == device[fused - 1]]
    lasts[2 * fused - 1] = False
    fixed = _parameters(program, costs)
    counts_bytes = costs.activation_bytes is not None or bool(size_owed.any()) or bool(fixed.any())
    bounds = 2 * np.searchsorted(device, np.arange(program.devices + 1))
    devices = []
    for device_bytes, a, b in zip(fixed, bounds[:-1], bounds[1:], strict=True):
        kept = lasts[a:b]
        devices.append(
            DeviceMemory(
                time=when[a:b][kept],
                activations=np.cumsum(held[a:b]).astype(np.int64)[kept],
                pending=np.cumsum(owed[a:b]).astype(np.int64)[kept],
                bytes=device_bytes + np.cumsum(changed[a:b])[kept] if counts_bytes else None,
                task=np.repeat(task[a // 2 : b // 2], 2)[kept],
            )
        )
    return devices


def _parameters(program: Program, costs: Costs) -> Floats:
    size = costs.per_stage("parameter_bytes", stages=program.placement.stages)
    homes = {(device, stage) for route in program.placement.routes for stage, device in enumerate(route)}
    total = np.zeros(program.devices)
    for device, stage in sorted(homes):
        total[device] += size[stage]
    return total
