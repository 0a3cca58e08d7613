"""The bytes that were allocated when tasks had been issued."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto import Call, Costs, StrettoError, load_timeline, program_of
from stretto.costs import Link
from stretto.schedules import gpipe, one_f_one_b
from stretto.timeline import Timeline
from stretto.timeline.trace import parse_trace, trace_json


@st.composite
def recorded(draw: st.DrawFn) -> Timeline:
    """A step with bytes that are drawn for each task; on other lanes, tasks may end at any time."""
    timeline = stretto.simulate(draw(plans(devices=4, microbatches=6)), Costs(link=Link(latency=0.5)))
    draws = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    end = np.where(timeline.program.compute, timeline.end, timeline.end + draws.uniform(0, 20, len(timeline.end)))
    allocated = draws.integers(0, 2 ** draw(st.integers(1, 48)), len(end)).astype(np.float64)
    return replace(timeline, end=end, unit="s", allocated=allocated)


@given(recorded())
def test_numbers_stay_in_the_order_of_issue(timeline: Timeline) -> None:
    """Where compute tells the time: a task's number stands at its end, unless the next compute task ends before."""
    program, curves = timeline.program, timeline.allocated_memory()
    assert timeline.allocated is not None
    assert curves is not None
    assert [curve.task.tolist() for curve in curves] == [
        [task for task in range(len(program)) if program.device[task] == device] for device in range(program.devices)
    ]
    for curve in curves:
        assert (np.diff(curve.time) >= 0).all()
        assert curve.bytes.tolist() == timeline.allocated[curve.task].tolist()
        for at, task in enumerate(curve.task.tolist()):
            after = [other for other in curve.task[at:].tolist() if program.compute[other]]
            latest = timeline.end[after[0]] if after else np.inf
            if program.compute[task]:
                assert curve.time[at] == timeline.end[task]
            else:
                earlier = curve.time[at - 1] if at else -np.inf
                assert curve.time[at] == max(earlier, min(timeline.end[task], latest))


@given(recorded())
def test_a_file_gives_the_bytes_back_to_the_bit(timeline: Timeline) -> None:
    again = parse_trace(trace_json(timeline))
    assert timeline.allocated is not None
    assert again.allocated is not None
    assert again.allocated.tolist() == timeline.allocated.tolist()
    assert again.summary() == timeline.summary()


def hand_made() -> Timeline:
    """Two calls of compute, and a message that is asked for before the first and comes after the second."""
    program = program_of([Call("ask", lane="net"), Call("one"), Call("other", lane="net"), Call("two")])
    times = np.array([[0, 9], [1, 2], [9, 10], [3, 4]], dtype=float).T
    return Timeline(program, *times, "s", allocated=np.array([5.0, 30.0, 20.0, 10.0]))


def test_a_curve_by_hand() -> None:
    timeline = hand_made()
    (curve,) = timeline.allocated_memory() or []
    assert curve.time.tolist() == [2, 2, 4, 4]
    assert curve.bytes.tolist() == [5, 30, 20, 10]
    assert curve.peak_bytes == timeline.summary().devices[0].peak_allocated == 30


def test_perfetto_draws_the_curve() -> None:
    events = json.loads(trace_json(hand_made()))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "bytes allocated"]
    assert [(event["pid"], event["ts"], event["args"]["bytes"]) for event in counters] == [
        (0, 2e6, 5),
        (0, 2e6, 30),
        (0, 4e6, 20),
        (0, 4e6, 10),
    ]


def test_without_a_record_there_is_no_number(tmp_path: Path) -> None:
    timeline = stretto.simulate(one_f_one_b(devices=2, microbatches=4), Costs(activation_bytes=1))
    timeline.save(tmp_path / "x.trace.json")
    assert "allocated" not in (tmp_path / "x.trace.json").read_text()  # as files were before
    for found in (timeline, load_timeline(tmp_path / "x.trace.json")):
        assert found.allocated is None
        assert found.allocated_memory() is None
        assert [device.peak_allocated for device in found.summary().devices] == [None, None]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda args: args.pop("allocated"), "it says of some tasks only how many bytes were allocated"),
        (lambda args: args.update(allocated=None), "it says of some tasks only how many bytes were allocated"),
        (lambda args: args.update(allocated=-1), "the allocated size of a task is not a number of bytes"),
        (lambda args: args.update(allocated="1 GB"), "Expected `float | null`"),
    ],
)
def test_a_file_with_other_than_one_size_for_each_task_is_refused(change: Callable[[Any], Any], says: str) -> None:
    trace = json.loads(trace_json(hand_made()))
    change(next(event for event in trace["traceEvents"] if event["ph"] == "X")["args"])
    with pytest.raises(stretto.TextError) as caught:
        parse_trace(json.dumps(trace))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("allocated", "wrong"),
    [
        (np.zeros(1), r"one allocated size for each of its \d+ tasks"),
        (np.full(4, np.nan), "the allocated size of a task is not a number of bytes"),
        (np.array([0.0, 1.0, np.inf, 0.0]), "the allocated size of a task is not a number of bytes"),
        (np.full(4, -1.0), "the allocated size of a task is not a number of bytes"),
        ([0.0] * 4, "the allocated sizes of a timeline are an array of numbers"),
        (np.array([None] * 4), "the allocated sizes of a timeline are an array of numbers"),
    ],
)
def test_sizes_that_cannot_be_are_refused(allocated: Any, wrong: str) -> None:
    with pytest.raises(StrettoError, match=wrong):
        replace(hand_made(), allocated=allocated)


def test_the_peaks_of_both_kinds_are_those_of_each_device() -> None:
    costs = Costs(activation_bytes=7)
    timeline = stretto.simulate(gpipe(devices=2, microbatches=3), costs)
    counted = replace(timeline, allocated=10.0 + timeline.program.device)
    peaks = [(device.peak_bytes, device.peak_allocated) for device in counted.summary(costs).devices]
    assert peaks == [(21, 10), (21, 11)]
