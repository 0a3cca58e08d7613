"""Chooses by simulation how much of each stage's activations to offload."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from stretto.choose.choice import DeviceChoice, MemoryChoice, StageChoice, percent_text
from stretto.costs import Costs, Link, costs_or_default
from stretto.costs.parts import PASSES
from stretto.ir.errors import CostError, PlanError, TextError
from stretto.ir.plan import Plan
from stretto.ir.units import bytes_text, parse_bytes
from stretto.layers import Layer
from stretto.memory import Memory, host_buffer_bytes, memory_of
from stretto.program.columns import Bools, Ints
from stretto.program.lower import lower
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.simulate import simulate
from stretto.timeline import Timeline
from stretto.timeline.memory import Floats

_STEPS = 200  # how finely fractions are searched: few enough for a handful of simulations
_ROUNDING = 1e-9  # times that are equal but for their last bits
_NOTHING = "nothing of it may leave (tensors under min_bytes stay)"
_LEAST = 0.01  # of a device's peak: what copies must gain, since they take some of its memory bandwidth


def choose_memory(
    plan: Plan,
    costs: Costs,
    *,
    layers: Sequence[Sequence[Layer]] | None = None,
    ties: Sequence[Sequence[int]] = (),
    experts: Sequence[int] | None = None,
    recompute: bool = False,
    wgrad_microbatches: int = 1,
    memory: Memory | Literal["auto"] = "auto",
    limit: float | str | None = None,
    slower: float = 0.01,
) -> MemoryChoice:
    """Choose how much of each stage's activations to offload: as much as hides behind a simulated step.

    A step with the chosen policy takes at most `slower` times longer than one without offload, in simulation. Every
    copy of a stage's pass gets the same number of bytes, or all that the pass has if that is less. With a `limit`, in
    bytes for each device ("60GB"), only as much leaves as that takes: activations that wait longest for their backward
    first. PlanError if what hides is too little for the limit.

    The costs must have `activation_bytes` and the bandwidth of `host`. `offload_bytes` is the most that may leave of a
    pass; unless given, all that is not recomputed. `MemoryReport.costs` adds what a dry run has counted.

    `memory` is the policy whose `fraction` is chosen; "auto" offloads all sites. The bytes in the costs are those of
    passes under this policy.
    `layers`, `ties`, `experts`, `recompute` and `wgrad_microbatches` are as in `lower`.

    >>> from stretto import Costs, choose_memory
    >>> from stretto.costs import Link
    >>> from stretto.schedules import one_f_one_b
    >>> costs = Costs(unit="s", F=0.01, I=0.01, W=0.01, activation_bytes=1e9, host=Link(bandwidth=50e9))
    >>> choose_memory(one_f_one_b(devices=4, microbatches=16), costs).memory.fraction
    (0.52, 0.0, 0.0, 0.0)
    """
    costs, memory, limit = _valid_costs(costs), memory_of(memory), _bytes_of(limit)
    _validate(memory, slower)

    def lowered(offload: int) -> Program:
        return lower(
            plan,
            layers=layers,
            ties=ties,
            experts=experts,
            costs=costs,
            offload=offload,
            recompute=recompute,
            wgrad_microbatches=wgrad_microbatches,
        )

    without = _run(lowered(0), costs)
    search = _Search(lowered(memory.copy_actions), costs, without, limit, slower, memory.host_bytes)
    return _choice(search, memory, *search.result())


@dataclass(frozen=True, slots=True)
class _Run:
    """A simulated step: its timeline, its time, and each device's peak in bytes."""

    timeline: Timeline
    time: float
    peaks: Floats


def _run(program: Program, costs: Costs) -> _Run:
    timeline = simulate(program, costs)
    peaks = [device.peak_bytes or 0.0 for device in timeline.memory(costs)]
    return _Run(timeline, timeline.makespan, np.array(peaks))


