"""The trace against the documented fields of the format, and against the timeline it shows."""

import json
from collections import defaultdict
from typing import Any

from hypothesis import given

import stretto
from strategies import plans
from stretto import Costs, Link

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ph", "ts", "pid", "args"},
}


def events_of(timeline: stretto.Timeline, costs: Costs | None = None) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(stretto.draw_trace(timeline, costs=costs))["traceEvents"]:
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


def test_an_arrow_leads_from_each_send_to_its_receive() -> None:
    timeline = stretto.simulate(stretto.one_f_one_b(devices=3, microbatches=2), Costs(link=Link(latency=1)))
    events = events_of(timeline)
    starts, ends = ({event["id"]: event for event in events[ph]} for ph in ("s", "f"))
    assert len(starts) == len(events["s"]) == 8
    assert set(starts) == set(ends)
    assert all(abs(starts[k]["pid"] - ends[k]["pid"]) == 1 and ends[k]["ts"] - starts[k]["ts"] == 1000 for k in starts)


def test_memory_is_counted() -> None:
    costs = Costs(activation_bytes=7)
    timeline = stretto.simulate(stretto.one_f_one_b(devices=2, microbatches=4), costs)
    counters = events_of(timeline, costs)["C"]
    passes = [
        event["args"]["activations"] for event in counters if event["name"] == "stage passes held" and not event["pid"]
    ]
    assert max(passes) == 2
    assert max(event["args"]["bytes"] for event in counters if event["name"] == "bytes held") == 14


def test_devices_and_lanes_are_named_and_sorted() -> None:
    events = events_of(stretto.simulate(stretto.gpipe(devices=2, microbatches=1)))["M"]
    assert {event["name"] for event in events} == {
        "process_name",
        "process_sort_index",
        "thread_name",
        "thread_sort_index",
    }
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["device 0", "device 1"]
