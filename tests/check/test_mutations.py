"""Break a sound program in one place: check() must find it, and only what is broken."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import stretto
from machines import actions_complete, completes
from strategies import mesh_plans, plans
from stretto.check import Violation
from stretto.layers import EXPERT_PARALLEL_MOE
from stretto.program.needs import link_tasks
from stretto.program.task import COMPUTE, RECEIVES, SENDS, Kind, Lane, Task


def found(tasks: Sequence[Task], plan: stretto.Plan) -> list[Violation]:
    return stretto.check(link_tasks(tasks, plan.placement))


def names(task: Task) -> str:
    """Ways in which a message may speak of a task."""
    cells = [(task.stage, task.microbatch), *([task.backward] if task.backward else [])]
    if task.kind in (Kind.RECV_F,):
        cells.append((task.stage - 1, task.microbatch))
    if task.kind in (Kind.RECV_B,):
        cells.append((task.stage + 1, task.microbatch))
    if task.kind is Kind.REDUCE:
        return rf"\b{task.stage}REDUCE_GRAD\b|the sum of the gradients of stage {task.stage}\b"
    ways = [rf"\b{s}[A-Z_]+{m}\b|stage {s}('s input)? (for|of) microbatch {m}\b" for s, m in cells]
    return "|".join(ways)


def speaks_of_transfers(violations: list[Violation]) -> bool:
    return any(re.search("SEND|RECV|transfer", str(violation)) for violation in violations)


def speaks_of(violations: list[Violation], task: Task) -> bool:
    return any(re.search(names(task), violation.message) for violation in violations)


@given(plans(), st.data())
def test_a_dropped_task_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    tasks = list(stretto.lower(plan).tasks())
    gone = tasks.pop(data.draw(st.integers(0, len(tasks) - 1)))
    assume(tasks)
    assert speaks_of(found(tasks, plan), gone)


@given(plans(), st.data())
def test_a_duplicated_task_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    tasks = list(stretto.lower(plan).tasks())
    again = data.draw(st.sampled_from(tasks))
    tasks.insert(data.draw(st.integers(0, len(tasks))), again)
    assert speaks_of(found(tasks, plan), again)


@given(plans(), st.data())
def test_a_task_before_what_it_needs_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    program = stretto.lower(plan)
    tasks = list(program.tasks())
    index = data.draw(st.sampled_from([k for k in range(len(tasks)) if program.needs(k)]))
    need = data.draw(st.sampled_from(program.needs(index)))
    moved = tasks.pop(index)
    tasks.insert(need, moved)
    violations = found(tasks, plan)
    assert speaks_of(violations, moved)
    assert any(violation.rule in ("dependencies", "deadlock") for violation in violations)


@given(plans(), st.data())
def test_a_task_on_the_wrong_device_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    assume(plan.devices > 1)
    tasks = list(stretto.lower(plan).tasks())
    index = data.draw(st.sampled_from([k for k, task in enumerate(tasks) if task.kind is not Kind.REDUCE]))
    task = tasks[index]
    wrong = data.draw(st.sampled_from([device for device in range(plan.devices) if device != task.device]))
    tasks[index] = replace(task, lane=replace(task.lane, device=wrong))
    violations = found(tasks, plan)
    misplaced = [violation for violation in violations if violation.rule == "placement"]
    assert len(misplaced) == 1
    assert f"is on device {wrong}" in misplaced[0].message
    assert speaks_of(misplaced, task)
    # One mistake, few words: an action on the wrong device does not also count as missing or unsent.
    assert task.kind not in COMPUTE or {violation.rule for violation in violations} == {"placement"}


@given(st.one_of(plans(), mesh_plans()), st.booleans(), st.data())
def test_a_task_on_another_lane_is_found(plan: stretto.Plan, phases: bool, data: st.DataObject) -> None:
    program = stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]] * plan.stages if phases else None)
    tasks = list(program.tasks())
    index = data.draw(st.integers(0, len(tasks) - 1))
    task = tasks[index]
    others = sorted({"compute", "comm", "host", "d2h", "h2d", "reduce"} - {task.lane.name})
    tasks[index] = replace(task, lane=Lane(task.device, data.draw(st.sampled_from(others))))
    violations = stretto.check(link_tasks(tasks, plan.placement, program.anatomy))
    says = f"{task} on device {task.device} is on lane {tasks[index].lane}, where such tasks are not done"
    assert says in [violation.message for violation in violations]


@given(plans(), st.data())
def test_a_transfer_to_the_wrong_device_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    assume(plan.devices > 2)
    tasks = list(stretto.lower(plan).tasks())
    index = data.draw(st.sampled_from([k for k, task in enumerate(tasks) if task.kind in (*SENDS, *RECEIVES)]))
    task = tasks[index]
    others = [device for device in range(plan.devices) if device not in (task.device, task.lane.peer)]
    tasks[index] = replace(task, lane=replace(task.lane, peer=data.draw(st.sampled_from(others))))
    assert speaks_of(found(tasks, plan), task)


@given(plans(), st.data())
def test_sending_in_another_order_than_receiving_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    program = stretto.lower(plan)
    tasks = list(program.tasks())
    lanes = {lane for lane in program.lanes if sum(task.lane == lane for task in tasks) > 1 and lane.name != "compute"}
    assume(lanes)
    lane = data.draw(st.sampled_from(sorted(lanes)))
    ends = [k for k, task in enumerate(tasks) if task.lane == lane]
    a = data.draw(st.integers(0, len(ends) - 2))
    tasks[ends[a]], tasks[ends[a + 1]] = tasks[ends[a + 1]], tasks[ends[a]]
    violations = found(tasks, plan)
    assert any(violation.rule == "transfers" and "before" in violation.message for violation in violations)
    assert speaks_of(violations, tasks[ends[a]])


@given(plans(devices=4, microbatches=6), st.data())
def test_check_agrees_with_a_machine_that_blocks(plan: stretto.Plan, data: st.DataObject) -> None:
    """Any reordering of neighbours on a device: sound exactly if a blocking machine gets through it."""
    tasks = list(stretto.lower(plan).tasks())
    for _ in range(data.draw(st.integers(1, 4))):
        device = data.draw(st.integers(0, plan.devices - 1))
        own = [k for k, task in enumerate(tasks) if task.device == device]
        if len(own) < 2:
            continue
        a = data.draw(st.integers(0, len(own) - 2))
        tasks[own[a]], tasks[own[a + 1]] = tasks[own[a + 1]], tasks[own[a]]
    violations = found(tasks, plan)
    assert (not violations) == completes(tasks, plan.placement)
    if not actions_complete(tasks, plan.placement):
        assert not speaks_of_transfers(violations)
    if not violations:
        assert stretto.simulate(link_tasks(tasks, plan.placement)).makespan > 0


@given(plans(devices=4, microbatches=6), st.data())
def test_a_plan_is_sound_exactly_if_it_can_be_run(plan: stretto.Plan, data: st.DataObject) -> None:
    """The same for neighbours in a plan, which lower() gives new transfers."""
    device = data.draw(st.integers(0, plan.devices - 1))
    row = list(plan.rows[device])
    assume(len(row) > 1)
    a = data.draw(st.integers(0, len(row) - 2))
    row[a], row[a + 1] = row[a + 1], row[a]
    changed = stretto.Plan((*plan.rows[:device], tuple(row), *plan.rows[device + 1 :]), plan.placement)
    program = stretto.lower(changed)
    assert (stretto.check(program) == []) == completes(list(program.tasks()), plan.placement)


@settings(max_examples=500)
@given(plans(devices=4, microbatches=6), st.data())
def test_a_plan_that_is_stuck_is_explained_by_its_actions(plan: stretto.Plan, data: st.DataObject) -> None:
    """Any actions of a row change places: what is wrong then is said without the transfers, which no plan names."""
    rows = [list(row) for row in plan.rows]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(rows))
        a, b = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row[a], row[b] = row[b], row[a]
    program = stretto.lower(stretto.Plan(tuple(map(tuple, rows)), plan.placement))
    violations = stretto.check(program)
    assert (not violations) == actions_complete(list(program.tasks()), plan.placement)
    assert not speaks_of_transfers(violations)


@settings(max_examples=200)
@given(st.one_of(plans(), mesh_plans()), st.data())
def test_tasks_joined_that_do_not_belong_together_are_found(plan: stretto.Plan, data: st.DataObject) -> None:
    """Any two tasks, or what each is joined to already, become one ring."""
    program = stretto.lower(plan)
    a, b = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
    assume(b not in program.ends(a))
    index = np.arange(len(program))
    following = np.where(program.counterpart < 0, index, program.counterpart)
    following[[a, b]] = following[[b, a]]
    joined = replace(program, counterpart=np.where(following == index, -1, following))
    violations = [violation for violation in stretto.check(joined) if violation.rule == "transfers"]
    assert any({a, b} & {*violation.at} for violation in violations)


@given(st.one_of(plans(), mesh_plans()), st.data())
def test_transfers_that_swap_their_other_ends_are_found(plan: stretto.Plan, data: st.DataObject) -> None:
    """Every ring still has a send and a receive, but of different messages or on different links."""
    program = stretto.lower(plan)
    sends = np.flatnonzero(program.work.among(SENDS)).tolist()
    assume(len(sends) > 1)
    a, b = data.draw(st.permutations(sends))[:2]
    counterpart = program.counterpart.copy()
    to_a, to_b = counterpart[[a, b]].tolist()
    counterpart[[a, b, to_a, to_b]] = to_b, to_a, b, a
    violations = stretto.check(replace(program, counterpart=counterpart))
    wrong = [violation for violation in violations if "that is not its other end" in violation.message]
    assert sorted(violation.at for violation in wrong) == [(k,) for k in sorted((a, b, to_a, to_b))]
    assert {violation.rule for violation in violations} == {"transfers"}
