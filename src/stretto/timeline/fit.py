"""Fit costs to a measured timeline."""

import msgspec
import numpy as np

from stretto.costs import Costs, Link, PerStage, PhaseTimes, family
from stretto.ir.errors import CostError
from stretto.program.columns import Bools
from stretto.program.graph import leaders
from stretto.program.program import Program
from stretto.program.sums import reduces
from stretto.program.task import BACKWARDS, EXPERT_SUM, FORWARDS, SENDS, WEIGHTS, Kind
from stretto.timeline.memory import Floats
from stretto.timeline.timeline import Timeline


def fit(timeline: Timeline) -> Costs:
    """Fit costs to a timeline: the median time of each kind of task over microbatches, per stage or per phase.

    Times that the plan does not separate are split: a full backward without its own weight part is half I, half W.
    All transfers share one latency, the median of their times from when both ends were ready. Sums over devices, and
    exchanges between expert-parallel ranks, are timed the same way. Loads of ranks are not fitted. In a user's own
    program, calls whose names differ only by a number share one time.

    >>> from stretto import simulate
    >>> from stretto.schedules import one_f_one_b
    >>> fit(simulate(one_f_one_b(devices=2, microbatches=4), Costs(F=(1, 2), I=3, W=1))).F
    (1.0, 2.0)
    """
    program = timeline.program
    if program.is_update:
        raise CostError("a weight update has no costs of stages to be fitted")
    if program.is_own:
        return Costs(calls=_calls(timeline), unit=timeline.unit)
    length = _lengths(timeline)
    link = Link(latency=_transfer(timeline))
    reduce, experts, tied = _sums(timeline)
    costs = _passes(program, length) if program.anatomy.is_whole else Costs(phases=_phases(program, length))
    return msgspec.structs.replace(
        costs, link=link, reduce=reduce, reduce_experts=experts, reduce_tied=tied, unit=timeline.unit
    )


def _lengths(timeline: Timeline) -> Floats:
    """Return each task's time. What expert-parallel ranks run together counts from when the last of them was ready."""
    program, length = timeline.program, timeline.end - timeline.start
    task = np.flatnonzero(program.exchanging)
    leader, ready, done = leaders(program)[task], timeline.start.copy(), timeline.end.copy()
    np.maximum.at(ready, leader, timeline.start[task])
    np.maximum.at(done, leader, timeline.end[task])
    length[task] = np.maximum(0.0, done[leader] - ready[leader])
    return length


def _passes(program: Program, length: Floats) -> Costs:
    work, stages = program.work, program.placement.stages

    def medians(kinds: tuple[Kind, ...]) -> list[float | None]:
        chosen = work.among(kinds)
        return [_median(length, chosen & (work.stage == stage)) for stage in range(stages)]

    rows = zip(*(medians((kind,)) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.WGRAD)), strict=True)
    table: dict[str, list[float]] = {name: [] for name in ("F", "B", "I", "W", "BW")}
    for f, b, i, w, wgrad in rows:
        later, half = wgrad or 0.0, (b or 0.0) / 2
        weights = w if w is not None else later or half
        inputs = i if i is not None else half if not later else b or 0.0
        whole = b + later if b is not None else inputs + weights
        later = min(later, whole)  # medians of a few noisy times need not add up
        for name, value in zip(table, (f or 0.0, whole, inputs, weights, later), strict=True):
            table[name].append(value)
    costs: Costs = msgspec.convert(table, Costs)
    saved = _saved(program, length, costs)
    woven = [max(f, b, f + b - less) for f, b, less in zip(table["F"], table["B"], saved, strict=True)]
    return msgspec.structs.replace(costs, FB=tuple(woven))


