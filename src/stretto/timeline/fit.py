"""Fit costs to measured timelines."""

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.costs import Costs, Link, PerStage, PhaseTimes, WovenTimes, family
from stretto.ir.errors import CostError
from stretto.program.columns import Bools, Ints, TaskColumns, grouped
from stretto.program.graph import leaders
from stretto.program.sums import reduces
from stretto.program.task import BACKWARDS, COPIES, EXPERT_SUM, FORWARDS, SENDS, WEIGHTS, Kind
from stretto.timeline.memory import Floats
from stretto.timeline.timeline import Timeline

_STALL = 5.0
"""A time of more than so many medians of the same device is a stall, such as that of a host that had something else to
do."""
_Samples = dict[tuple[str, bool], dict[str, list[Floats]]]
"""The times of a phase, by its key and whether it was in a pair, then by F, I, W and R."""


def fit(timeline: Timeline, *more: Timeline) -> Costs:
    """Fit costs to timelines of one model: the usual time of each kind of task over microbatches, per stage or per
    phase. That is the mean, without stalls: times of more than five times the median on their device, or link.

    A phase has one time in pairs (`Costs.woven`) and one outside of them (`Costs.phases`); if the timelines have it in
    only one of these places, it takes the same time in the other. So to compare plans with pairs to plans without, fit
    a timeline of each together. Their plans and devices may differ.

    Times that the plan does not separate are split: a full backward without its own weight part is half I, half W.
    All transfers share one latency, the usual one of their times from when both ends were ready, and so do all copies
    to and from host memory. Sums over devices, and
    exchanges between expert-parallel ranks, are timed the same way. Loads of ranks are not fitted. In a user's own
    program, calls whose names differ only by a number share one time.

    >>> from stretto import simulate
    >>> from stretto.schedules import one_f_one_b
    >>> fit(simulate(one_f_one_b(devices=2, microbatches=4), Costs(F=(1, 2), I=3, W=1))).F
    (1.0, 2.0)
    """
    timelines = (timeline, *more)
    _validate(timelines)
    if timeline.program.is_own:
        return Costs(calls=_calls(timeline), unit=timeline.unit)
    costs = _passes(timelines) if timeline.program.anatomy.is_whole else _phases(timelines)
    reduce, experts, tied = _sums(timelines)
    return msgspec.structs.replace(
        costs,
        link=Link(latency=_transfer(timelines)),
        host=Link(latency=_copies(timelines)),
        reduce=reduce,
        reduce_experts=experts,
        reduce_tied=tied,
        unit=timeline.unit,
    )


def _validate(timelines: Sequence[Timeline]) -> None:
    """Raise CostError if these are not timelines of one model's training steps, or one of a user's own program."""
    for timeline in timelines:
        if not isinstance(timeline, Timeline):
            raise CostError(f"fit takes timelines, one or several: fit(first, second) (got {timeline!r:.40})")
        if timeline.program.is_update:
            raise CostError("a weight update has no costs of stages to be fitted")
    if not any(one.program.is_own or one.program.work.among((*BACKWARDS, Kind.PAIR)).any() for one in timelines):
        raise CostError("there are no backwards in the timeline to be fitted; record a step that trains")
    if len(timelines) == 1:
        return
    if any(timeline.program.is_own for timeline in timelines):
        raise CostError("a program of your own is fitted alone, not together with other timelines")
    if len({timeline.unit for timeline in timelines}) > 1:
        raise CostError("timelines in seconds are not fitted together with timelines without a unit")
    first, *others = (timeline.program.anatomy for timeline in timelines)
    for other in others:
        if first.is_whole != other.is_whole:
            raise CostError("timelines of phases are not fitted together with timelines of whole passes")
        differing = {*chain(*first.layers)} ^ {*chain(*other.layers)}
        if differing:
            layer = min(differing, key=lambda layer: layer.name)
            phases = ", ".join(phase.name for phase in layer.phases)
            raise CostError(f"timelines of different models: only some have layers {layer.name!r:.40} ({phases:.80})")
        counts = (first.wgrad_microbatches, other.wgrad_microbatches)
        if counts[0] != counts[1]:
            raise CostError(
                f"timelines that join weight gradients of {counts[0]} and of {counts[1]} microbatches are not fitted "
                "together: the gradients take different times"
            )


def _stages(timelines: Sequence[Timeline]) -> int:
    """Return how many stages the timelines have, for costs per stage."""
    stages = sorted({timeline.program.placement.stages for timeline in timelines})
    if len(stages) > 1:
        raise CostError(
            f"timelines with {stages[0]} and {stages[-1]} stages are not fitted together: whole passes, and sums of "
            "gradients, have times for each stage"
        )
    return stages[0]


