"""The trace against the documented fields of the format, and against the timeline it shows."""

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes, Unit, WovenTimes
from stretto.layers import DENSE, MOE
from stretto.schedules import dualpipe, gpipe, one_f_one_b
from stretto.timeline.trace import parse_trace, trace_json

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ph", "ts", "pid", "args"},
}


def events_of(timeline: stretto.Timeline, costs: Costs | None = None) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace_json(timeline, costs=costs))["traceEvents"]:
        assert set(event) >= REQUIRED[event["ph"]]
        found[event["ph"]].append(event)
    return found


@given(plans())
def test_slices_are_the_timelines_spans(plan: stretto.Plan) -> None:
    timeline = stretto.simulate(plan, Costs(link=Link(latency=0.5)))
    events = events_of(timeline)
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events["M"] if event["name"] == "thread_name"
    }
    shown = [
        (event["pid"], lanes[event["pid"], event["tid"]], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events["X"]
    ]
    assert shown == [
        (
            span.task.device,
            str(span.task.lane),
            str(span.task).removesuffix("OVERLAP_F_B"),
            span.start * 1000,
            span.end * 1000,
        )
        for span in timeline.spans()
    ]


def measured(timeline: stretto.Timeline) -> stretto.Timeline:
    """The same as if a step had been measured so: in seconds that no file can hold as round numbers."""
    return stretto.Timeline(timeline.program, timeline.start / 300 + 1 / 3, timeline.end / 300 + 1 / 3)


def test_seconds_are_shown_as_microseconds_and_read_back_as_seconds() -> None:
    timeline = measured(stretto.simulate(one_f_one_b(devices=2, microbatches=4)))
    events = events_of(timeline)
    for event, span in zip(events["X"], timeline.spans(), strict=True):
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
    assert max(event["ts"] for event in events["C"]) <= timeline.end.max() * 1e6
    again = parse_trace(trace_json(timeline))
    assert again.unit == "s"
    assert same(timeline, again)


def test_what_is_simulated_with_fitted_seconds_is_in_seconds() -> None:
    timeline = measured(stretto.simulate(one_f_one_b(devices=2, microbatches=4)))
    fitted = stretto.simulate(timeline.program, stretto.fit(timeline))
    assert fitted.unit == "s"
    assert events_of(fitted)["X"][-1]["ts"] == pytest.approx(fitted.start[-1] * 1e6)
    assert stretto.simulate(timeline.program).unit is None


def test_a_trace_of_before_units_is_read_as_times_without_one() -> None:
    timeline = measured(stretto.simulate(gpipe(devices=2, microbatches=2)))
    trace = json.loads(trace_json(timeline))
    assert trace["otherData"]["stretto"].pop("unit") == "s"
    again = parse_trace(json.dumps(trace))
    assert again.unit is None
    assert np.array_equal(again.start, timeline.start)


def test_an_arrow_leads_from_each_send_to_its_receive() -> None:
    timeline = stretto.simulate(one_f_one_b(devices=3, microbatches=2), Costs(link=Link(latency=1)))
    events = events_of(timeline)
    starts, ends = ({event["id"]: event for event in events[ph]} for ph in ("s", "f"))
    assert len(starts) == len(events["s"]) == 8
    assert set(starts) == set(ends)
    assert all(abs(starts[k]["pid"] - ends[k]["pid"]) == 1 and ends[k]["ts"] - starts[k]["ts"] == 1000 for k in starts)


def test_memory_is_counted() -> None:
    costs = Costs(activation_bytes=7)
    timeline = stretto.simulate(one_f_one_b(devices=2, microbatches=4), costs)
    counters = events_of(timeline, costs)["C"]
    passes = [
        event["args"]["activations"] for event in counters if event["name"] == "stage passes held" and not event["pid"]
    ]
    assert max(passes) == 2
    assert max(event["args"]["bytes"] for event in counters if event["name"] == "bytes held") == 14


def test_devices_and_lanes_are_named_and_sorted() -> None:
    events = events_of(stretto.simulate(gpipe(devices=2, microbatches=1)))["M"]
    assert {event["name"] for event in events} == {
        "process_name",
        "process_sort_index",
        "thread_name",
        "thread_sort_index",
    }
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["device 0", "device 1"]


def same(a: stretto.Timeline, b: stretto.Timeline) -> bool:
    columns = [(x.work.columns(), x.need, x.need_start, x.counterpart) for x in (a.program, b.program)]
    lanes = [[x.lanes[k] for k in x.lane] for x in (a.program, b.program)]
    tasks = [list(map(str, x.tasks())) for x in (a.program, b.program)]
    return (
        all(np.array_equal(p, q) for p, q in zip(columns[0][0], columns[1][0], strict=True))
        and all(np.array_equal(p, q) for p, q in zip(columns[0][1:], columns[1][1:], strict=True))
        and lanes[0] == lanes[1]
        and tasks[0] == tasks[1]
        and a.program.placement == b.program.placement
        and np.array_equal(a.start, b.start)
        and np.array_equal(a.end, b.end)
        and a.unit == b.unit
    )


@given(plans(), st.booleans(), st.integers(0, 1), st.booleans(), st.sampled_from(["s", None]))
def test_a_trace_is_read_back_as_it_was(
    plan: stretto.Plan, phases: bool, offload: int, recompute: bool, unit: Unit
) -> None:
    layers = [[MOE, DENSE]] * plan.stages if phases else None
    link, host = Link(latency=1 / 3), Link(bandwidth=0.7)
    costs = Costs(unit=unit, F=1, I=1, W=1, link=link, activation_bytes=1, recompute_bytes=0, host=host)
    program = stretto.lower(plan, layers=layers, offload=offload, recompute=recompute)
    timeline = stretto.simulate(program, costs)
    again = parse_trace(trace_json(timeline, costs=costs))
    assert same(timeline, again)
    assert stretto.check(again.program) == []
    assert again.summary(costs) == timeline.summary(costs)


def test_an_old_trace_has_no_host_buffers() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=4), offload=1)
    trace = json.loads(trace_json(stretto.simulate(program)))
    for event in trace["traceEvents"]:
        if event.get("cat") == "d2h":
            del event["args"]["slot"]
    again = parse_trace(json.dumps(trace)).program
    assert stretto.check(again) == []
    assert (program.host_buffers(0), again.host_buffers(0)) == ({0: 0, 1: 0, 2: 0}, {})


