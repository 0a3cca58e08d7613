"""Costs fitted to timelines give those timelines again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import costs, mesh_plans, plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes, WovenTimes
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE, MOE, Layer
from stretto.program.task import COMPUTE, Kind
from stretto.schedules import dualpipe, dualpipev, forward_only, gpipe, interleaved, one_f_one_b, zb_h1, zb_v


@given(plans(), costs, costs, costs, st.booleans(), st.integers(0, 3))
def test_whole_passes(plan: stretto.Plan, f: int, i: int, w: int, decoupled: bool, latency: int) -> None:
    woven = max(f, i + w, 0.9 * (f + i + w))
    table = Costs(F=f, I=i, W=w, BW=w if decoupled else 0, FB=woven, link=Link(latency=latency))
    measured = stretto.simulate(plan, table)
    again = stretto.simulate(plan, stretto.fit(measured))
    assert again.makespan == pytest.approx(measured.makespan)
    assert again.end == pytest.approx(measured.end)


@given(plans(), st.booleans())
def test_phases(plan: stretto.Plan, recompute: bool) -> None:
    times = {"attn": PhaseTimes(2, 3, 1, R=0.5), "mlp": PhaseTimes(1, 2, 1), "dispatch": PhaseTimes(0.5, 0.75)}
    table = Costs(phases={**times, "combine": PhaseTimes(0.25, 1)}, link=Link(latency=0.5))
    program = stretto.lower(plan, layers=[[MOE]] * plan.stages, costs=table, recompute=recompute)
    measured = stretto.simulate(program, table)
    assert stretto.simulate(program, stretto.fit(measured)).end == pytest.approx(measured.end)


def test_a_weight_update_is_refused() -> None:
    with pytest.raises(stretto.CostError, match="a weight update has no costs of stages"):
        stretto.fit(stretto.simulate(stretto.weight_update(devices=2, buckets=2)))


def test_a_pair_is_never_fitted_to_be_shorter_than_its_passes() -> None:
    """As measured times, which are never exact, may say."""
    timeline = stretto.simulate(dualpipe(devices=2, microbatches=8), Costs(F=1, B=2))
    paired = timeline.program.work.kind == Kind.PAIR
    hasty = stretto.Timeline(
        timeline.program, timeline.start, np.where(paired, timeline.start + 0.1, timeline.end), timeline.unit
    )
    fitted = stretto.fit(hasty)
    assert fitted.FB == (2.0, 2.0)
    assert stretto.simulate(timeline.program, fitted).makespan < timeline.makespan


def test_times_that_do_not_add_up_are_fitted_all_the_same() -> None:
    """A weight part may be measured to be longer than a backward in all."""
    plan = dualpipe(devices=4, microbatches=8)
    timeline = stretto.simulate(plan, Costs(BW=1))
    late = timeline.program.work.kind == Kind.WGRAD
    noisy = stretto.Timeline(timeline.program, timeline.start, timeline.end + 100.0 * late, "s")
    assert stretto.simulate(plan, stretto.fit(noisy)).makespan > 0


# ── several timelines, with and without pairs ──

COMPUTED, SENT = ("dense.attn", "dense.mlp", "moe.attn", "moe.mlp"), ("moe.dispatch", "moe.combine")


@st.composite
def phase_tables(draw: st.DrawFn, *, recompute: bool) -> dict[str, PhaseTimes]:
    """Whole numbers, so that sums and differences of times are exact."""
    times = st.integers(0, 9)
    again = times if recompute else st.none()
    computed = {key: draw(st.builds(PhaseTimes, times, times, times, again)) for key in COMPUTED}
    return computed | {key: draw(st.builds(PhaseTimes, times, times)) for key in SENT}


def in_pairs(times: dict[str, PhaseTimes]) -> dict[str, WovenTimes]:
    """The same as times in pairs; communication has no W, which is left out."""
    return {key: WovenTimes(x.F, x.I, x.W if key in COMPUTED else None, x.R) for key, x in times.items()}


def lowered(plan: stretto.Plan, costs: Costs, *, recompute: bool = False) -> stretto.Program:
    return stretto.lower(plan, layers=[[DENSE, MOE]] * plan.stages, costs=costs, recompute=recompute)


UNWOVEN = st.sampled_from([gpipe, one_f_one_b, zb_h1, zb_v])
WOVEN = st.sampled_from(
    [
        dualpipe(devices=2, microbatches=8),
        dualpipev(devices=2, microbatches=5),
        interleaved(devices=2, microbatches=4, overlap=True),
        interleaved(devices=3, microbatches=7, stages_per_device=1, overlap=True),
    ]
)


@given(st.data(), UNWOVEN, WOVEN, plans(devices=3, microbatches=6), st.booleans(), st.integers(0, 3))
def test_runs_with_and_without_pairs_give_the_times_of_both(
    data: st.DataObject,
    unwoven: Callable[..., stretto.Plan],
    woven: stretto.Plan,
    other: stretto.Plan,
    recompute: bool,
    latency: int,
) -> None:
    alone, paired = (data.draw(phase_tables(recompute=recompute)) for _ in range(2))
    table = Costs(phases=alone, woven=in_pairs(paired), link=Link(latency=latency))
    runs = [
        stretto.simulate(program, table)
        for plan in (unwoven(devices=2, microbatches=5), woven)
        for program in [lowered(plan, table, recompute=recompute)]
    ]
    for timelines in (runs, runs[::-1]):
        fitted = stretto.fit(*timelines)
        differing = in_pairs({key: times for key, times in paired.items() if times != alone[key]})
        assert fitted == Costs(phases=alone, woven=differing, link=table.link)
        makespans = [
            stretto.simulate(lowered(other, costs, recompute=recompute), costs).makespan for costs in (table, fitted)
        ]
        assert makespans[0] == makespans[1]


def test_one_kind_of_run_does_not_know_the_other() -> None:
    alone = {key: PhaseTimes(1, 1, 1) for key in COMPUTED} | {key: PhaseTimes(1, 1) for key in SENT}
    slower = {key: PhaseTimes(times.F + 1, times.I + 1, 2 * times.W) for key, times in alone.items()}
    table = Costs(phases=alone, woven=in_pairs(slower))
    lone = stretto.simulate(lowered(one_f_one_b(devices=2, microbatches=4), table), table)
    assert (stretto.fit(lone).phases, stretto.fit(lone).woven) == (alone, {})
    both = stretto.simulate(lowered(dualpipe(devices=2, microbatches=8), table), table)
    work = both.program.work
    only = replace(both.program, work=replace(work, woven=work.among(COMPUTE)))  # as if all were pairs
    paired = stretto.fit(stretto.simulate(only, table))
    assert (paired.phases, paired.woven) == (slower, {})


@given(plans(devices=3, microbatches=6), st.integers(1, 3))
def test_a_timeline_fitted_with_itself_gives_the_same_costs(plan: stretto.Plan, copies: int) -> None:
    for table, program in (
        (Costs(F=2, I=3, W=1, BW=1, FB=5.5, reduce=2, link=Link(latency=1)), stretto.lower(plan)),
        (Costs(phases=MOE_TIMES, reduce=2), stretto.lower(plan, layers=[[MOE]] * plan.stages)),
    ):
        timeline = stretto.simulate(program, table)
        assert stretto.fit(*[timeline] * copies) == stretto.fit(timeline)


MOE_TIMES = {"attn": PhaseTimes(2, 3, 1), "mlp": PhaseTimes(1, 2, 1)} | dict.fromkeys(
    ("dispatch", "combine"), PhaseTimes(1, 1)
)


def test_whole_passes_of_several_runs_are_pooled() -> None:
    """1F1B shows the passes by themselves, and DualPipe the pairs, and the sums over its two copies of each stage."""
    table = Costs(F=(1, 2), I=3, W=1, FB=(4, 5.5), reduce=(1, 2))
    runs = [stretto.simulate(plan(devices=2, microbatches=8), table) for plan in (zb_h1, dualpipe)]
    fitted = stretto.fit(*runs)
    assert (fitted.F, fitted.I, fitted.W, fitted.reduce) == ((1, 2), (3, 3), (1, 1), (1, 2))
    for run in runs:
        assert stretto.simulate(run.program, fitted).makespan == pytest.approx(run.makespan)


def test_means_are_of_all_samples() -> None:
    runs = []
    for microbatches, latency in ((2, 1), (4, 5), (3, 2)):
        table = Costs(phases=MOE_TIMES | {"attn": PhaseTimes(latency)}, link=Link(latency=latency))
        program = stretto.lower(one_f_one_b(devices=2, microbatches=microbatches), layers=[[MOE]] * 2)
        runs.append(stretto.simulate(program, table))
    fitted = stretto.fit(*runs)
    mean = pytest.approx((2 * 1 + 4 * 5 + 3 * 2) / 9)  # of two, four and three microbatches
    assert fitted.link.latency == mean
    assert mean == fitted.phases["moe.attn"].F


def test_what_is_always_slow_in_its_place_is_no_stall() -> None:
    slow = {"1>2": Link(latency=7.0), "2>1": Link(latency=7.0)}
    plan = one_f_one_b(devices=4, microbatches=8)
    assert stretto.fit(stretto.simulate(plan, Costs(link=Link(latency=1.0), links=slow))).link.latency == 3.0
    phases = dict.fromkeys(("attn", "dispatch", "mlp", "combine"), PhaseTimes(1, 1, 1))
    phases |= {"counts": PhaseTimes(F=0.1), "sizes": PhaseTimes(F=0.1)}
    program = stretto.lower(
        one_f_one_b(devices=1, microbatches=4).on_mesh({"pp": 1, "ep": 4}), layers=[[EXPERT_PARALLEL_MOE]]
    )
    measured = stretto.simulate(program, Costs(phases=phases, loads=(2.8, 0.4, 0.4, 0.4)))
    assert pytest.approx(1.0) == stretto.fit(measured).phases["moe.mlp"].F


def test_without_backwards_there_is_nothing_to_fit() -> None:
    with pytest.raises(stretto.CostError, match="there are no backwards in the timeline to be fitted; record a step"):
        stretto.fit(stretto.simulate(forward_only(one_f_one_b(devices=2, microbatches=4))))


def test_spread_counts_and_stalls_do_not() -> None:
    """A step takes as long as the sum of its tasks: a median of skewed times would predict too little."""
    run = stretto.simulate(one_f_one_b(devices=1, microbatches=10), Costs(F=1, I=1, W=1))
    (forwards,) = np.nonzero(run.program.work.kind == Kind.F)
    end = run.end.copy()
    end[forwards[:3]] += 2.0  # three of ten take 3
    spread = replace(run, end=end)
    assert (pytest.approx(1.6),) == stretto.fit(spread).F
    end[forwards[4]] += 100.0
    assert (pytest.approx(15 / 9),) == stretto.fit(replace(run, end=end)).F


def test_recomputation_copies_and_unlike_pairs_come_back() -> None:
    cases = [
        (one_f_one_b(devices=4, microbatches=8), Costs(R=0.3), {"recompute": True}),
        (one_f_one_b(devices=2, microbatches=4), Costs(host=Link(latency=5), activation_bytes=1), {"offload": 1}),
        (  # the first solution for pairs would make the third stage's shorter than its backward
            dualpipe(devices=4, microbatches=8),
            Costs(F=(0.5, 0.5, 0.5, 2), I=(1, 1.5, 0.5, 0.5), W=(1.5, 1, 0.5, 2), FB=(2.5, 2.5, 1, 2.5)),
            {},
        ),
    ]
    for plan, table, options in cases:
        run = stretto.simulate(stretto.lower(plan, **options), table)
        assert stretto.simulate(run.program, stretto.fit(run)).makespan == pytest.approx(run.makespan)


def test_times_that_are_mostly_zero_count() -> None:
    run = stretto.simulate(one_f_one_b(devices=1, microbatches=5), Costs(F=0, I=1, W=1))
    (forwards,) = np.nonzero(run.program.work.kind == Kind.F)
    end = run.end.copy()
    end[forwards[:2]] += 5.0
    assert stretto.fit(replace(run, end=end)).per_stage("F", stages=1) == pytest.approx(2.0)


def test_phases_are_pooled_over_different_numbers_of_stages() -> None:
    table = Costs(phases=MOE_TIMES)
    plans_ = [one_f_one_b(devices=2, microbatches=4), dualpipev(devices=2, microbatches=4)]
    runs = [stretto.simulate(stretto.lower(plan, layers=[[MOE]] * plan.stages), table) for plan in plans_]
    assert [plan.stages for plan in plans_] == [2, 4]
    assert stretto.fit(*runs).phases == {f"moe.{name}": times for name, times in MOE_TIMES.items()}


def run_of(plan: stretto.Plan, layer: Layer | None = None, **more: Any) -> stretto.Timeline:
    layers = None if layer is None else [[layer]] * plan.stages
    costs = more.pop("costs", Costs())
    return stretto.simulate(stretto.lower(plan, layers=layers, **more), costs)


PLAN = one_f_one_b(devices=2, microbatches=4)
SUMS = Costs(reduce=1)
MEDLEY: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "list": (lambda: [[run_of(PLAN), run_of(PLAN)]], r"fit takes timelines, one or several: fit\(first, second\)"),
    "units": (
        lambda: [run_of(PLAN), run_of(PLAN, costs=Costs(F=1, I=1, W=1, unit="s"))],
        "timelines in seconds are not fitted together with timelines without a unit",
    ),
    "update": (
        lambda: [run_of(PLAN), stretto.simulate(stretto.weight_update(devices=2, buckets=2))],
        "a weight update has no costs",
    ),
    "own": (
        lambda: [stretto.simulate(stretto.program_of([stretto.Call("a", 0)])), run_of(PLAN)],
        "a program of your own is fitted alone",
    ),
    "phases": (lambda: [run_of(PLAN), run_of(PLAN, MOE)], "phases are not fitted together with timelines of whole"),
    "layers": (lambda: [run_of(PLAN, MOE), run_of(PLAN, DENSE)], r"only some have layers 'dense' \(attn, mlp\)"),
    "same name": (
        lambda: [run_of(PLAN, MOE), run_of(PLAN, Layer("moe", MOE.phases[1:]))],
        r"timelines of different models: only some have layers 'moe' \(",
    ),
    "joined": (
        lambda: [run_of(PLAN, MOE), run_of(PLAN, MOE, wgrad_microbatches=4)],
        "weight gradients of 1 and of 4 microbatches are not fitted together",
    ),
    "stages": (
        lambda: [run_of(PLAN), run_of(one_f_one_b(devices=3, microbatches=4))],
        "timelines with 2 and 3 stages are not fitted together",
    ),
    "sums": (
        lambda: [run_of(dualpipe(devices=p, microbatches=8), MOE, costs=SUMS) for p in (2, 4)],
        "timelines with 2 and 4 stages are not fitted together: whole passes, and sums of gradients, have times",
    ),
}


@pytest.mark.parametrize("name", sorted(MEDLEY))
def test_timelines_that_do_not_go_together_are_refused(name: str) -> None:
    timelines, says = MEDLEY[name]
    with pytest.raises(stretto.CostError, match=says) as caught:
        stretto.fit(*timelines())
    assert "\n" not in str(caught.value)


@given(mesh_plans(devices=2, microbatches=4, dp=1), mesh_plans(devices=2, microbatches=4, dp=1))
def test_exchanges_between_ranks_are_pooled_too(one: stretto.Plan, other: stretto.Plan) -> None:
    """Experts' ranks, their waits and counts included; times that were never seen in pairs are those outside."""
    times = MOE_TIMES | {"counts": PhaseTimes(1), "sizes": PhaseTimes(2)}
    table = Costs(phases=times, woven={name: WovenTimes(x.F + 1, x.I + 2, x.W + 3) for name, x in times.items()})
    runs = [
        stretto.simulate(stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]] * plan.stages, costs=table), table)
        for plan in (one, other)
    ]
    fitted = stretto.fit(*runs)
    for run in runs:
        assert np.array_equal(stretto.simulate(run.program, fitted).end, run.end)
