"""Sums of gradients over devices: where they stand, what they wait for, and what check() says of those that do not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.costs import Costs
from stretto.ir.errors import PlanError, ProgramError
from stretto.layers import DENSE, MOE
from stretto.program.program import Program
from stretto.program.task import BACKWARDS, WEIGHTS, Kind
from stretto.schedules import dualpipe, gpipe

dualpipes = st.builds(
    lambda half, more: dualpipe(devices=2 * half, microbatches=4 * half + 2 * more),
    st.integers(1, 3),
    st.integers(0, 3),
)
LAYERS = [MOE, DENSE]


def sums_of(program: Program) -> list[int]:
    return [k for k, task in enumerate(program.tasks()) if task.kind is Kind.REDUCE]


def adding(program: Program, task: int) -> list[int]:
    """All tasks of its device that add to what a sum adds up, found one by one."""
    it = program.task(task)
    stages = program.anatomy.summed(it.stage, it.part)
    found = []
    for k, other in enumerate(program.tasks()):
        stage = other.stage if other.backward is None else other.backward[0]
        if other.device == it.device and stage in stages and other.kind in (*BACKWARDS, *WEIGHTS):
            found.append(k)
    return found


def ties(plan: stretto.Plan) -> st.SearchStrategy[list[list[int]]]:
    some = st.lists(st.integers(0, plan.stages - 1), min_size=2, max_size=3, unique=True)
    return st.lists(some, max_size=2) if plan.stages > 1 else st.just([])


@given(plans(), st.booleans(), st.data())
def test_a_sum_waits_for_all_that_it_adds_up(plan: stretto.Plan, phases: bool, data: st.DataObject) -> None:
    tied = data.draw(ties(plan))
    program = stretto.lower(plan, layers=[LAYERS] * plan.stages if phases else None, ties=tied)
    homes = {
        (stages, device)
        for stages in [*((stage,) for stage in range(plan.stages)), *(tuple(sorted(tie)) for tie in tied)]
        for device, stage in plan.placement.homes
        if stage in stages
    }
    several = {(stages, device) for stages, device in homes if sum(of == stages for of, _ in homes) > 1}
    found = sums_of(program)
    tasks = [program.task(k) for k in found]
    assert sorted((program.anatomy.summed(task.stage, task.part), task.device) for task in tasks) == sorted(several)
    for k, task in zip(found, tasks, strict=True):
        assert task.lane == stretto.program.task.Lane(task.device, "reduce")
        ends = [program.task(end) for end in program.ends(k)]
        stages = program.anatomy.summed(task.stage, task.part)
        assert sorted(end.device for end in ends) == sorted(device for of, device in several if of == stages)
        needs = program.needs(k)
        for other in adding(program, k):
            assert any(program.lane[need] == program.lane[other] and need >= other for need in needs)
    assert stretto.check(program) == []


@given(plans() | dualpipes, st.booleans(), st.data())
def test_in_a_simulation_nothing_adds_to_what_is_being_summed(
    plan: stretto.Plan, phases: bool, data: st.DataObject
) -> None:
    program = stretto.lower(plan, layers=[LAYERS] * plan.stages if phases else None, ties=data.draw(ties(plan)))
    timeline = stretto.simulate(program, Costs(reduce=0.7, reduce_tied=1.3))
    for k in sums_of(program):
        assert timeline.end[k] - timeline.start[k] == pytest.approx(1.3 if program.task(k).part else 0.7)
        assert len({timeline.start[end] for end in program.ends(k)}) == 1
        for end in program.ends(k):
            assert all(timeline.end[other] <= timeline.start[k] + 1e-9 for other in adding(program, end))


@given(dualpipes, st.data())
def test_a_need_that_is_taken_away_is_missed(plan: stretto.Plan, data: st.DataObject) -> None:
    program = stretto.lower(plan, layers=[LAYERS] * plan.stages)
    task = data.draw(st.sampled_from(sums_of(program)))
    place = data.draw(st.integers(program.need_start.item(task), program.need_start.item(task + 1) - 1))
    start = program.need_start.copy()
    start[task + 1 :] -= 1
    less = replace(program, need=np.delete(program.need, place), need_start=start)
    found = stretto.check(less)
    assert [violation.rule for violation in found] == ["dependencies"]
    assert f"{program.task(task)} does not wait for {program.task(program.need.item(place))}" in found[0].message


def test_ends_that_do_not_meet_are_found() -> None:
    program = stretto.lower(dualpipe(devices=4, microbatches=8))
    a, *_ = sums_of(program)
    counterpart = program.counterpart.copy()
    counterpart[program.ends(a)] = -1
    assert "3REDUCE_GRAD do not meet" in str(stretto.check(replace(program, counterpart=counterpart))[0])


def test_sums_hide_behind_other_stages() -> None:
    """A stage whose last gradients are there does not wait for the end of the step."""
    program = stretto.lower(dualpipe(devices=8, microbatches=20))
    free = stretto.simulate(program, Costs())
    timeline = stretto.simulate(program, Costs(reduce=3))
    computed = max(span.end for span in timeline.spans() if span.task.lane.name == "compute")
    assert computed == free.makespan  # nothing that computes waits for them
    starts = {span.task.stage: span.start for span in timeline.spans() if span.task.kind is Kind.REDUCE}
    assert sum(start + 3 <= computed for start in starts.values()) >= 1
    assert timeline.makespan < computed + 2 * 3  # though each device has two


def test_fit_finds_what_sums_took() -> None:
    program = stretto.lower(dualpipe(devices=4, microbatches=8), ties=[(0, 3)])
    costs = stretto.fit(stretto.simulate(program, Costs(reduce=(1, 2, 3, 4), reduce_tied=5)))
    assert (costs.reduce, costs.reduce_tied) == ((1, 2, 3, 4), 5)


def test_text_says_which() -> None:
    program = stretto.lower(gpipe(devices=3, microbatches=1), ties=[(2, 0)])
    assert str(program).splitlines()[0].endswith("0REDUCE_GRAD.tied2")
    assert "REDUCE" not in str(program).splitlines()[1]


@pytest.mark.parametrize("wrong", [[(0,)], [(0, 0)], [(0, 9)], [(-1, 0)]])
def test_a_tie_is_of_stages_that_are_there(wrong: list[tuple[int, ...]]) -> None:
    with pytest.raises(PlanError, match="a tie is of two or more of the 2 stages"):
        stretto.lower(gpipe(devices=2, microbatches=1), ties=wrong)


@pytest.mark.parametrize("lane", ["compute", "comm", "send", "d2h", "sum"])
def test_a_sum_on_another_lane_is_found(lane: str) -> None:
    program = stretto.lower(dualpipe(devices=2, microbatches=4))
    lanes = tuple(replace(it, name=lane) if it.name == "reduce" else it for it in program.lanes)
    found = stretto.check(replace(program, lanes=lanes))
    assert {it.rule for it in found} >= {"placement"}
    assert any(f"REDUCE_GRAD on device 0 is on lane {lane}, where such" in it.message for it in found)


@pytest.mark.parametrize("how", ["itself", "rho", "far", "need"])
def test_columns_that_make_no_program_are_found_at_once(how: str) -> None:
    program = stretto.lower(dualpipe(devices=2, microbatches=4))
    counterpart, need, (a, *_) = program.counterpart.copy(), program.need.copy(), sums_of(program)
    match how:
        case "itself":
            counterpart[0] = 0
        case "rho":
            counterpart[counterpart[a]] = counterpart[a]
        case "far":
            counterpart[a] = len(program)
        case "need":
            need[0] = len(program)
    broken = replace(program, counterpart=counterpart, need=need)
    assert len(stretto.check(broken)) == 1
    with pytest.raises(ProgramError, match="this is no program: "):
        stretto.simulate(broken)
