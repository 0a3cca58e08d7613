"""Idle time because the host had not issued a task yet."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto import Costs, Link
from stretto.timeline import Timeline


def issued_at(timeline: Timeline, issued: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Timeline:
    return Timeline(timeline.program, timeline.start, timeline.end, timeline.unit, issued)


def names(timeline: Timeline) -> list[str]:
    return [f"{task.device} {task}" for task in timeline.program.tasks()]


def test_only_what_could_have_run_is_late() -> None:
    program = stretto.lower(stretto.gpipe(devices=1, microbatches=2))
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
    plan = stretto.gpipe(devices=2, microbatches=1)
    timeline = stretto.simulate(plan, Costs(link=Link(latency=5), unit="s"))
    whole = issued_at(timeline, timeline.start.copy())  # issued at the last moment, and yet never late
    assert whole.host_late().max() == 0
    assert [device.host_late for device in whole.summary().devices] == [0, 0]


def test_either_end_of_a_transfer_can_be_late() -> None:
    plan = stretto.gpipe(devices=2, microbatches=1)
    timeline = stretto.simulate(plan, Costs(link=Link(latency=5), unit="s"))
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
    timeline = stretto.simulate(plan, Costs(link=Link(latency=0.5), unit="s"))
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


def test_it_is_drawn_and_kept() -> None:
    program = stretto.lower(stretto.gpipe(devices=1, microbatches=2))
    start = np.arange(len(program)) * 2.0
    timeline = Timeline(program, start, start + 1, "s", start.copy())
    assert "F0──!!!!F1──!!!!" in stretto.draw_text(timeline, width=100)
    again = stretto.parse_trace(stretto.draw_trace(timeline))
    assert again.issued is not None
    assert np.array_equal(again.issued, start)
    assert again.host_late().sum() == timeline.host_late().sum() == len(program) - 1
    assert stretto.parse_trace(stretto.draw_trace(stretto.simulate(program))).issued is None
