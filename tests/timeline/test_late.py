"""Idle time because the host had not issued a task yet."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto import Call, Costs, StrettoError, program_of
from stretto.costs import Link
from stretto.draw.figure import boxes_of
from stretto.schedules import gpipe
from stretto.timeline import Timeline
from stretto.timeline.trace import parse_trace, trace_json


def issued_at(timeline: Timeline, issued: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Timeline:
    return Timeline(timeline.program, timeline.start, timeline.end, timeline.unit, issued)


def names(timeline: Timeline) -> list[str]:
    return [f"{task.device} {task}" for task in timeline.program.tasks()]


def test_only_what_could_have_run_is_late() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=2))
    assert [str(task) for task in program.tasks()][:2] == ["0F0", "0F1"]
    start = np.array([0.0, 3.0, *np.arange(10.0, 10.0 + len(program) - 2)])
    end = start + 1.0
    issued = np.array([-1.0, 2.5, *start[2:]])
    timeline = Timeline(program, start, end, "s", issued)
    late = timeline.host_late()
    assert late[0] == 0  # issued before the step began
    assert late[1] == 1.5  # free from 1 on, issued at 2.5; what it then waited for is not the host's
    assert late[2] == 6  # issued when it started
    assert timeline.summary().devices[0].host_late == late.sum()


def test_a_task_that_waits_for_what_it_needs_is_not_late() -> None:
    plan = gpipe(devices=2, microbatches=1)
    timeline = stretto.simulate(plan, Costs(link=Link(latency=5), unit="s", F=1, I=1, W=1))
    whole = issued_at(timeline, timeline.start.copy())  # issued at the last moment, and yet never late
    assert whole.host_late().max() == 0
    assert [device.host_late for device in whole.summary().devices] == [0, 0]


def test_either_end_of_a_transfer_can_be_late() -> None:
    plan = gpipe(devices=2, microbatches=1)
    timeline = stretto.simulate(plan, Costs(link=Link(latency=5), unit="s", F=1, I=1, W=1))
    tasks = names(timeline)
    send, receive = (next(k for k, name in enumerate(tasks) if part in name) for part in ("SEND_F", "RECV_F"))
    start, end = timeline.start.copy(), timeline.end.copy()
    after = start > start[send]
    start[after | (np.arange(len(start)) == send) | (np.arange(len(start)) == receive)] += 2
    end[end > timeline.start[send]] += 2
    for task in (send, receive):
        issued = timeline.start - 1
        issued[task] = start[task]
        late = Timeline(timeline.program, start, end, "s", issued).host_late()
        assert {k for k, time in enumerate(late) if time} == {task}
        assert late[task] == 2


@given(plans(devices=4, microbatches=6), st.integers(0, 2**32 - 1))
def test_by_hand(plan: stretto.Plan, seed: int) -> None:
    timeline = stretto.simulate(plan, Costs(link=Link(latency=0.5), unit="s", F=1, I=1, W=1))
    program, draws = timeline.program, np.random.default_rng(seed)
    timeline = issued_at(timeline, timeline.start + draws.uniform(-3, 1, len(program)))
    assert timeline.issued is not None
    last: dict[int, int] = {}
    alone = []
    for task in range(len(program)):
        before = last.get(program.lane.item(task))
        last[program.lane.item(task)] = task
        waited = [*program.needs(task), *([] if before is None else [before])]
        alone.append(max([timeline.end.item(other) for other in waited], default=timeline.start.min()))
    late = timeline.host_late()
    for task in range(len(program)):
        ready = max(alone[end] for end in program.ends(task))
        assert late[task] == max(0, min(timeline.start[task], timeline.issued[task]) - ready)


def two_devices(**issued: float) -> Timeline:
    """A forward on each of two devices: the first ends at 1, its message could be moved from 1 on, and is from 5 on."""
    program = stretto.lower(gpipe(devices=2, microbatches=1))
    given = {"0F0": (0, 1), "0SEND_F0": (5, 6), "1RECV_F0": (5, 6), "1F0": (7, 8)}
    later = iter(range(10, 99, 2))
    times = []
    for task in program.tasks():
        start, end = given.get(str(task)) or (begin := next(later), begin + 1)
        times.append((start, end, issued.get(str(task), -1)))
    return Timeline(program, *np.array(times, dtype=float).T[:2], "s", np.array(times, dtype=float).T[2])


def test_compute_that_waits_for_what_was_not_issued_is_idle_because_of_a_host() -> None:
    received = two_devices(**{"1RECV_F0": 4})  # what it waited for from 4 to 5 is not the host's
    assert received.summary().devices[1].host_late == 3
    assert received.summary().devices[1].exposed_transfer == 1
    sent = two_devices(**{"0SEND_F0": 5})  # by the other host
    assert sent.summary().devices[1].host_late == 4
    assert '"0SEND_F0 on device 0 not issued yet"' in trace_json(sent)
    both = two_devices(**{"0SEND_F0": 5, "1RECV_F0": 3, "1F0": 6.5})  # the last of the ends, and then the task itself
    assert both.summary().devices[1].host_late == 4.5
    assert both.summary().devices[0].host_late == 0
    assert "!" in stretto.draw_text(sent, width=200).splitlines()[1]
    assert "!" not in stretto.draw_text(sent, width=200).splitlines()[0]


@given(plans(devices=4, microbatches=6), st.integers(0, 2**32 - 1))
def test_idle_time_is_counted_once(plan: stretto.Plan, seed: int) -> None:
    timeline = stretto.simulate(plan, Costs(link=Link(latency=0.5), unit="s", F=1, I=1, W=1))
    draws = np.random.default_rng(seed)
    timeline = issued_at(timeline, timeline.start + draws.uniform(-3, 1, len(timeline.program)))
    gaps, compute = timeline.late_gaps(), timeline.program.compute
    assert gaps.total(len(timeline.program))[compute].sum() >= timeline.host_late()[compute].sum() - 1e-9
    for device, found in enumerate(timeline.summary().devices):
        own = timeline.program.device[gaps.task] == device
        assert np.isclose(found.host_late, (gaps.end - gaps.begin)[own].sum())
        assert found.host_late <= found.bubble + 1e-9
        pieces = sorted(zip(gaps.begin[own], gaps.end[own], strict=True))
        pieces += sorted(
            (span.start, span.end)
            for span in timeline.spans()
            if span.task.device == device and span.end > span.start and span.task.lane.name == "compute"
        )
        ordered = sorted(pieces)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(ordered))


def test_rings_of_many_lengths_take_no_longer() -> None:
    lengths = (2, 3, 5, 7, 11, 13, 17, 19, 23)
    calls, first = [], 0
    for length in lengths:
        calls += [Call(f"meet{length}", device) for device in range(first, first + length)]
        first += length
    program = program_of(calls)
    begin = np.arange(len(program), dtype=float)
    timeline = Timeline(program, begin, begin + 1, "s", begin)
    assert len(timeline.host_late()) == sum(lengths)  # the least common multiple is 223,092,870


def test_it_is_shown_on_the_compute_lane_of_an_own_program() -> None:
    program = program_of([Call("load", lane="disk"), Call("work"), Call("more")])
    start = np.array([0.0, 0.0, 6.0])
    timeline = Timeline(program, start, start + 2, "s", np.array([0.0, 0.0, 6.0]))
    disk, compute = stretto.draw_text(timeline, width=60).splitlines()[:2]
    assert "disk" in disk and "!" not in disk  # noqa: PT018
    assert "compute" in compute and "!" in compute  # noqa: PT018
    assert any(box.colour == "#d62728" and box.row == 1.4 for box in boxes_of(timeline, lanes=True))


@pytest.mark.parametrize("fillers", [1, 3, 20_000])
@pytest.mark.parametrize("scale", [1e-16, 1e-6, 1.0, 1e140])
def test_pieces_are_exact_among_many_tasks_and_at_any_scale(fillers: int, scale: float) -> None:
    waits = [Call("x", lane="X"), Call("y", lane="Y"), Call("w", needs=["x", "y"])]
    program = program_of([*(Call(f"f{k}", lane="fill") for k in range(fillers)), *waits])
    start = np.zeros(len(program))
    start[-3:] = np.array([5.0, 7.0, 9.0]) * scale
    end = start.copy()
    end[fillers - 1] = 100.0
    end[-3:] = np.array([6.0, 8.0, 10.0]) * scale
    gaps = Timeline(program, start, end, "s", start).late_gaps()
    assert [program.task(cause).phase for cause in gaps.cause.tolist()] == ["x", "y", "w"]
    assert gaps.begin.tolist() == [0, 5 * scale, 8 * scale]
    assert gaps.end.tolist() == [5 * scale, 7 * scale, 9 * scale]


def test_it_is_shown_where_no_compute_takes_time() -> None:
    program = program_of([Call("z", lane="d"), Call("a")])
    timeline = Timeline(program, np.array([0.0, 9]), np.array([1.0, 9]), "s", np.array([0.0, 9]))
    assert timeline.summary().devices[0].host_late == 9
    assert trace_json(timeline).count('"a not issued yet"') == 2  # where it begins and ends
    assert "!" in stretto.draw_text(timeline, width=60).splitlines()[1]


@pytest.mark.parametrize(
    ("times", "wrong"),
    [
        ((np.zeros(1), None, None), r"one start time for each of its \d+ tasks"),
        ((None, None, np.zeros(1)), r"one issue time for each of its \d+ tasks"),
        ((None, None, np.full(4, np.nan)), "issue time of a task is not a number that a clock could show"),
        ((None, np.full(4, np.inf), None), "end time of a task is not a number that a clock could show"),
        ((np.full(4, -1e308), np.full(4, 1e308), None), "not a number that a clock could show"),
        (([0.0] * 4, None, None), "start times of a timeline are an array of numbers"),
        ((None, np.array(["1"] * 4), None), "end times of a timeline are an array of numbers"),
        ((None, np.ma.array(np.ones(4), mask=[0, 1, 0, 0]), None), "are an array of numbers"),
        ((None, np.ones(4, dtype=complex), None), "are an array of numbers"),
        ((None, None, np.array([None] * 4)), "issue times of a timeline are an array of numbers"),
        ((np.ones(4), np.zeros(4), None), "a task ends before it starts"),
    ],
)
def test_times_that_cannot_be_are_refused(times: tuple[Any, Any, Any], wrong: str) -> None:
    program = program_of([Call(name) for name in "abcd"])
    start, end, issued = times
    whole = np.zeros(4) if start is None else start, np.ones(4) if end is None else end
    with pytest.raises(StrettoError, match=wrong):
        Timeline(program, *whole, "s", issued)
    with pytest.raises(StrettoError, match='is "s", or None if it has no name'):
        Timeline(program, np.zeros(4), np.ones(4), "ms")  # type: ignore[arg-type]


def test_a_figure_of_what_takes_no_time_in_compute(tmp_path: Path) -> None:
    program = stretto.lower(gpipe(devices=2, microbatches=1))
    start = np.arange(len(program), dtype=float)
    stretto.draw.draw_figure(Timeline(program, start, start, "s"), tmp_path / "still.png")
    assert (tmp_path / "still.png").stat().st_size


def test_a_figure_shows_short_gaps_too(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    program = stretto.lower(gpipe(devices=1, microbatches=30))
    start = np.arange(len(program)) * 1.001
    early = np.zeros(len(program))
    one, all_ = early.copy(), start
    one[-1] = start[-1]  # which has the legend too
    red = []
    for name, issued in (("early", early), ("one", one), ("all", all_)):
        stretto.draw.draw_figure(Timeline(program, start, start + 1, "s", issued), tmp_path / f"{name}.png")
        pixels = image.imread(tmp_path / f"{name}.png")
        red.append(int(((pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.6) & (pixels[..., 2] < 0.6)).sum()))
    assert red[1] > red[0]
    assert red[2] > red[1] + 59  # a pixel for each gap


def test_it_is_drawn_and_kept() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=2))
    start = np.arange(len(program)) * 2.0
    timeline = Timeline(program, start, start + 1, "s", start.copy())
    assert "F0──!!!!F1──!!!!" in stretto.draw_text(timeline, width=100)
    again = parse_trace(trace_json(timeline))
    assert again.issued is not None
    assert np.array_equal(again.issued, start)
    assert again.host_late().sum() == timeline.host_late().sum() == len(program) - 1
    assert parse_trace(trace_json(stretto.simulate(program))).issued is None
