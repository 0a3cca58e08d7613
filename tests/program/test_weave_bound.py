"""The bound on a pair's length: below every order, and as long as the best where weight gradients are fine enough."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.program.passes import Passes, Step, Token, Weight
from stretto.program.weave import weave
from stretto.program.weave_bound import bound

times = st.integers(0, 6).map(float)


@st.composite
def small_passes(draw: st.DrawFn, *, steps: int, weights: int) -> Passes:
    """Up to so many steps in each pass, on any lane, and up to so many weight gradients."""
    lanes = st.sampled_from(["compute", "comm", "host"])
    one_pass = st.lists(st.builds(Step, lanes, times), max_size=steps).map(tuple)
    backward = draw(one_pass)
    after = [k for k, step in enumerate(backward) if step.lane == "compute"][:weights]
    return Passes(draw(one_pass), backward, tuple(Weight(k, draw(times)) for k in after))


def every_order(passes: Passes, placed: tuple[Token, ...] = ()) -> Iterator[tuple[Token, ...]]:
    nexts = {"F": len(passes.forward), "B": len(passes.backward)}
    tokens = [Token("W", k) for k, weight in enumerate(passes.weights) if Token("B", weight.after) in placed]
    for of, steps in nexts.items():
        number = sum(token.of == of for token in placed)
        tokens += [Token(of, number)] if number < steps else []  # type: ignore[arg-type]
    tokens = [token for token in tokens if token not in placed]
    if not tokens:
        yield placed
    for token in tokens:
        yield from every_order(passes, (*placed, token))


def shortest(passes: Passes) -> float:
    return min(map(passes.length, every_order(passes)))


def weave_and_bound(passes: Passes) -> tuple[float, float]:
    length = passes.length(weave(passes))
    return length, bound(passes, length=math.inf)


@given(small_passes(steps=3, weights=2))
def test_no_order_is_shorter_than_the_bound(passes: Passes) -> None:
    length, least = weave_and_bound(passes)
    assert least <= shortest(passes) <= length


@given(small_passes(steps=4, weights=0))
def test_without_weight_gradients_the_bound_is_the_shortest_length(passes: Passes) -> None:
    length, least = weave_and_bound(passes)
    assert least == shortest(passes) == length


@given(small_passes(steps=3, weights=2))
def test_the_bound_does_not_depend_on_the_order_known(passes: Passes) -> None:
    length, least = weave_and_bound(passes)
    assert bound(passes, length=length) == least


def moe(
    attn: tuple[float, float, float],
    dispatch: tuple[float, float],
    mlp: tuple[float, float, float],
    combine: tuple[float, float],
    layers: int,
) -> Passes:
    """MoE layers; times of compute are those of forward, input gradient and weight gradient."""
    forward = (Step("compute", attn[0]), Step("comm", dispatch[0]), Step("compute", mlp[0]), Step("comm", combine[0]))
    backward = (Step("comm", combine[1]), Step("compute", mlp[1]), Step("comm", dispatch[1]), Step("compute", attn[1]))
    weights = [weight for n in range(layers) for weight in (Weight(4 * n + 1, mlp[2]), Weight(4 * n + 3, attn[2]))]
    return Passes(forward * layers, backward * layers, tuple(weights))


def in_units(passes: Passes) -> Passes:
    """The same with weight gradients cut into parts of time 1."""
    return Passes(
        passes.forward,
        passes.backward,
        tuple(Weight(weight.after, 1.0) for weight in passes.weights for _ in range(int(weight.time))),
    )


compute, comm = st.tuples(times, times, times), st.tuples(times, times)


@given(compute, comm, compute, comm, st.integers(1, 2))
def test_weight_gradients_in_units_of_time_are_woven_to_the_bound(
    attn: tuple[float, float, float],
    dispatch: tuple[float, float],
    mlp: tuple[float, float, float],
    combine: tuple[float, float],
    layers: int,
) -> None:
    whole = moe(attn, dispatch, mlp, combine, layers)
    length, least = weave_and_bound(in_units(whole))
    assert length == least == bound(whole, length=math.inf)


COSTS = {
    "deepseek": ((4.36, 9.34, 2.39), (6.69, 7.49), (4.60, 5.31, 3.54), (8.68, 5.77)),
    "k2": ((3.0, 3.0, 3.0), (4.7, 4.7), (8.1, 8.1, 8.1), (4.7, 4.7)),
    "k2, slow": ((3.0, 3.0, 3.0), (7.05, 7.05), (8.1, 8.1, 8.1), (7.05, 7.05)),
}


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_pairs_with_measured_costs_are_as_short_as_can_be(
    costs: tuple[tuple[float, float, float], tuple[float, float], tuple[float, float, float], tuple[float, float]],
    layers: int,
) -> None:
    length, least = weave_and_bound(moe(*costs, layers))
    assert length == pytest.approx(least)


def test_a_weight_gradient_may_delay_a_step_if_the_pair_gets_shorter() -> None:
    """Doubled communication: weight gradients are longer than any gap, and only one that delays a step fills it."""
    passes = moe((3, 3, 3), (9.4, 9.4), (8.1, 8.1, 8.1), (9.4, 9.4), 1)
    length, least = weave_and_bound(passes)
    assert length == pytest.approx(shortest(passes)) == pytest.approx(41.0)
    assert least == pytest.approx(39.7)
