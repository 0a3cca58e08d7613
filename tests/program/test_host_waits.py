"""Waits of the host in woven pairs: behind the other pass's compute, and never at the pair's cost."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.costs import Costs, PhaseTimes
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE, MOE, Layer
from stretto.program.host_waits import bare_waits, covered, late_waits
from stretto.program.passes import Passes, Step, Token, Weight
from stretto.program.task import WEIGHTS, Kind, Task
from stretto.program.weave import weave
from stretto.schedules import Pair, dualpipe, dualpipev, interleaved

times = st.integers(0, 8).map(float)


def moe(attn: float, dispatch: float, mlp: float, combine: float, counts: float, sizes: float, layers: int) -> Passes:
    forward = (
        Step("compute", attn),
        Step("comm", counts, backward=False),
        Step("host", sizes, backward=False),
        Step("comm", dispatch),
        Step("compute", mlp),
        Step("comm", combine),
    )
    backward = (Step("comm", combine), Step("compute", mlp), Step("comm", dispatch), Step("compute", attn))
    weights = [weight for n in range(layers) for weight in (Weight(4 * n + 1, mlp), Weight(4 * n + 3, attn))]
    return Passes(forward * layers, backward * layers, tuple(weights))


passes = st.builds(moe, *[times] * 6, st.integers(1, 3))


@given(passes)
def test_a_wait_without_cover_would_cost_time_to_cover(pair: Passes) -> None:
    """Where no compute of the other pass is issued between the counts and the wait for them, the next would delay the
    pair.
    """
    order = weave(pair)
    assert not bare_waits(pair, order) or pair.length(covered(pair, order)) > pair.length(order)


@given(passes)
def test_no_wait_can_come_later_without_delaying_something(pair: Passes) -> None:
    order = weave(pair)
    assert late_waits(pair, order) == order


@given(times, times, times, times, st.integers(1, 3))
def test_waits_that_take_no_time_cost_none(a: float, d: float, m: float, c: float, layers: int) -> None:
    """A pair takes as long as without counts and waits."""
    pair = moe(a, d, m, c, 0, 0, layers)
    without = Passes(tuple(step for step in pair.forward if step.backward), pair.backward, pair.weights)
    assert pair.length(weave(pair)) <= without.length(weave(without))


def published(layers: int, *, behind: bool) -> list[Token]:
    """Kimi K2's order with the weight gradients last, or DualPipe's with each right behind its input gradient; counts
    and their wait come with the dispatch.
    """
    order, weights = [], [Token("W", k) for k in range(2 * layers)]
    forward = [(0,), (1, 2, 3), (4,), (5,)]
    for n, step in product(range(layers), range(4)):
        order.append(Token("B", 4 * n + step))
        if behind and step % 2:
            order.append(weights.pop(0))
        order += [Token("F", 6 * n + k) for k in forward[step]]
    return order + weights


@given(passes)
def test_never_longer_than_the_published_orders(pair: Passes) -> None:
    layers = len(pair.forward) // 6
    length = pair.length(weave(pair))
    assert length <= min(pair.length(published(layers, behind=behind)) for behind in (False, True))


@given(passes)
def test_the_host_issues_nothing_while_it_waits(pair: Passes) -> None:
    order = weave(pair)
    ends = dict(zip(order, pair.ends(order), strict=True))
    for place, token in enumerate(order):
        if token.of == "F" and pair.forward[token.number].lane == "host":
            for later in order[place + 1 :]:
                steps = {"F": pair.forward, "B": pair.backward}.get(later.of)
                time = pair.weights[later.number].time if steps is None else steps[later.number].time
                assert ends[later] - time >= ends[token]


@given(passes)
def test_covering_a_wait_keeps_each_pass_in_order(pair: Passes) -> None:
    order = covered(pair, weave(pair))
    assert [token.number for token in order if token.of == "F"] == list(range(len(pair.forward)))
    assert [token.number for token in order if token.of == "B"] == list(range(len(pair.backward)))
    for place, token in enumerate(order):
        if token.of == "W":
            assert Token("B", pair.weights[token.number].after) in order[:place]


def test_waits_in_both_passes_are_woven() -> None:
    """Compute that covers the wait of one pass uncovers that of the other."""
    waits = Step("host", 5.0), Step("compute", 2.0)
    pair = Passes((waits[0], *waits), waits, (Weight(1, 1.0),))
    order = weave(pair)
    assert len(order) == 6
    assert pair.length(order) <= 2 * 5 + 5 + 2 + 2 + 1


def phases(counts: float, sizes: float, dispatch: float, combine: float) -> Costs:
    return Costs(
        phases={
            "attn": PhaseTimes(1, 1.2, 0.6),
            "mlp": PhaseTimes(1, 1, 1),
            "dispatch": PhaseTimes(dispatch, dispatch),
            "combine": PhaseTimes(combine, combine),
            "counts": PhaseTimes(counts),
            "sizes": PhaseTimes(sizes),
        }
    )


TABLES = {
    "none": Costs(),
    "short": phases(0.05, 0.02, 0.3, 0.3),
    "even": phases(0.1, 0.05, 0.7, 0.7),
    "long": phases(0.2, 0.1, 1.5, 1.5),
    "free": phases(0, 0, 0.5, 0.5),
}
PLANS = {
    "k2": interleaved(devices=2, microbatches=4, overlap=True),
    "dualpipe": dualpipe(devices=4, microbatches=8),
    "dualpipev": dualpipev(devices=2, microbatches=4),
}


@pytest.mark.parametrize("costs", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("layers", [[EXPERT_PARALLEL_MOE], [DENSE, EXPERT_PARALLEL_MOE, EXPERT_PARALLEL_MOE]])
def test_in_every_pair_the_host_waits_behind_compute_of_the_other_pass(
    plan: stretto.Plan, costs: Costs, layers: list[Layer]
) -> None:
    program = stretto.lower(plan, layers=[layers] * plan.stages, costs=costs)
    tasks = list(program.tasks())
    partner = {}
    for row in plan.rows:
        for cell in row:
            if isinstance(cell, Pair):
                partner[cell.forward.stage, cell.forward.microbatch] = (cell.backward.stage, cell.backward.microbatch)
    waits = [k for k, task in enumerate(tasks) if task.lane.name == "host" and (task.stage, task.microbatch) in partner]
    assert waits
    for k in waits:
        wait = tasks[k]
        other = partner[wait.stage, wait.microbatch]
        (counts,) = program.needs(k)
        assert tasks[counts].phase.startswith("counts")

        def hides(task: Task) -> bool:
            backward = task.kind is Kind.B or task.kind in WEIGHTS
            return backward and task.lane.name == "compute" and (task.stage, task.microbatch) == other  # noqa: B023

        own = [task for task in tasks if task.device == wait.device]
        left = any(hides(task) for task in own[own.index(wait) :])
        assert not left or any(map(hides, tasks[counts:k]))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_step_with_free_counts_is_as_short_as_without(plan: stretto.Plan) -> None:
    costs = TABLES["free"]
    lengths = [
        stretto.simulate(stretto.lower(plan, layers=[[layer]] * plan.stages, costs=costs), costs).makespan
        for layer in (EXPERT_PARALLEL_MOE, MOE)
    ]
    assert lengths[0] <= lengths[1] * 1.001