@pytest.mark.parametrize("devices", [1, 3])
def test_an_update_is_read_back_with_an_arrow_to_every_destination(devices: int) -> None:
    timeline = stretto.simulate(stretto.weight_update(devices=devices, buckets=5, mode="overlap_all"))
    assert same(timeline, parse_trace(trace_json(timeline)))
    events = events_of(timeline)
    assert len(events["s"]) == len(events["f"]) == 5 * (devices - 1)
    assert {event["id"] for event in events["s"]} == {event["id"] for event in events["f"]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda trace: trace.pop("otherData"), "not a trace of Stretto's"),
        (lambda trace: trace["otherData"].pop("stretto"), "does not say which program it shows"),
        (lambda trace: trace.update(traceEvents=[]), "shows no tasks"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(kind="DREAM"), "Invalid enum value 'DREAM'"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(kind="RELOAD"), "RELOAD is not done on a lane compute"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(kind="PAIR"), "a pair, and only a pair, has a backward"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(woven=True), "only the phases of a pair are woven"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(peer=1), "is not done on a lane compute"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(stage=7), "stage 7 does not exist; there are 2"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(stage=2**63), "Expected `int`"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(part=3), "WGRAD of stage 0 has no part 3"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(lane="fast"), "WGRAD is not done on a lane fast"),
        (lambda trace: trace["traceEvents"][-1].update(pid=10**9), "device 1000000000 does not exist; there are 2"),
        (lambda trace: trace["otherData"]["stretto"].update(routes=[[0, 5]]), None),
        (lambda trace: trace["otherData"]["stretto"].update(microbatches=10**9), "far more tasks than it shows"),
        (lambda trace: trace["otherData"]["stretto"].update(layers=[[]]), "2 stages, but layers for 1"),
        (lambda trace: trace["otherData"]["stretto"].update(unit="h"), "Invalid enum value 'h'"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(end=-1), "ends before it starts"),
        (lambda trace: trace["traceEvents"][-1]["args"].update(stage="x"), "Expected `int`"),
    ],
)
def test_a_broken_trace_is_refused(change: Callable[[dict[str, Any]], Any], says: str | None) -> None:
    trace = json.loads(trace_json(stretto.simulate(gpipe(devices=2, microbatches=1))))
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    change(trace)
    if says is None:  # it can be read, and is found to be unsound
        assert stretto.check(parse_trace(json.dumps(trace)).program)
        return
    with pytest.raises(stretto.TextError) as caught:
        parse_trace(json.dumps(trace))
    assert says in str(caught.value)


def woven_step() -> stretto.Timeline:
    """A step whose phases take twice as long in pairs."""
    times = {name: PhaseTimes(1, 1, 1) for name in ("attn", "dispatch", "mlp", "combine")}
    costs = Costs(phases=times, woven={name: WovenTimes(2, 2, 2) for name in times})
    plan = dualpipe(devices=2, microbatches=8)
    return stretto.simulate(stretto.lower(plan, layers=[[MOE]] * 2, costs=costs), costs)


def test_a_trace_says_what_was_woven() -> None:
    timeline = woven_step()
    again = parse_trace(trace_json(timeline))
    assert same(timeline, again)
    assert stretto.fit(again) == stretto.fit(timeline)
    assert stretto.fit(again).woven["moe.attn"] == WovenTimes(2, 2, 2)


def test_a_trace_of_before_woven_times_is_read_as_if_nothing_was_woven() -> None:
    timeline = woven_step()
    trace = json.loads(trace_json(timeline))
    slices = [event["args"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {args.pop("woven", False) for args in slices} == {True, False}
    again = parse_trace(json.dumps(trace))
    assert not again.program.work.woven.any()
    assert np.array_equal(again.end, timeline.end)
    assert stretto.check(again.program) == []
    assert not stretto.fit(again).woven


@pytest.mark.parametrize("kind", ["SEND_F", "REDUCE", "I", "W"])
def test_only_phases_of_pairs_are_woven(kind: str) -> None:
    trace = json.loads(trace_json(woven_step()))
    next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["kind"] == kind)["args"].update(woven=True)
    with pytest.raises(stretto.TextError, match="only the phases of a pair are woven"):
        parse_trace(json.dumps(trace))


@pytest.mark.parametrize("edit", [{"counterpart": 0}, {"needs": [0]}, {"counterpart": 7}])
def test_a_broken_update_is_refused(edit: dict[str, Any]) -> None:
    trace = json.loads(trace_json(stretto.simulate(stretto.weight_update(devices=2, buckets=2))))
    next(event for event in trace["traceEvents"] if event["ph"] == "X")["args"].update(edit)
    with pytest.raises(stretto.TextError, match="refers to one that is not there"):
        parse_trace(json.dumps(trace))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(stretto.TextError, match="not a trace of Stretto's"):
        parse_trace("0F0,0B0")
