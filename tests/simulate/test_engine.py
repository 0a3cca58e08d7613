from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import costs, plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes
from stretto.program.task import COMPUTE, RECEIVES, SENDS
from stretto.schedules import dualpipe, dualpipev, gpipe, one_f_one_b


def span(timeline: stretto.Timeline, name: str) -> tuple[float, float]:
    return next((found.start, found.end) for found in timeline.spans() if str(found.task) == name)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    table = Costs(message_bytes=6, link=Link(latency=0.5, bandwidth=4))
    timeline = stretto.simulate(gpipe(devices=2, microbatches=2), table)
    assert span(timeline, "0SEND_F0") == span(timeline, "1RECV_F0") == (1, 3)
    assert span(timeline, "1F0") == (3, 4)
    # The second transfer waits for the first on their lane.
    assert span(timeline, "0SEND_F1") == (3, 5)
    assert span(timeline, "1F1") == (5, 6)


def test_each_directed_link_has_its_own_lane_and_may_have_its_own_cost() -> None:
    table = Costs(link=Link(latency=1), links={"1>0": Link(latency=5)})
    timeline = stretto.simulate(one_f_one_b(devices=2, microbatches=1), table)
    assert span(timeline, "0SEND_F0") == (1, 2)
    assert span(timeline, "1SEND_B0") == (5, 10)


def test_message_bytes_belong_to_the_stage_before_the_boundary() -> None:
    table = Costs(message_bytes=(1, 10, 100), link=Link(bandwidth=1))
    timeline = stretto.simulate(gpipe(devices=3, microbatches=1), table)
    times = {str(found.task): found.end - found.start for found in timeline.spans()}
    assert times["0SEND_F0"] == times["1SEND_B0"] == 1
    assert times["1SEND_F0"] == times["2SEND_B0"] == 10


def test_stages_and_devices_may_differ() -> None:
    table = Costs(F=(1, 5), B=(2, 3), slowdown=(1, 2))
    timeline = stretto.simulate(gpipe(devices=2, microbatches=1), table)
    assert [span(timeline, name) for name in ("0F0", "1F0", "1B0", "0B0")] == [(0, 1), (1, 11), (11, 17), (17, 19)]


def test_a_pair_of_unlike_stages_saves_the_mean_of_what_they_save() -> None:
    table = Costs(F=(1, 2), B=(3, 4), FB=(3, 6))  # stage 0 saves 1 by weaving, stage 1 nothing
    plan = dualpipev(devices=1, microbatches=2)
    timeline = stretto.simulate(plan, table)
    start, end = span(timeline, "(1F1;0B0)OVERLAP_F_B")
    assert end - start == 2 + 3 - (1 + 0) / 2


def test_the_gradient_leaves_before_the_weight_part_when_costs_say_how_long_that_is() -> None:
    plan = one_f_one_b(devices=2, microbatches=1)
    timeline = stretto.simulate(plan, Costs(BW=1, link=Link(latency=1)))
    assert span(timeline, "1B0") == (3, 4)
    assert span(timeline, "1B0.wgrad") == (4, 5)
    assert span(timeline, "1SEND_B0") == (4, 5)
    assert span(timeline, "0B0") == (5, 6)


@given(plans(), st.tuples(costs, costs, costs), st.integers(0, 3))
def test_no_lane_overlaps_and_nothing_starts_early(
    plan: stretto.Plan, times: tuple[int, int, int], latency: int
) -> None:
    f, i, w = times
    timeline = stretto.simulate(plan, Costs(F=f, I=i, W=w, BW=w, link=Link(latency=latency)))
    program = timeline.program
    lanes: dict[object, float] = defaultdict(float)
    for index, found in enumerate(timeline.spans()):
        assert found.start >= lanes[found.task.lane]
        lanes[found.task.lane] = found.end
        assert all(timeline.end[need] <= found.start for need in program.needs(index))
        # Nothing idles without a reason: something it waits for ends just as it starts.
        if found.task.kind in COMPUTE and found.start > 0:
            previous = [
                other.end
                for other in timeline.spans()
                if other.task.lane == found.task.lane and other.end <= found.start
            ]
            assert found.start in [timeline.end[need] for need in program.needs(index)] + previous
        if found.task.kind in SENDS:
            counterpart = program.counterpart[index]
            assert (timeline.start[counterpart], timeline.end[counterpart]) == (found.start, found.end)


@given(plans(), st.integers(1, 3))
def test_time_scales_with_costs(plan: stretto.Plan, factor: int) -> None:
    once = stretto.simulate(plan, Costs(F=1, I=2, W=1))
    more = stretto.simulate(plan, Costs(F=factor, I=2 * factor, W=factor))
    assert more.makespan == factor * once.makespan


