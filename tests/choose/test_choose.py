"""Choices by costs: what hides leaves, no more than a limit takes, and what is held longest first."""

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import strategies
from stretto import CostError, Costs, Memory, Plan, PlanError, choose_memory, lower, simulate
from stretto.choose import MemoryChoice
from stretto.choose import choose as module
from stretto.costs import Link, SharedResource
from stretto.layers import cut_layers, parse_layers
from stretto.schedules import dualpipev, gpipe, interleaved, one_f_one_b

PLAN = one_f_one_b(devices=4, microbatches=16)
FAST = 1e30


def costs_of(bandwidth: float = 50e9, **more: Any) -> Costs:
    return Costs(
        **{"unit": "s", "F": 0.01, "I": 0.01, "W": 0.01, "activation_bytes": 1e9, **more},
        host=Link(bandwidth=bandwidth),
    )


def fractions_of(choice: MemoryChoice) -> list[float]:
    return [stage.fraction for stage in choice.stages]


def simulated(plan: Plan, costs: Costs, choice: MemoryChoice) -> tuple[float, list[float]]:
    """The time and peaks of a step with a chosen policy."""
    policy, moved = choice.memory, msgspec.structs.replace(costs, offload_bytes=choice.offload_bytes)
    costs = moved if policy.offloads else costs
    timeline = simulate(lower(plan, costs=costs, offload=policy.copy_actions if policy.offloads else 0), costs)
    return timeline.makespan, [device.peak_bytes or 0.0 for device in timeline.memory(costs)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Costs]:
    plan = draw(strategies.plans(devices=4, microbatches=8))
    each = st.tuples(*[st.integers(1, 9)] * plan.stages)
    held = draw(each)
    costs = Costs(
        F=draw(each),
        I=draw(each),
        W=draw(each),
        activation_bytes=held,
        offload_bytes=tuple(draw(st.integers(0, size)) for size in held) if draw(st.booleans()) else None,
        parameter_bytes=draw(st.integers(0, 9)),
        pending_bytes=draw(st.integers(0, 3)),
        host=Link(latency=draw(st.sampled_from([0.0, 0.0, 0.1])), bandwidth=draw(st.floats(0.05, 20))),
        shared={"pcie": SharedResource(capacity=1.5, lanes={"d2h": 1, "h2d": 1})} if draw(st.booleans()) else {},
    )
    return plan, costs


@settings(deadline=None, max_examples=80)
@given(cases(), st.sampled_from([0.0, 0.01, 0.2]), st.floats(0.3, 1.1))
def test_a_choice_holds_what_it_says(case: tuple[Plan, Costs], slower: float, share: float) -> None:
    """Its times and peaks are those of a simulation, the step is hardly longer, and every device within the limit."""
    plan, costs = case
    free = choose_memory(plan, costs, slower=slower)
    limit = share * max(device.peak_before for device in free.devices)
    assume(limit > 0)
    choices = [free]
    try:
        choices.append(choose_memory(plan, costs, slower=slower, limit=limit))
        assert max(device.peak_after for device in choices[1].devices) <= limit
    except PlanError as error:
        assert max(device.peak_after for device in free.devices) > limit, str(error)
    for choice in choices:
        time, peaks = simulated(plan, costs, choice)
        assert time == pytest.approx(choice.step_after)
        assert peaks == pytest.approx([device.peak_after for device in choice.devices])
        assert choice.step_after <= choice.step_before * (1 + slower) * (1 + 1e-9)
        assert choice.memory.offloads == any(fractions_of(choice))
        most = costs.leaving_bytes(stages=plan.stages, recompute=False)
        assert (np.array(choice.offload_bytes) <= most).all()
        for device in choice.devices:
            assert device.copied <= device.link * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(cases(), st.floats(1.1, 30))
def test_a_faster_link_carries_no_less(case: tuple[Plan, Costs], times: float) -> None:
    plan, costs = case
    costs = msgspec.structs.replace(costs, shared={})
    faster = msgspec.structs.replace(costs, host=Link(costs.host.latency, costs.host.bandwidth * times))
    slow, fast = (choose_memory(plan, each) for each in (costs, faster))
    worth = [stage.stage for stage in fast.stages if not stage.why.startswith("nothing to gain")]
    for stage in worth:
        assert slow.stages[stage].fraction <= fast.stages[stage].fraction


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.integers(2, 10), st.floats(0.3, 1), st.floats(0.3, 1))
def test_a_lower_limit_lets_no_less_leave(devices: int, microbatches: int, one: float, other: float) -> None:
    plan, costs = gpipe(devices=devices, microbatches=microbatches), costs_of(FAST)
    choices = []
    for share in sorted((one, other), reverse=True):
        try:
            choices.append(choose_memory(plan, costs, limit=share * microbatches * 1e9))
        except PlanError:
            break
    for higher, lower_ in pairwise(choices):
        assert (np.array(fractions_of(higher)) <= fractions_of(lower_)).all()


