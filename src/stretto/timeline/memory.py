"""The memory that each device holds, from a stage's forward to its weight part."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.costs import Costs
from stretto.ir.errors import CostError
from stretto.program.columns import Bools, Ints, grouped
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, COPIES, FORWARDS, WEIGHTS, Kind

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """One device's memory after each change, in order.

    It changes when a compute or copy task starts or ends. Between a full backward and a weight part that
    takes no time, nothing is held.
    """

    time: Floats
    activations: Ints
    """Stage passes held from the start of F to the end of B or I, minus those offloaded to host memory."""
    pending: Ints
    """Stage passes held between I (or B's input part) and the end of the weight part."""
    bytes: Floats | None
    """All bytes held, including parameters; None if the costs name no bytes."""
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
        """The most stage passes held at once, from F to the weight part."""
        return int((self.activations + self.pending).max(initial=0))

    @property
    def peak_bytes(self) -> float | None:
        return None if self.bytes is None else float(self.bytes.max(initial=0.0))


def memory_over_time(program: Program, costs: Costs, start: Floats, end: Floats) -> list[DeviceMemory]:
    """Return what every device holds, given when each task starts and ends."""
    changes = Changes.of(program, costs)
    when = np.where(changes.is_end, end[changes.task], start[changes.task])
    instant = start[changes.task] == end[changes.task]
    return changes.summed(program, costs, when=when, order=when, instant=instant)


@dataclass(slots=True, eq=False)
class Changes:
    """Changes in the devices' memory: two for each task that is not a transfer, at its start and at its end, in issue
    order.
    """

    task: Ints
    device: Ints
    held: Ints
    """The change in activations."""
    pending: Ints
    """The change in stage passes that wait for their weight part."""
    size: Floats
    """The change in bytes."""
    change: Bools
    """Whether anything changes."""

    @staticmethod
    def of(program: Program, costs: Costs) -> "Changes":
        """Collect the changes that a program's tasks make.

        A forward's first part takes activation memory and the backward's last part frees it; from then to the last
        weight part the pass is pending. Without any backward, a forward's own last part frees its activations.
        """
        costs.validate(stages=program.placement.stages, devices=program.devices, recompute=program.recomputes)
        work = program.work
        task = np.flatnonzero(~program.moving)
        count = len(task)
        changes = Changes(
            task=np.repeat(task, 2),
            device=np.repeat(program.device[task], 2),
            held=np.zeros(2 * count, dtype=np.int64),
            pending=np.zeros(2 * count, dtype=np.int64),
            size=np.zeros(2 * count),
            change=np.zeros(2 * count, dtype=np.bool_),
        )
        stage, back_stage, part = (column[task] for column in (work.stage, work.backward[0], work.part))
        anatomy = program.anatomy
        last, last_back, last_weight = (
            np.diff(rows) - 1 for rows in (anatomy.forward_rows, anatomy.backward_rows, anatomy.weight_rows)
        )
        forward, backward, weight = (work.among(kinds)[task] for kinds in (FORWARDS, BACKWARDS, WEIGHTS))
        takes = np.flatnonzero(forward & (part == 0))
        gives = np.flatnonzero(backward & (part == last_back[back_stage]))
        ends = gives if backward.any() else np.flatnonzero(forward & (part == last[stage]))
        settles = np.flatnonzero(weight & (part == last_weight[stage]))
        size, pending_size = (
            costs.per_stage(name, stages=program.placement.stages) for name in ("activation_bytes", "pending_bytes")
        )
        changes.add(2 * takes, held=1, size=size[stage[takes]])
        changes.add(2 * ends + 1, held=-1, size=-size[back_stage[ends]])
        changes.add(2 * gives + 1, pending=1, size=pending_size[back_stage[gives]])
        changes.add(2 * settles + 1, pending=-1, size=-pending_size[stage[settles]])
        if work.among(COPIES).any():
            changes.add_copies(program, costs)
        if program.recomputes:
            changes.add_recomputing(program, costs)
        return changes

    @property
    def is_end(self) -> Bools:
        is_end: Bools = np.arange(len(self.task)) % 2 == 1
        return is_end

    def summed(
        self, program: Program, costs: Costs, *, when: Floats, order: Ints | Floats, instant: Bools
    ) -> list[DeviceMemory]:
        """Sum the changes of each device in the given order. `when` is the time to report for each change, and
        `instant` marks the changes of tasks that take no time.
        """
        fixed = _parameters(program, costs)
        counts_bytes = costs.activation_bytes is not None or bool(costs.pending_bytes) or bool(fixed.any())
        kept = self.change & ~_fused(program, self, instant)
        by_device = np.lexsort((order, self.device))
        bounds = np.searchsorted(self.device[by_device], np.arange(program.devices + 1))
        devices = []
        for device_bytes, first, end in zip(fixed, bounds[:-1], bounds[1:], strict=True):
            at = by_device[first:end]
            shown = kept[at]
            devices.append(
                DeviceMemory(
                    time=when[at][shown],
                    activations=np.cumsum(self.held[at])[shown],
                    pending=np.cumsum(self.pending[at])[shown],
                    bytes=device_bytes + np.cumsum(self.size[at])[shown] if counts_bytes else None,
                    task=self.task[at][shown],
                )
            )
        return devices

    def add(self, event: Ints, *, held: int = 0, pending: int = 0, size: Floats) -> None:
        self.held[event] += held
        self.pending[event] += pending
        self.size[event] += size
        self.change[event] = True

    def add_copies(self, program: Program, costs: Costs) -> None:
        """Hold an offloaded pass until its copy out ends, and again from when its copy back starts."""
        size = costs.leaving_bytes(stages=program.placement.stages, recompute=program.recomputes)
        kind, stage = program.work.kind[self.task], program.work.stage[self.task]
        leaves = (size[stage] > 0) | (costs.activation_bytes is None)  # else the pass stays, and copies are empty
        out = np.flatnonzero((kind == Kind.OFFLOAD) & self.is_end & leaves)
        back = np.flatnonzero((kind == Kind.ONLOAD) & ~self.is_end & leaves)
        self.add(out, held=-1, size=-size[stage[out]])
        self.add(back, held=1, size=size[stage[back]])

    def add_recomputing(self, program: Program, costs: Costs) -> None:
        """Free what is recomputed after the forward, and hold it again part by part during the backward."""
        if costs.activation_bytes is not None and costs.recompute_bytes is None:
            raise CostError("the program recomputes; say how much of activation_bytes that spares: recompute_bytes")
        size = costs.per_stage("recompute_bytes", stages=program.placement.stages)
        tables = program.tables
        parts = np.array([len(steps) for steps in program.anatomy.weight_steps])
        at = np.full(len(program), -1)  # the first event of each task
        at[self.task[::2]] = np.arange(0, len(self.task), 2)
        for table, end in ((tables.recompute, 0), (tables.backward, 1)):
            task = table[(tables.recompute >= 0) & (table >= 0)]
            stage = program.work.backward[0][task]
            self.add(at[task] + end, size=(size / parts)[stage] * (-1 if end else 1))
        recomputed = tables.first_compute(tables.recompute) >= 0
        given_up, taken_back = tables.results[recomputed], tables.back_results[recomputed]
        for task, sign in ((given_up[given_up >= 0], -1), (taken_back[taken_back >= 0], 1)):
            stage = program.work.stage[task] if sign < 0 else program.work.backward[0][task]
            self.add(at[task] + 1, size=sign * size[stage])


def _fused(program: Program, changes: Changes, instant: Bools) -> Bools:
    """Mark the end of each full backward whose WGRAD comes next and takes no time: both end at once, and nothing is
    held in between.
    """
    fused = np.zeros(len(changes.task), dtype=np.bool_)
    if program.anatomy.is_whole:
        whole = program.work.among((Kind.B, Kind.PAIR))
        backward = program.tables.back_starts
        weight = changes.task[~changes.is_end & instant & (program.work.kind[changes.task] == Kind.WGRAD)]
        before = backward[program.work.stage[weight], program.work.microbatch[weight]]
        by_lane, _ = grouped(program.lane, len(program.lanes))
        next_ = np.full(len(program), -1)
        next_[by_lane[:-1]] = by_lane[1:]
        before = before[(before >= 0) & whole[before] & (next_[before] == weight)]
        at = np.searchsorted(changes.task, before)
        fused[at + 1] = True
    return fused


def _parameters(program: Program, costs: Costs) -> Floats:
    size = costs.per_stage("parameter_bytes", stages=program.placement.stages)
    total = np.zeros(program.devices)
    for device, stage in sorted(program.placement.homes):
        total[device] += size[stage]
    return total
