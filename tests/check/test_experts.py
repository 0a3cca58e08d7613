"""What expert-parallel ranks run together: sound as lowered, and found if one rank breaks it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import stretto
from machines import completes
from strategies import mesh_plans
from stretto.check import Violation
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE
from stretto.program.needs import link_tasks
from stretto.program.program import Program
from stretto.program.task import EXPERT_SUM, Kind, Task
from stretto.schedules import gpipe, one_f_one_b

LAYERS = [DENSE, EXPERT_PARALLEL_MOE]


def phased(plan: stretto.Plan) -> Program:
    return stretto.lower(plan, layers=[LAYERS] * plan.stages)


def found(tasks: Sequence[Task], program: Program) -> list[Violation]:
    return stretto.check(link_tasks(tasks, program.placement, program.anatomy))


def exchanges(program: Program) -> list[int]:
    return [k for k, together in enumerate(program.exchanging.tolist()) if together]


@settings(max_examples=60)
@given(mesh_plans(), st.booleans(), st.booleans(), st.integers(0, 1), st.integers(1, 2), st.data())
def test_what_lower_makes_is_sound(
    plan: stretto.Plan, phases: bool, recompute: bool, offload: int, joined: int, data: st.DataObject
) -> None:
    experts = data.draw(st.lists(st.integers(0, plan.stages - 1), unique=True))
    layers = [LAYERS if stage in experts else [DENSE] for stage in range(plan.stages)] if phases else None
    program = stretto.lower(
        plan,
        layers=layers,
        experts=None if phases else experts,
        recompute=recompute,
        offload=offload,
        wgrad_microbatches=joined,
    )
    assert program.anatomy.experts == tuple(sorted(experts))
    assert bool(exchanges(program)) == bool(experts)
    assert stretto.check(program) == []


@settings(max_examples=60)
@given(mesh_plans(devices=2, microbatches=3), st.data())
def test_one_rank_with_two_exchanges_swapped_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    program = phased(plan)
    tasks = list(program.tasks())
    device = data.draw(st.integers(0, plan.devices - 1))
    own = [k for k in exchanges(program) if tasks[k].device == device]
    a = data.draw(st.integers(0, len(own) - 2))
    one, other = own[a], own[a + 1]
    assume(tasks[one].microbatch != tasks[other].microbatch or tasks[one].stage != tasks[other].stage)
    tasks[one], tasks[other] = tasks[other], tasks[one]
    violations = found(tasks, program)
    assert any(str(tasks[k]) in violation.message for violation in violations for k in (one, other))
    ordered = [violation for violation in violations if "before" in violation.message and "first" in violation.message]
    assert {violation.rule for violation in ordered} == {"transfers"}


@settings(max_examples=60)
@given(mesh_plans(devices=2, microbatches=3), st.data())
def test_a_dropped_doubled_or_misplaced_exchange_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    program = phased(plan)
    tasks = list(program.tasks())
    at = data.draw(st.sampled_from(exchanges(program)))
    task = tasks[at]
    match data.draw(st.sampled_from(["drop", "double", "move"])):
        case "drop":
            tasks.pop(at)
            others = [str(program.task(end)) for end in program.ends(at)[1:]]
            assert any(
                violation.rule == "transfers" and "does not take part" in violation.message and other in str(violation)
                for violation in found(tasks, program)
                for other in others
            )
        case "double":
            tasks.insert(at, task)
            assert any(
                violation.rule == "coverage" and str(task) in str(violation) for violation in found(tasks, program)
            )
        case _:
            wrong = data.draw(st.sampled_from([device for device in range(plan.devices) if device != task.device]))
            tasks[at] = replace(task, lane=replace(task.lane, device=wrong))
            misplaced = [violation for violation in found(tasks, program) if violation.rule == "placement"]
            assert [f"{task} is on device {wrong}" in violation.message for violation in misplaced] == [True]


@settings(max_examples=40)
@given(mesh_plans(devices=2, microbatches=3), st.data())
def test_ends_that_do_not_meet_are_found(plan: stretto.Plan, data: st.DataObject) -> None:
    """A ring is cut, or two rings become one, or swap an end."""
    program = phased(plan)
    at = data.draw(st.sampled_from(exchanges(program)))
    counterpart = program.counterpart.copy()
    others = [k for k in exchanges(program) if k not in program.ends(at)]
    if data.draw(st.booleans()) and others:
        other = data.draw(st.sampled_from(others))
        counterpart[[at, other]] = counterpart[[other, at]]
    else:
        counterpart[program.ends(at)] = -1
    names = [str(program.task(end)) for end in program.ends(at)]
    violations = stretto.check(replace(program, counterpart=counterpart))
    assert any(f"the ends of {name} do not meet" in str(violation) for violation in violations for name in names)


@settings(max_examples=60)
@given(mesh_plans(dp=3), st.data())
def test_an_experts_sum_that_is_missing_or_elsewhere_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    program = phased(plan)
    tasks = list(program.tasks())
    sums = [k for k, task in enumerate(tasks) if task.kind is Kind.REDUCE and task.part == EXPERT_SUM]
    assume(sums)
    at = data.draw(st.sampled_from(sums))
    task = tasks[at]
    if data.draw(st.booleans()):
        tasks.pop(at)
        says = f"the sum of the gradients of stage {task.stage}'s experts never runs on device {task.device}"
    else:
        wrong = data.draw(st.sampled_from([device for device in range(plan.devices) if device != task.device]))
        tasks[at] = replace(task, lane=replace(task.lane, device=wrong))
        says = f"{task.stage}'s experts never runs on device {task.device}"
    assert any(says in violation.message for violation in found(tasks, program))


def test_sums_in_another_order_are_found() -> None:
    program = phased(one_f_one_b(devices=1, microbatches=1).on_mesh({"pp": 1, "ep": 2, "dp": 2}))
    tasks = list(program.tasks())
    first, second = [k for k, task in enumerate(tasks) if task.kind is Kind.REDUCE and task.device == 0]
    tasks[first], tasks[second] = tasks[second], tasks[first]
    (violation, *_) = found(tasks, program)
    assert "device 0 has 0REDUCE_GRAD.experts before 0REDUCE_GRAD, but device 1 has 0REDUCE_GRAD first" in str(
        violation
    )


def test_a_circle_over_ranks_and_stages_is_a_deadlock() -> None:
    """Device 0 receives before it exchanges tokens, device 1 after. All links and all groups of ranks have one order,
    yet nothing goes on if transfers block: device 3 waits for what device 1 sends only after that exchange.
    """
    rows = [
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0B0,0B0.wgrad,0RECV_B1,0B1,0B1.wgrad",
        "0F2,0SEND_F2,0F3,0SEND_F3,0RECV_B2,0B2,0B2.wgrad,0RECV_B3,0B3,0B3.wgrad",
        "1RECV_F0,1F0,1B0,1SEND_B0,1B0.wgrad,1RECV_F1,1F1,1B1,1SEND_B1,1B1.wgrad",
        "1RECV_F2,1F2,1RECV_F3,1B2,1SEND_B2,1B2.wgrad,1F3,1B3,1SEND_B3,1B3.wgrad",
    ]
    program = stretto.lower(one_f_one_b(devices=2, microbatches=2).on_mesh({"pp": 2, "ep": 2}), experts=[0, 1])
    by_name = {str(task): task for task in program.tasks() if task.kind is not Kind.REDUCE}

    def violations() -> list[Violation]:
        return found([by_name[name] for row in rows for name in row.split(",")], program)

    (violation,) = violations()
    assert violation.rule == "deadlock"
    assert "where transfers block until matched" in violation.message
    assert "0F1 on devices 0, 1 comes on device 0 after 1SEND_B0 from device 2 to 0" in violation.message
    rows[0] = rows[0].replace("0RECV_B0,0F1", "0F1,0RECV_B0")
    assert violations() == []


@settings(max_examples=150)
@given(mesh_plans(devices=2, microbatches=3, ep=2), st.data())
def test_check_agrees_with_a_machine_that_blocks(plan: stretto.Plan, data: st.DataObject) -> None:
    """Any reordering of neighbours on a device: sound exactly if a machine that blocks gets through it."""
    experts = data.draw(st.lists(st.integers(0, plan.stages - 1), unique=True, min_size=1))
    program = stretto.lower(plan, experts=experts)
    tasks = list(program.tasks())
    assert completes(tasks, plan.placement, experts=experts)
    for _ in range(data.draw(st.integers(1, 4))):
        device = data.draw(st.integers(0, plan.devices - 1))
        own = [k for k, task in enumerate(tasks) if task.device == device]
        a = data.draw(st.integers(0, len(own) - 2))
        tasks[own[a]], tasks[own[a + 1]] = tasks[own[a + 1]], tasks[own[a]]
    violations = found(tasks, program)
    assert (not violations) == completes(tasks, plan.placement, experts=experts)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2}, {"pp": 2, "ep": 1}])
def test_without_several_ranks_nothing_is_exchanged(mesh: dict[str, int]) -> None:
    program = phased(gpipe(devices=2, microbatches=2).on_mesh(mesh))
    assert not program.exchanging.any()
    assert not any(task.part == EXPERT_SUM for task in program.tasks() if task.kind is Kind.REDUCE)