def _lengths(timeline: Timeline) -> Floats:
    """Return each task's time. What expert-parallel ranks run together counts from when the last of them was ready."""
    program, length = timeline.program, timeline.end - timeline.start
    task = np.flatnonzero(program.exchanging)
    leader, ready, done = leaders(program)[task], timeline.start.copy(), timeline.end.copy()
    np.maximum.at(ready, leader, timeline.start[task])
    np.maximum.at(done, leader, timeline.end[task])
    length[task] = np.maximum(0.0, done[leader] - ready[leader])
    return length


def _passes(timelines: Sequence[Timeline]) -> Costs:
    stages = _stages(timelines)
    length = np.concatenate([_lengths(timeline) for timeline in timelines])
    device = np.concatenate([timeline.program.device for timeline in timelines])
    work = TaskColumns.joined((timeline.program.work for timeline in timelines), np.arange(len(length)))

    def usual(kinds: tuple[Kind, ...]) -> list[float | None]:
        chosen = work.among(kinds)
        return [_usual(length, device, chosen & (work.stage == stage)) for stage in range(stages)]

    rows = zip(*(usual((kind,)) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.WGRAD)), strict=True)
    table: dict[str, list[float]] = {name: [] for name in ("F", "B", "I", "W", "BW")}
    for f, b, i, w, wgrad in rows:
        later, half = wgrad or 0.0, (b or 0.0) / 2
        weights = w if w is not None else later or half
        inputs = i if i is not None else half if not later else b or 0.0
        whole = b + later if b is not None else inputs + weights
        later = min(later, whole)  # a few noisy times need not add up
        for name, value in zip(table, (f or 0.0, whole, inputs, weights, later), strict=True):
            table[name].append(value)
    costs: Costs = msgspec.convert(table, Costs)
    saved = _saved(work, length, device, costs, stages=stages)
    woven = [f + b - less for f, b, less in zip(table["F"], table["B"], saved, strict=True)]
    again = usual((Kind.RECOMPUTE,))
    recompute = tuple(r or 0.0 for r in again) if any(r is not None for r in again) else None
    return msgspec.structs.replace(costs, FB=tuple(woven), R=recompute)


def _saved(work: TaskColumns, length: Floats, device: Ints, costs: Costs, *, stages: int) -> list[float]:
    """Return the time that each stage's passes save by being woven, such that pairs take as long as measured.

    A pair takes at least as long as either of its passes, so no stage saves more than its shorter pass. If several
    solutions fit, choose the one in which stages save most nearly the same.
    """
    forward, whole, late = (costs.per_stage(name, stages=stages) for name in ("F", "B", "BW"))
    paired = work.kind == Kind.PAIR
    pairs = sorted({*zip(work.stage[paired].tolist(), work.stage_b[paired].tolist(), strict=True)})
    if not pairs:
        return [0.0] * stages
    halves, less = np.zeros((len(pairs), stages)), np.zeros(len(pairs))
    for row, (a, b) in enumerate(pairs):
        halves[row, a] += 0.5
        halves[row, b] += 0.5
        took = _usual(length, device, paired & (work.stage == a) & (work.stage_b == b)) or 0.0
        less[row] = forward[a] + whole[b] - late[b] - took
    savings: list[float] = _bounded(halves, less, np.minimum(forward, whole)).tolist()
    return savings


def _bounded(factors: NDArray[np.float64], totals: Floats, most: Floats) -> Floats:
    """Solve factors @ x = totals by least squares, with each x at most `most`, and else near their mean.

    Whatever would exceed its limit gets the limit, and the others are solved for again.
    """
    x, free = most.copy(), np.ones(len(most), dtype=np.bool_)
    while free.any():
        left = totals - factors[:, ~free] @ x[~free]
        shares = factors[:, free].sum(1)
        mean = float((left[shares > 0] / shares[shares > 0]).mean()) if (shares > 0).any() else 0.0
        x[free] = mean + np.linalg.lstsq(factors[:, free], left - mean * shares, rcond=None)[0]
        exceeding = free & (x > most)
        x[exceeding] = most[exceeding]
        free &= ~exceeding
        if not exceeding.any():
            break
    return x


def _phases(timelines: Sequence[Timeline]) -> Costs:
    """Return the usual times by layer and phase, alone and in pairs."""
    samples: _Samples = {}
    for timeline in timelines:
        _collect(samples, timeline)
    usual = {
        place: {name: time for name, times in kinds.items() if (time := _mean(np.concatenate(times))) is not None}
        for place, kinds in samples.items()
    }
    alone, woven = ({key: {**usual[key, not here], **usual[key, here]} for key, _ in usual} for here in (False, True))
    return Costs(
        phases={key: PhaseTimes(**times) for key, times in alone.items()},
        woven={key: WovenTimes(**times) for key, times in woven.items() if times != alone[key]},
    )