def _saved(program: Program, length: Floats, costs: Costs) -> list[float]:
    """Return the time that each stage's passes save by being woven, such that pairs take as long as measured.

    If several solutions fit, choose the one in which stages save most nearly the same.
    """
    work, stages = program.work, program.placement.stages
    forward, whole, late = (costs.per_stage(name, stages=stages) for name in ("F", "B", "BW"))
    paired = work.kind == Kind.PAIR
    pairs = sorted({*zip(work.stage[paired].tolist(), work.stage_b[paired].tolist(), strict=True)})
    if not pairs:
        return [0.0] * stages
    halves, less = np.zeros((len(pairs), stages)), np.zeros(len(pairs))
    for row, (a, b) in enumerate(pairs):
        halves[row, a] += 0.5
        halves[row, b] += 0.5
        took = np.median(length[paired & (work.stage == a) & (work.stage_b == b)])
        less[row] = forward[a] + whole[b] - late[b] - took
    mean = less.mean()
    savings: list[float] = (mean + np.linalg.lstsq(halves, less - mean, rcond=None)[0]).tolist()
    return savings


def _phases(program: Program, length: Floats) -> dict[str, PhaseTimes]:
    """Return the median times by layer and phase."""
    work, anatomy = program.work, program.anatomy
    samples: dict[str, dict[str, list[Floats]]] = {}
    for name, kinds in (("F", FORWARDS), ("I", BACKWARDS), ("W", WEIGHTS), ("R", (Kind.RECOMPUTE,))):
        chosen = work.among(kinds)
        for stage, parts in enumerate(anatomy.forward if name == "F" else anatomy.backward):
            steps = anatomy.weight_steps[stage] if name == "W" else range(len(parts))
            for number, step in enumerate(steps):
                part = parts[step]
                times = length[chosen & (work.stage == stage) & (work.part == number)]
                samples.setdefault(f"{part.kind}.{part.phase.name}", {}).setdefault(name, []).append(times)
    medians = {
        key: {name: float(np.median(every)) for name, times in kinds.items() if len(every := np.concatenate(times))}
        for key, kinds in samples.items()
    }
    return {key: PhaseTimes(**times) for key, times in medians.items()}


def _transfer(timeline: Timeline) -> float:
    program = timeline.program
    send = np.flatnonzero(program.work.among(SENDS) & (program.counterpart >= 0))
    receive = program.counterpart[send]
    ready = np.maximum(timeline.start[send], timeline.start[receive])
    taken = np.maximum(0.0, timeline.end[receive] - ready)
    return float(np.median(taken)) if len(taken) else 0.0


def _sums(timeline: Timeline) -> tuple[PerStage, PerStage, float]:
    """Return each stage's sum time, that of its experts, and that of tied weights: from when all ends were ready to the
    last end.
    """
    program = timeline.program
    durations: dict[tuple[int, int], list[float]] = {}
    for task in reduces(program.work).tolist():
        ends = program.ends(task)
        if task == min(ends):
            taken = float(timeline.end[ends].max() - timeline.start[ends].max())
            part = min(program.work.part.item(task), 1)  # all ties alike
            durations.setdefault((program.work.stage.item(task), part), []).append(taken)
    tied = [time for (_, part), times in durations.items() if part == 1 for time in times]
    own, experts = (
        tuple(
            max(0.0, float(np.median(durations.get((stage, part), [0.0])))) for stage in range(program.placement.stages)
        )
        for part in (0, EXPERT_SUM)
    )
    return own if any(own) else 0.0, experts if any(experts) else 0.0, max(0.0, float(np.median(tied))) if tied else 0.0


def _calls(timeline: Timeline) -> dict[str, float]:
    program = timeline.program
    durations: dict[str, list[float]] = {}
    for task, part in enumerate(program.work.part.tolist()):
        ends = program.ends(task)
        if task == min(ends):
            taken = float(timeline.end[ends].max() - timeline.start[ends].max())
            durations.setdefault(family(program.anatomy.calls[part]), []).append(max(0.0, taken))
    return {name: float(np.median(times)) for name, times in durations.items()}


def _median(length: Floats, chosen: Bools) -> float | None:
    return float(np.median(length[chosen])) if chosen.any() else None