def test_a_program_read_from_a_file_in_any_device_order_simulates_alike() -> None:
    program = stretto.lower(dualpipe(devices=4, microbatches=8))
    again = stretto.parse_program(str(program))
    assert (program.need < program.needing).all()
    assert not (again.counterpart[again.counterpart >= 0] == program.counterpart[program.counterpart >= 0]).all()
    assert stretto.simulate(again).summary() == stretto.simulate(program).summary()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"F": -1}, "F must be a number of at least 0 (got -1"),
        ({"F": float("nan")}, "F must be a number of at least 0 (got nan)"),
        ({"F": float("inf")}, "F must be a number of at least 0 (got inf)"),
        ({"links": {"0>": Link()}}, "a link is named"),
        ({"link": Link(bandwidth=0)}, "link.bandwidth must be a number above 0"),
        ({"slowdown": (1.0, -2.0)}, "slowdown must be"),
        ({"F": "1"}, "F must be a number of at least 0 (got '1')"),
        ({"BW": None}, "BW must be a number of at least 0 (got None)"),
        ({"F": ()}, "F is an empty list"),
        ({"F": 10**400}, "F must be a number of at least 0"),
        ({"link": Link(bandwidth=10**400)}, "link.bandwidth must be a number above 0"),
        ({"F": True}, "F must be a number of at least 0 (got True)"),
        ({"link": 3}, "link must be a Link (got 3)"),
        ({"phases": {"attn": 3}}, "phases.attn must be PhaseTimes (got 3)"),
        ({"phases": {"attn": PhaseTimes(F=-1)}}, "phases.attn.F must be a number of at least 0 (got -1)"),
        ({"links": {(0, 1): Link()}}, "links is a table with names as keys"),
        ({"links": 3}, "links is a table with names as keys (got 3)"),
        ({"calls": {1: 2}}, "calls is a table with names as keys"),
        ({"phases": [1]}, "phases is a table with names as keys"),
        ({"shared": None}, "shared is a table with names as keys"),
        ({"slowdown": 2}, "slowdown is a list with a factor for each device (got 2)"),
        ({"reduce_tied": (1, 2)}, "reduce_tied must be a number of at least 0 (got (1, 2))"),
        ({"link": Link(bandwidth="1")}, "link.bandwidth must be a number above 0 (got '1')"),
    ],
)
def test_senseless_costs_are_refused(table: dict[str, object], says: str) -> None:
    with pytest.raises(stretto.CostError) as caught:
        Costs(**table)  # type: ignore[arg-type]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (Costs(F=(1, 2, 3)), "F has 3 entries, but the plan has 2 stages"),
        (Costs(slowdown=(1.0,)), "slowdown has 1 entries, but the plan has 2 devices"),
        (Costs(links={"0>2": Link()}), "names device 2, but there are only 2 devices"),
        (Costs(BW=3), "BW is a part of B, but exceeds it on stage 0 (3 > 2)"),
    ],
)
def test_costs_that_do_not_fit_the_plan_are_refused(table: Costs, says: str) -> None:
    with pytest.raises(stretto.CostError) as caught:
        stretto.simulate(gpipe(devices=2, microbatches=1), table)
    assert says in str(caught.value)


@pytest.mark.parametrize("table", [Costs(F=1e308), Costs(message_bytes=1e300, link=Link(bandwidth=1e-300))])
def test_a_step_too_long_for_a_number_is_refused(table: Costs) -> None:
    with pytest.raises(stretto.CostError, match="longer than a number can say"):
        stretto.simulate(gpipe(devices=2, microbatches=4), table)


def test_a_link_of_almost_no_bandwidth_moves_nothing_in_no_time() -> None:
    table = Costs(message_bytes=0, link=Link(bandwidth=1e-320))
    assert stretto.simulate(gpipe(devices=2, microbatches=1), table).makespan == 6


def test_lists_are_as_good_as_tuples() -> None:
    assert Costs(F=[1, 2], slowdown=[1, 2]) == Costs(F=(1, 2), slowdown=(1, 2))  # type: ignore[arg-type]


def test_transfers_show_in_no_metric_when_they_take_no_time() -> None:
    timeline = stretto.simulate(one_f_one_b(devices=4, microbatches=8))
    assert {found.end - found.start for found in timeline.spans() if found.task.kind in (*SENDS, *RECEIVES)} == {0}
    assert {device.exposed_transfer for device in timeline.summary().devices} == {0}