def test_all_leaves_over_a_link_that_takes_no_time() -> None:
    choice = choose_memory(dualpipev(devices=4, microbatches=16), costs_of(FAST))
    assert choice.memory == Memory(sites={"*": "offload"}, fraction=(*[1.0] * 7, 0.0))
    assert [stage.why for stage in choice.stages] == [*["hides behind compute"] * 7, "needed again too soon to leave"]
    assert choice.step_after == choice.step_before


def test_nothing_leaves_over_a_link_that_takes_forever() -> None:
    choice = choose_memory(PLAN, costs_of(1))
    assert choice.memory == Memory()
    assert (choice.step_after, choice.offload_bytes) == (choice.step_before, (0.0,) * 4)
    assert choice.stages[0].why == "more would not hide: the step would take longer"
    assert str(choice).startswith("Offload nothing. A simulated step takes 570 ms.")


def test_half_leaves_where_half_fits_beside_a_forward() -> None:
    """A copy of all takes 20 ms, and the forwards beside which the first passes leave 10 ms."""
    choice = choose_memory(PLAN, costs_of(), slower=0)
    assert choice.memory.fraction == (0.5, 0.0, 0.0, 0.0)
    assert choice.devices[0].peak_after == pytest.approx(3.5e9)
    assert choice.devices[0].link == pytest.approx(choice.step_after * 50e9)
    assert choice.devices[0].copied == 16 * 0.5e9


def test_small_passes_leave_whole_where_large_ones_leave_in_part() -> None:
    plan, sizes = gpipe(devices=2, microbatches=8), (1e9, 0.4e9)
    choice = choose_memory(plan, costs_of(activation_bytes=sizes), slower=0)
    assert fractions_of(choice) == [0.5, 1.0]
    assert choice.offload_bytes == (0.5e9, 0.4e9)


def test_both_directions_may_share_a_link() -> None:
    apart = costs_of()
    shared = msgspec.structs.replace(apart, shared={"pcie": SharedResource(50, {"d2h": 50, "h2d": 50})})
    plan = gpipe(devices=2, microbatches=8)
    alone, together = (sum(choose_memory(plan, costs).offload_bytes) for costs in (apart, shared))
    assert 0 < together < alone


def test_with_a_limit_the_longest_held_leave_first_and_the_last_in_part() -> None:
    plan, costs = interleaved(devices=2, microbatches=8, overlap=True), costs_of(FAST, F=(0.01, 0.02, 0.01, 0.03))
    every = choose_memory(plan, costs)
    before, after = ([getattr(each, name) for each in every.devices] for name in ("peak_before", "peak_after"))
    limit = max(before) - 0.4 * (max(before) - max(after))
    choice = choose_memory(plan, costs, limit=limit)
    assert max(each.peak_after for each in choice.devices) <= limit
    order = sorted((each for each in choice.stages if "without it" not in each.why), key=lambda each: -each.held)
    found = [each.fraction for each in order]
    assert found == sorted(found, reverse=True)
    assert sum(0 < fraction < 1 for fraction in found) == 1, found
    assert [each.why for each in order if 0 < each.fraction < 1] == ["limit reached"]
    partial = next(each.stage for each in order if 0 < each.fraction < 1)
    less = [each.fraction - 0.02 * (each.stage == partial) for each in choice.stages]
    moved = msgspec.structs.replace(costs, offload_bytes=tuple(np.array(less) * 1e9))
    peaks = simulate(lower(plan, costs=costs, offload=1), moved).memory(moved)
    assert max(each.peak_bytes or 0 for each in peaks) > limit, "less would do"


