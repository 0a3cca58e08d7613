"""Programs of a user's own: made, checked, simulated, drawn, read back."""

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import own_calls
from stretto import Call, Costs, program_of
from stretto.costs import SharedResource
from stretto.ir.errors import CostError, ProgramError, StrettoError
from stretto.timeline.trace import parse_trace, trace_json


@given(own_calls())
def test_what_stands_in_order_is_sound_and_comes_after_what_it_needs(calls: list[Call]) -> None:
    program = program_of(calls)
    assert stretto.check(program) == []
    timeline = stretto.simulate(program, Costs(calls={"c": 2.0, "c3": 5.0}))
    at = {(span.task.device, str(span.task)): span for span in timeline.spans()}
    for call in calls:
        span = at[call.device, call.name]
        assert span.end - span.start == (5.0 if call.name == "c3" else 2.0)
        assert all(at[call.device, need].end <= span.start for need in call.needs)
        assert all(other.start == span.start for (_, name), other in at.items() if name == call.name)
    again = parse_trace(trace_json(timeline))
    assert [str(task) for task in again.program.tasks()] == [call.name for call in calls]
    assert stretto.simulate(again.program, Costs(calls={"c": 2.0, "c3": 5.0})).makespan == timeline.makespan
    assert stretto.draw_text(again) == stretto.draw_text(timeline)


@given(own_calls(), st.randoms(use_true_random=False))
def test_in_any_order_check_says_whether_it_can_run(calls: list[Call], order: random.Random) -> None:
    order.shuffle(calls)
    program = program_of(calls)
    if not stretto.check(program):
        assert stretto.simulate(program).makespan > 0
    else:
        assert any(rule in str(stretto.check(program)) for rule in ("dependencies", "deadlock"))


def test_a_call_before_what_it_needs_is_found() -> None:
    found = stretto.check(program_of([Call("use", needs=["load"]), Call("load", lane="disk")]))
    assert [str(it) for it in found] == ["dependencies: use comes before load on device 0, but needs its result"]


def test_two_devices_that_meet_in_another_order_are_found() -> None:
    calls = [Call("a", 0, "link"), Call("b", 0, "link"), Call("b", 1, "link"), Call("a", 1, "link")]
    (found,) = stretto.check(program_of(calls))
    assert found.rule == "deadlock"
    assert "a" in found.message
    assert "b" in found.message
    with pytest.raises(ProgramError, match="tasks wait in a circle"):
        stretto.simulate(program_of(calls))


def test_ends_meet_in_whatever_order_their_ring_names_them() -> None:
    calls = [Call("late", 1), *(Call("meet", device) for device in range(4))]
    program = program_of(calls)
    ends = np.flatnonzero(program.counterpart >= 0)
    for order in itertools.permutations(ends.tolist()):
        counterpart = program.counterpart.copy()
        counterpart[list(order)] = np.roll(order, -1)
        again = dataclasses.replace(program, counterpart=counterpart)
        assert stretto.check(again) == []
        start = stretto.simulate(again, Costs(calls={"late": 5, "meet": 1})).start
        assert start[ends].tolist() == [5] * 4


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([], "a program needs one call at least"),
        (["load"], "a program is made of Calls"),
        ([Call("")], "a call's name is a word"),
        ([Call("a", lane="")], "a call's lane is a word"),
        ([Call("a\nb")], "a call's name is a word"),
        ([Call("a", -1)], "the device of 'a' is a number from 0 on"),
        ([Call("a", needs="b")], "what 'a' needs is a list of names"),  # type: ignore[arg-type]
        ([Call("a", needs=None)], "what 'a' needs is a list of names"),  # type: ignore[arg-type]
        ([Call("a", needs=["a"])], "'a' on device 0 needs 'a', which is itself"),
        ([Call("a", needs=["b"])], "'a' on device 0 needs 'b', which is not there$"),
        ([Call("a", needs=["b"]), Call("b", 1)], "not there; what another device does is brought by a call of one"),
        ([Call("a"), Call("a")], "device 0 has two calls of the name 'a'"),
    ],
)
def test_what_is_no_program_is_refused(calls: list[Call], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        program_of(calls)


def test_times_of_calls() -> None:
    program = program_of([Call("load0", lane="disk"), Call("load1", lane="disk"), Call("work", needs=["load1"])])
    assert stretto.simulate(program).makespan == 3.0
    assert stretto.simulate(program, Costs(calls={"load": 2, "load1": 4, "work": 1})).makespan == 7.0
    assert stretto.simulate(program, Costs(calls={"load": 2, "work": 1}, slowdown=(3,))).makespan == 7.0
    shared = SharedResource(capacity=1, lanes={"disk": 1, "cpu": 1})
    beside = program_of([Call("load", lane="disk"), Call("spin", lane="cpu")])
    assert stretto.simulate(beside, Costs(calls={"load": 2, "spin": 2}, shared={"core": shared})).makespan == 4.0
    for costs in (Costs(unit="s"), Costs(calls={"load": 2}), Costs(calls={"lode": 2})):
        with pytest.raises(CostError, match=r"no time is given for the call '(work|load0)': give calls"):
            stretto.simulate(program, costs)
    with pytest.raises(CostError, match=r"calls\.load must be a number of at least 0"):
        Costs(calls={"load": -1})
    fitted = stretto.fit(stretto.simulate(program, Costs(calls={"load": 2, "work": 4}, unit="s")))
    assert (fitted.calls, fitted.unit) == ({"load": 2, "work": 4}, "s")


def test_it_is_drawn(tmp_path: Path) -> None:
    timeline = stretto.simulate(program_of([Call("load", lane="disk"), Call("work", needs=["load"])]))
    assert stretto.draw_text(timeline, width=20) == "0 disk    load····\n0 compute ····work"
    stretto.draw.draw_figure(timeline, tmp_path / "own.svg")
    drawn = (tmp_path / "own.svg").read_text()
    assert all(word in drawn for word in ("Device 0 disk", "compute", "load", "work"))
    stretto.draw_comparison({"mine": timeline}, tmp_path / "two.svg")
    idle = stretto.simulate(program_of([Call("load", lane="disk")]))
    with pytest.raises(StrettoError, match="no lane is called compute"):
        idle.summary()
