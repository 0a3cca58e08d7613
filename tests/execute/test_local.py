"""execute(): plain functions, all devices in this process; in order, once what they need has ended."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings

import stretto
from strategies import own_calls, plans
from stretto import Call, execute, program_of
from stretto.ir.errors import ProgramError
from stretto.program.task import Task

PLENTY = 20.0  # seconds


def asleep(program: stretto.Program) -> stretto.Timeline:
    """Run it with functions that take a little while each, not all the same."""
    chance = random.Random(0)

    def bind(_: Task) -> Callable[[], None]:
        seconds = chance.choice((0.0, 0.0, 0.0005))
        return lambda: time.sleep(seconds)

    return execute(program, bind)


def assert_in_order(timeline: stretto.Timeline) -> None:
    program = timeline.program
    start, end = timeline.start, timeline.end
    assert (start <= end).all()
    assert (end[program.need] <= start[program.needing]).all()
    for lane in range(len(program.lanes)):
        on_lane = [k for k in range(len(program)) if program.lane[k] == lane]
        assert all(end[a] <= start[b] for a, b in pairwise(on_lane))
    for task in range(len(program)):
        for other in program.ends(task):  # whose needs have ended too
            assert all(end[need] <= start[task] for need in program.needs(other))


@settings(max_examples=25)
@given(own_calls())
def test_own_programs_run_in_order(calls: list[Call]) -> None:
    assert_in_order(asleep(program_of(calls)))


@settings(max_examples=15)
@given(plans(devices=3, microbatches=4))
def test_every_schedule_runs_in_order(plan: stretto.Plan) -> None:
    assert_in_order(asleep(stretto.lower(plan)))


@pytest.mark.parametrize("mode", ["serial", "overlap_reload", "overlap_all"])
def test_a_weight_update_runs_in_order(mode: stretto.program.update.Mode) -> None:
    assert_in_order(asleep(stretto.weight_update(devices=3, buckets=7, mode=mode)))


def test_a_need_that_is_gone_is_not_waited_for() -> None:
    """So it is the program that says what is waited for, and nothing else."""
    seen: list[str] = []
    gate = threading.Event()

    def bind(task: Task) -> Callable[[], object]:
        def load() -> None:
            gate.wait(PLENTY)
            seen.append("load")

        def work() -> None:
            seen.append("work")
            gate.set()

        return load if str(task) == "load" else work

    execute(program_of([Call("load", lane="disk"), Call("work")]), bind)
    assert seen == ["work", "load"]
    seen.clear()
    execute(program_of([Call("load", lane="disk"), Call("work", needs=["load"])]), bind)  # the gate is open now
    assert seen == ["load", "work"]


def test_lanes_run_beside_each_other() -> None:
    meet = threading.Barrier(3)
    program = program_of([Call("a", lane="x"), Call("b", lane="y"), Call("c", 1, "x")])
    execute(program, lambda _: lambda: meet.wait(PLENTY))


def test_an_error_names_its_task_and_nothing_more_begins() -> None:
    begun: list[str] = []

    def bind(task: Task) -> Callable[[], object]:
        def act() -> None:
            begun.append(str(task))
            if str(task) == "bad":
                raise ValueError("no such file")

        return act

    calls = [
        Call("bad", 1),
        Call("meet", 0, "link"),
        Call("meet", 1, "link", ["bad"]),
        Call("after", 0, needs=["meet"]),
    ]
    before = set(threading.enumerate())
    with pytest.raises(ProgramError, match=r"^bad on device 1 failed: ValueError: no such file$") as caught:
        execute(program_of(calls), bind)
    assert isinstance(caught.value.__cause__, ValueError)
    assert begun == ["bad"]
    deadline = time.monotonic() + PLENTY
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_what_cannot_run_is_refused_before_anything_does() -> None:
    done: list[Task] = []
    calls = [Call("a", 0, "link"), Call("b", 0, "link"), Call("b", 1, "link"), Call("a", 1, "link")]
    with pytest.raises(ProgramError, match="the program is not sound: deadlock: tasks wait in a circle"):
        execute(program_of(calls), lambda task: lambda: done.append(task))
    with pytest.raises(ProgramError, match=r"bind gives no function for b on device 0 \(got 3\)"):
        execute(program_of([Call("a"), Call("b")]), lambda task: done.append if str(task) == "a" else 3)  # type: ignore[arg-type,return-value]
    assert done == []


def test_a_simulation_with_fitted_costs_takes_as_long() -> None:
    program = program_of([Call(f"c{k}", lane="xy"[k % 2], needs=[f"c{k - 1}"] if k else []) for k in range(10)])
    measured = execute(program, lambda _: lambda: time.sleep(0.02))
    simulated = stretto.simulate(program, stretto.fit(measured))
    assert measured.unit == simulated.unit == "s"
    assert 0.2 <= simulated.makespan <= measured.makespan < PLENTY


def test_functions_that_nobody_would_run_are_refused() -> None:
    async def later() -> None: ...

    def some() -> Iterator[int]:
        yield 1

    for function in (later, some):
        with pytest.raises(ProgramError, match=r"^a on device 0 failed: TypeError: it gave a"):
            execute(program_of([Call("a")]), lambda _, it=function: it)  # type: ignore[misc]


def test_a_bind_that_fails_says_for_which_task() -> None:
    with pytest.raises(ProgramError, match=r"^bind failed for b on device 0: KeyError: 'b'$"):
        execute(program_of([Call("a"), Call("b")]), lambda task: {"a": time.time}[str(task)])
    with pytest.raises(ProgramError, match=r"^bind is a function of a task that gives the function to run"):
        execute(program_of([Call("a")]), {})  # type: ignore[arg-type]


def test_nothing_is_kept_or_left_running() -> None:
    class Large:
        def __call__(self) -> None: ...

    before = set(threading.enumerate())  # earlier tests' threads may still be ending
    gc.collect()
    gc.disable()
    try:
        held = Large()
        gone = weakref.ref(held)
        execute(program_of([Call("a"), Call("b", lane="x")]), lambda _, it=held: it)  # type: ignore[misc]
        del held
        assert gone() is None
    finally:
        gc.enable()
    assert not set(threading.enumerate()) - before