class _Search:
    """Searches for the fraction of each stage that is to leave."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        without: _Run,
        limit: float | None,
        slower: float,
        host_limit: int | None,
    ) -> None:
        """`program` offloads; `without` is a step of the same plan that does not."""
        self.program, self.costs, self.without, self.limit, self.slower = program, costs, without, limit, slower
        self._host_limit, self._is_full = host_limit, False
        self.may_leave = costs.leaving_bytes(stages=self.stages, recompute=program.recomputes)
        self._runs: dict[tuple[float, ...], _Run] = {}

    @property
    def stages(self) -> int:
        return self.program.placement.stages

    @cached_property
    def passes(self) -> Ints:
        """For each device and stage, the passes that the program offloads."""
        passes = np.zeros((self.program.devices, self.stages), dtype=np.int64)
        tasks = np.flatnonzero(self.program.work.kind == Kind.OFFLOAD)
        np.add.at(passes, (self.program.device[tasks], self.program.work.stage[tasks]), 1)
        return passes

    @property
    def _can_leave(self) -> Bools:
        """Which stages have passes that may leave."""
        can: Bools = self.passes.any(0) & (self.may_leave > 0)
        return can

    @cached_property
    def _at_once(self) -> _Run:
        """The best that can be: all that may leave does, and copies take no time."""
        return self._run_of(msgspec.structs.replace(self.costs, host=Link()), self._can_leave.astype(np.float64))

    @cached_property
    def held(self) -> Floats:
        """For each stage, the mean time from the end of a forward to the start of its backward, without offload."""
        timeline = self.without.timeline
        tables = timeline.program.tables
        forward, backward = tables.results[:-1], tables.back_starts[:-1]
        found = (forward >= 0) & (backward >= 0)
        time = np.where(found, timeline.start[backward] - timeline.end[forward], 0.0)
        mean: Floats = time.sum(1) / np.maximum(1, found.sum(1))
        return mean

    def run(self, fractions: Floats) -> _Run:
        """Simulate a step in which these fractions leave."""
        if not fractions.any():
            return self.without
        key = tuple(fractions.tolist())
        if key not in self._runs:
            self._runs[key] = self._run_of(self.costs, fractions)
        return self._runs[key]

    def host(self, fractions: Floats) -> Floats:
        """Return the bytes of each device's host buffers if these fractions leave."""
        sizes = [host_buffer_bytes(leaves) for leaves in (fractions * self.may_leave).tolist()]
        stages_of = (self.program.host_buffers(device).values() for device in range(self.program.devices))
        return np.array([float(sum(sizes[stage] for stage in stages)) for stages in stages_of])

    def _fits(self, fractions: Floats) -> bool:
        return self._host_limit is None or bool((self.host(fractions) <= self._host_limit).all())

    def _run_of(self, costs: Costs, fractions: Floats) -> _Run:
        leaving = tuple((fractions * self.may_leave).tolist())
        return _run(self.program, msgspec.structs.replace(costs, offload_bytes=leaving))

    def result(self) -> tuple[Floats, list[str]]:
        """Return the fraction of each stage, and why it is that."""
        if self.limit is not None and self._is_within(self.without):
            return np.zeros(self.stages), ["every device is within the limit without offload"] * self.stages
        can = self._can_leave
        gains = can & self._on(self._falls(self._at_once))
        wanted = gains if self.limit is None else gains & self._on(self.without.peaks > self.limit)
        hiding = self._hiding(wanted)
        useless = (hiding > 0) & ~self._on(self._falls(self.run(hiding)))
        if self._hides(self.run(fewer := np.where(useless, 0.0, hiding))):
            hiding, gains = fewer, gains & ~useless
        fractions = hiding if self.limit is None else self._needed(hiding)

        def why(stage: int) -> str:
            if not can[stage]:
                return "needed again too soon to leave" if self.may_leave[stage] else _NOTHING
            if not gains[stage]:
                least = "stay" if self.limit is not None else f"fall by less than {_LEAST:.0%}"
                return f"nothing to gain: its device's peak would {least}"
            if not wanted[stage]:
                return "limit reached without it: its device holds less"
            if fractions[stage] < hiding[stage]:
                return "limit reached" if fractions[stage] else "limit reached with stages that are held longer"
            if hiding[stage] == 1:
                return "hides behind compute"
            return (
                "more would not fit: host_bytes" if self._is_full else "more would not hide: the step would take longer"
            )

        return fractions, list(map(why, range(self.stages)))

    def _hiding(self, gains: Bools) -> Floats:
        """Return the largest fractions of these stages that hide and fit host memory, with the same bytes in every
        copy.
        """
        largest = self.may_leave.max(initial=0.0, where=gains)

        def fractions(step: int) -> Floats:
            share = np.divide(largest * step / _STEPS, self.may_leave, out=np.zeros(self.stages), where=gains)
            return _rounded_down(np.minimum(1.0, share))

        steps = _STEPS if gains.any() else 0
        fit = _largest(steps, lambda step: self._fits(fractions(step)))
        most = _largest(fit, lambda step: self._hides(self.run(fractions(step))))
        self._is_full = most == fit < steps
        return fractions(most)

    def _needed(self, hiding: Floats) -> Floats:
        """Return the smallest of these fractions with which every device is within the limit. Of a device's stages,
        those whose activations are held longest leave first, each as far as it hides before the next.
        """
        if not self._is_within(most := self.run(hiding)):
            raise PlanError(self._too_much(most))
        limit, leaves = self.limit, (self.passes > 0) & (hiding > 0)
        assert limit is not None
        order = np.argsort(-self.held, kind="stable")
        rank = np.zeros(leaves.shape, dtype=np.int64)  # how many of a device's stages leave before each
        rank[:, order] = np.cumsum(leaves[:, order], axis=1) - leaves[:, order]
        counts = leaves.sum(1)

        def fractions(spared: Ints) -> Floats:
            steps = np.clip(_STEPS * (counts[:, None] - rank) - spared[:, None], 0, _STEPS)
            return _rounded_down(hiding * np.where(leaves, steps, 0).max(0) / _STEPS)

        # All devices are searched at once, since a device's peak depends on what leaves from it.
        good, bad = np.zeros_like(counts), _STEPS * counts + 1
        while (bad - good > 1).any():
            middle = (good + bad) // 2
            within = self.run(fractions(middle)).peaks <= limit
            good, bad = np.where(within, middle, good), np.where(within, bad, middle)

        def suffices(share: int) -> bool:
            run = self.run(fractions(good * share // _STEPS))
            return self._is_within(run) and self._hides(run)

        # Not quite, though: where one device's copies move another's passes, less is spared on all of them.
        return fractions(good * _largest(_STEPS, suffices) // _STEPS)

    def _hides(self, run: _Run) -> bool:
        return run.time <= self.without.time * (1 + self.slower) * (1 + _ROUNDING)

    def _falls(self, run: _Run) -> Bools:
        """Return which devices have a lower peak than without offload: by enough, or with a limit, by anything."""
        falls: Bools = run.peaks < self.without.peaks * (1 - (_LEAST if self.limit is None else _ROUNDING))
        return falls

    def _is_within(self, run: _Run) -> bool:
        return self.limit is not None and bool((run.peaks <= self.limit).all())

    def _on(self, devices: Bools) -> Bools:
        """Return which stages have passes that leave from one of these devices."""
        leaves: Bools = self.passes[devices].sum(0) > 0
        return leaves

    def _too_much(self, run: _Run) -> str:
        assert self.limit is not None
        way = "recompute something"
        if not self._can_leave.any():
            said = ""
        elif not self._is_within(most := self.run(self._can_leave.astype(np.float64))):
            run, said = most, "with all offloaded that may leave, "
        else:
            which = "that host_bytes allows" if self._is_full else "that hides"
            said = f"with all offloaded {which}, "
            if not self._is_full:
                way += (
                    f", or let the step become more than {percent_text(self.slower)} longer (slower of choose_memory)"
                )
        device = int(run.peaks.argmax())
        peak, before = float(run.peaks[device]), float(self.without.peaks[device])
        end = f" ({bytes_text(before)} without offload)" if said else ", and nothing may leave"
        return (
            f"{said}device {self.program.placement.device_name(device)} holds {bytes_text(peak)}{end}, "
            f"{bytes_text(peak - self.limit)} more than the limit of {bytes_text(self.limit)}; {way}"
        )


def _largest(most: int, is_good: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to `most` that is good, if all below a good one are; 0 counts as good."""
    if not most or is_good(most):
        return most
    good, bad = 0, most
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if is_good(middle) else (good, middle)
    return good


def _rounded_down(fractions: Floats) -> Floats:
    rounded: Floats = np.floor(fractions * 1000 + _ROUNDING) / 1000
    return rounded


def _choice(search: _Search, memory: Memory, fractions: Floats, why: Sequence[str]) -> MemoryChoice:
    run, leaves, program = search.run(fractions), fractions * search.may_leave, search.program
    stages = zip(search.held.tolist(), search.may_leave.tolist(), leaves.tolist(), fractions.tolist(), why, strict=True)
    link = np.full(program.devices, run.time * search.costs.host.bandwidth)
    columns = (search.without.peaks, run.peaks, search.passes @ leaves, link, search.host(fractions))
    devices = zip(*(column.tolist() for column in columns), strict=True)
    return MemoryChoice(
        memory=_policy(memory, tuple(fractions.tolist())),
        step_before=search.without.time,
        step_after=run.time,
        unit=search.costs.unit,
        slower=search.slower,
        limit=search.limit,
        stages=tuple(StageChoice(stage, *row) for stage, row in enumerate(stages)),
        devices=tuple(DeviceChoice(device, *row) for device, row in enumerate(devices)),
    )


def _policy(memory: Memory, fractions: tuple[float, ...]) -> Memory:
    if any(fractions):
        return msgspec.structs.replace(memory, fraction=fractions)
    does_more = any(action not in ("keep", "offload") for action in memory.patterns.values())
    return msgspec.structs.replace(memory, fraction=0.0) if does_more else Memory()


def _valid_costs(given: Costs | None) -> Costs:
    """Raise CostError unless the costs have what a choice needs."""
    costs = costs_or_default(given)
    if costs.activation_bytes is None:
        lacking = "there are no costs" if given is None else "the costs have no activation_bytes"
        raise CostError(
            f"{lacking} to choose by; with a recorded step's timeline, "
            "pipe.dry_run(inputs, targets).costs(stretto.fit(timeline), host=stretto.costs.Link(bandwidth=50e9)) "
            "makes costs with all that a choice needs (costs=, on every rank)"
        )
    if math.isinf(costs.host.bandwidth):
        raise CostError(
            "the costs have no bandwidth to host memory; give host=stretto.costs.Link(bandwidth=50e9), or [host] with "
            "bandwidth in a file, in bytes per unit of time in each direction (measure it: fit cannot tell)"
        )
    if not costs.phases and all(getattr(costs, name) is None for name in (*PASSES, "B", "FB")):
        raise CostError(
            "the costs have no times, so nothing says what hides; stretto.fit(timeline) of a recorded step has them, "
            "or give F, I and W"
        )
    return costs


def _validate(memory: Memory, slower: float) -> None:
    if not memory.names_offload:
        raise PlanError(
            'the policy offloads nothing, so there is nothing to choose; "auto" offloads all sites (got '
            f"{memory.patterns!r:.60})"
        )
    if memory.max_in_flight is not None:
        raise PlanError("max_in_flight bounds what leaves, and so does a fraction that is chosen; leave it out")
    if type(slower) not in (int, float) or not 0 <= slower <= sys.float_info.max:
        raise PlanError(f"slower is a share of the step, such as 0.01 for 1 % (got {slower!r:.40})")


def _bytes_of(limit: float | str | None) -> float | None:
    if isinstance(limit, str):
        try:
            limit = parse_bytes(limit)
        except TextError as error:
            raise PlanError(f"limit: {error}") from None
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit <= sys.float_info.max):
        raise PlanError(f"limit is a number of bytes, or a size such as 60GB (got {limit!r:.40})")
    return limit