def test_no_more_leaves_than_host_bytes_allows() -> None:
    """Device 0 has three buffers for passes of 1 GB, each an eighth larger."""
    memory = Memory(sites={"*": "offload"}, host_bytes=9 * 10**9 // 4)
    choice = choose_memory(PLAN, costs_of(FAST), memory=memory)
    assert choice.memory.fraction == (0.665, 0.665, 0.0, 0.0)
    assert max(device.host for device in choice.devices) <= 9e9 / 4
    assert [stage.why for stage in choice.stages[:2]] == ["more would not fit: host_bytes"] * 2
    with pytest.raises(PlanError, match=r"all offloaded that host_bytes allows, .* 2.1 GB; recompute something$"):
        choose_memory(PLAN, costs_of(FAST), memory=memory, limit="2.1GB")


def test_nothing_leaves_if_the_limit_holds_anyway() -> None:
    choice = choose_memory(PLAN, costs_of(), limit="4GB")
    assert choice.memory == Memory()
    assert {stage.why for stage in choice.stages} == {"every device is within the limit without offload"}


def test_stages_of_devices_within_the_limit_stay() -> None:
    choice = choose_memory(gpipe(devices=2, microbatches=8), costs_of(FAST, activation_bytes=(2e9, 1e9)), limit="8GB")
    assert choice.stages[0].fraction > 0
    assert (choice.stages[1].fraction, choice.stages[1].why) == (0, "limit reached without it: its device holds less")


def test_a_limit_out_of_reach_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError) as error:
        choose_memory(PLAN, costs_of(), limit="3GB", slower=0)
    assert str(error.value) == (
        "with all offloaded that hides, device 0 holds 3.5 GB (4 GB without offload), 500 MB more than the limit of "
        "3 GB; recompute something, or let the step become more than 0 % longer (slower of choose_memory)"
    )


def test_no_device_offloads_more_than_its_limit_takes() -> None:
    """Devices 0 and 1 hold 4 and 3 GB. A little less of either stage is too little."""
    costs, limit = costs_of(FAST), 2.5e9
    choice = choose_memory(PLAN, costs, limit=limit)
    assert [stage.fraction > 0 for stage in choice.stages] == [True, True, False, False]
    assert max(device.peak_after for device in choice.devices) <= limit
    for stage in (0, 1):
        less = tuple(size - 1e7 * (k == stage) for k, size in enumerate(choice.offload_bytes))
        program = lower(PLAN, costs=costs, offload=1)
        moved = msgspec.structs.replace(costs, offload_bytes=less)
        peaks = [device.peak_bytes or 0.0 for device in simulate(program, moved).memory(moved)]
        assert peaks[stage] > limit


def test_copies_that_gain_next_to_nothing_are_left_out() -> None:
    """Copies take some of a device's memory bandwidth, even if they hide. If a limit needs them, they are made."""
    choice = choose_memory(PLAN, costs_of(1e9))
    assert not choice.memory.offloads
    assert "would fall by less than 1%" in choice.stages[0].why
    assert choose_memory(PLAN, costs_of(10e9)).memory.offloads
    assert choose_memory(PLAN, costs_of(1e9), limit=3.99e9).devices[0].peak_after <= 3.99e9


def test_what_would_not_lower_a_peak_stays() -> None:
    choice = choose_memory(PLAN, costs_of(FAST))
    assert fractions_of(choice) == [1, 1, 0, 0]
    assert choice.stages[2].why == "nothing to gain: its device's peak would fall by less than 1%"
    slow = choose_memory(PLAN, costs_of())
    assert fractions_of(slow) == [0.52, 0, 0, 0]  # of stage 1, a pass has not left when the next one begins
    assert slow.stages[1].why == choice.stages[2].why


def test_phases_meshes_and_recomputation() -> None:
    plan = dualpipev(devices=2, microbatches=8).on_mesh({"pp": 2, "dp": 2})
    layers = cut_layers(parse_layers("moe*4"), stages=4)
    costs = costs_of(2e11, recompute_bytes=4e8)
    choice = choose_memory(plan, costs, layers=layers, recompute=True, wgrad_microbatches=2)
    assert [stage.may_leave for stage in choice.stages] == [6e8] * 4
    assert any(fractions_of(choice))
    assert len(choice.devices) == 4


