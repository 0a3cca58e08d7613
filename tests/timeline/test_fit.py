"""Costs fitted to a timeline give that timeline again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import costs, plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes
from stretto.layers import MOE
from stretto.program.task import Kind
from stretto.schedules import dualpipe


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