def _collect(samples: _Samples, timeline: Timeline) -> None:
    """Add a timeline's times of phases to the samples."""
    work, anatomy, length = timeline.program.work, timeline.program.anatomy, _lengths(timeline)
    forward, backward = [*chain(*anatomy.forward)], [*chain(*anatomy.backward)]
    weights = [backward[row] for row in anatomy.weight_needs]
    for name, kinds, parts, rows in (
        ("F", FORWARDS, forward, anatomy.forward_rows),
        ("I", BACKWARDS, backward, anatomy.backward_rows),
        ("W", WEIGHTS, weights, anatomy.weight_rows),
        ("R", (Kind.RECOMPUTE,), backward, anatomy.backward_rows),
    ):
        task = np.flatnonzero(work.among(kinds))
        row = rows[work.stage[task]] + work.part[task]
        order, start = grouped(2 * row + work.woven[task], 2 * len(parts))
        alike = np.split(task[order], start[1:-1])
        for number, part in enumerate(parts):
            for woven in (False, True):
                these = alike[2 * number + woven]
                kinds_of = samples.setdefault((f"{part.kind}.{part.phase.name}", woven), {})
                kinds_of.setdefault(name, []).append(_without_stalls(length[these], timeline.program.device[these]))


def _transfer(timelines: Sequence[Timeline]) -> float:
    return _mean(np.concatenate([_transfers(timeline) for timeline in timelines])) or 0.0


def _transfers(timeline: Timeline) -> Floats:
    """Return the time of each transfer, from when both ends were ready, without stalls."""
    program = timeline.program
    send = np.flatnonzero(program.work.among(SENDS) & (program.counterpart >= 0))
    receive = program.counterpart[send]
    ready = np.maximum(timeline.start[send], timeline.start[receive])
    taken: Floats = np.maximum(0.0, timeline.end[receive] - ready)
    return _without_stalls(taken, program.lane[send])


def _copies(timelines: Sequence[Timeline]) -> float:
    """Return the usual time of a copy to or from host memory, whatever its size."""
    times = []
    for timeline in timelines:
        copies = np.flatnonzero(timeline.program.work.among(COPIES))
        length, device = timeline.end - timeline.start, timeline.program.device
        times.append(_without_stalls(length[copies], device[copies]))
    return _mean(np.concatenate(times)) or 0.0


def _sums(timelines: Sequence[Timeline]) -> tuple[PerStage, PerStage, float]:
    """Return each stage's sum time, that of its experts, and that of tied weights: from when all ends were ready to the
    last end.
    """
    durations: dict[int, dict[int, list[float]]] = {part: {} for part in (0, EXPERT_SUM, 1)}
    for timeline in timelines:
        program = timeline.program
        for task in reduces(program.work).tolist():
            ends = program.ends(task)
            if task == min(ends):
                taken = float(timeline.end[ends].max() - timeline.start[ends].max())
                part = min(program.work.part.item(task), 1)  # all ties alike
                durations[part].setdefault(program.work.stage.item(task), []).append(taken)
    tied = [time for times in durations[1].values() for time in times]
    own, experts = (_summed(durations[part], timelines) for part in (0, EXPERT_SUM))
    return own, experts, max(0.0, _once(tied))


def _summed(durations: dict[int, list[float]], timelines: Sequence[Timeline]) -> PerStage:
    """Return the usual sum time of each stage; 0 if no sum takes any time."""
    usual = {stage: max(0.0, _once(times)) for stage, times in durations.items()}
    if not any(usual.values()):
        return 0.0
    return tuple(usual.get(stage, 0.0) for stage in range(_stages(timelines)))


def _calls(timeline: Timeline) -> dict[str, float]:
    program = timeline.program
    durations: dict[str, list[float]] = {}
    for task, part in enumerate(program.work.part.tolist()):
        ends = program.ends(task)
        if task == min(ends):
            taken = float(timeline.end[ends].max() - timeline.start[ends].max())
            durations.setdefault(family(program.anatomy.calls[part]), []).append(max(0.0, taken))
    return {name: _once(times) for name, times in durations.items()}


def _once(times: Sequence[float]) -> float:
    """Return the usual one of times that devices take together; 0 if there are none."""
    return _mean(_without_stalls(np.array(times), np.zeros(len(times), dtype=np.int64))) or 0.0


def _usual(length: Floats, device: Ints, chosen: Bools) -> float | None:
    """Return the mean of these tasks' times, without stalls; None if there are no tasks."""
    return _mean(_without_stalls(length[chosen], device[chosen]))


def _without_stalls(times: Floats, place: Ints) -> Floats:
    """Return the times that are no stalls. What is always slow in its place, on a device or a link, is none."""
    usual = np.ones(len(times), dtype=np.bool_)
    for one in np.unique(place):
        here = place == one
        median = float(np.median(times[here]))
        if median > 0:
            usual[here] = times[here] <= _STALL * median
    return times[usual]


def _mean(times: Floats) -> float | None:
    """Return the mean, which makes the sum of times come out right; None if there are none."""
    if not len(times):
        return None
    median = float(np.median(times))
    return median + float((times - median).mean())  # equal times are returned to the bit