def test_the_given_policy_gets_the_fractions() -> None:
    policy = Memory(sites={"*norm": "recompute", "*": "offload"}, fraction="auto", min_bytes=0, copy_actions=2)
    choice = choose_memory(gpipe(devices=2, microbatches=8), costs_of(FAST), memory=policy)
    assert choice.memory == msgspec.structs.replace(policy, fraction=(1.0, 1.0))
    nothing = choose_memory(PLAN, costs_of(1), memory=policy)
    assert nothing.memory == msgspec.structs.replace(policy, fraction=0.0), "it still recomputes"


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no bytes": (
        {"costs": costs_of(activation_bytes=None)},
        CostError,
        "the costs have no activation_bytes to choose by; .*dry_run",
    ),
    "no bandwidth": (
        {"costs": costs_of(float("inf"))},
        CostError,
        r"the costs have no bandwidth to host memory; give h",
    ),
    "no costs": ({"costs": None}, CostError, "there are no costs to choose by; with a recorded"),
    "no plan": ({"plan": "gpipe"}, PlanError, "a plan is wanted"),
    "nothing offloaded": ({"memory": Memory(sites={"*": "recompute"})}, PlanError, "the policy offloads nothing"),
    "no policy": ({"memory": "k3"}, PlanError, "memory is a stretto.Memory"),
    "two bounds": ({"memory": Memory(sites={"*": "offload"}, max_in_flight=5)}, PlanError, "max_in_flight bounds what"),
    "limit": ({"limit": "much"}, PlanError, "limit: a size is a number of bytes such as 80GB"),
    "negative limit": ({"limit": -1}, PlanError, r"limit is a number of bytes, or a size such as 60GB \(got -1\)"),
    "large limit": ({"limit": 10**400}, PlanError, "limit is a number of bytes, or a size such as 60GB"),
    "slower": ({"slower": -0.1}, PlanError, r"slower is a share of the step, such as 0.01 for 1 % \(got -0.1\)"),
    "very slow": ({"slower": 10**400}, PlanError, "slower is a share of the step"),
    "no times": ({"costs": costs_of(unit=None, F=None, I=None, W=None)}, CostError, "the costs have no times"),
    "nothing may leave": (
        {"costs": costs_of(offload_bytes=0.0), "limit": "2GB"},
        PlanError,
        "device 0 holds 4 GB, and nothing may leave, 2 GB more than the limit of 2 GB; recompute something$",
    ),
    "all is too little": (
        {"costs": costs_of(offload_bytes=1e8), "limit": "2GB", "slower": 100},
        PlanError,
        "with all offloaded that may leave, device 0 holds .* more than the limit of 2 GB; recompute something$",
    ),
    "the link is too slow, however long the step": (
        {"costs": costs_of(1e9), "limit": "2GB"},
        PlanError,
        r"with all offloaded that may leave, device 0 holds .* more than the limit of 2 GB; recompute something$",
    ),
    "too little hides": (
        {"limit": "3.2GB"},
        PlanError,
        "with all offloaded that hides, device 0 holds .* or let the step become more than 1 % longer",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_one_line(name: str) -> None:
    changes, kind, says = WRONG[name]
    with pytest.raises(kind, match=says) as error:
        choose_memory(**{"plan": PLAN, "costs": costs_of(), **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [None, 50e9])
def test_few_simulations_suffice(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    runs, run = [], module._run
    monkeypatch.setattr(module, "_run", lambda *given: runs.append(0) or run(*given))
    choose_memory(dualpipev(devices=16, microbatches=48), costs_of(60e9, activation_bytes=2e9), limit=limit)
    assert 5 < len(runs) <= 25


def test_a_choice_prints_two_tables() -> None:
    assert str(choose_memory(PLAN, costs_of(), limit="3.75GB")) == (
        """\
Offload what makes the step at most 1 % longer, to hold at most 3.75 GB per device. A simulated step takes 570 ms, and \
570 ms without offload.

stage  held for  may leave          leaves  why
0       97.5 ms       1 GB  252 MB (25.2%)  limit reached
1       63.8 ms       1 GB               0  limit reached without it: its device holds less
2       31.3 ms       1 GB               0  nothing to gain: its device's peak would stay
3          0 µs       1 GB               0  needed again too soon to leave

device  peak before  peak after  copied each way  link could carry  host memory
0              4 GB     3.75 GB          4.03 GB           28.5 GB       856 MB
1              3 GB        3 GB                0           28.5 GB            0
2              2 GB        2 GB                0           28.5 GB            0
3              1 GB        1 GB                0           28.5 GB            0

Whole tensors leave, so a pass may keep one more than its share; a dry run with this policy counts exactly."""
    )
