"""Expert-parallel ranks in a program: what they run together, what they sum, and what reads back."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from strategies import mesh_plans
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE, MOE, Layer, Phase
from stretto.program.anatomy import Anatomy
from stretto.program.forwards import first_forwards, forwards_of
from stretto.program.program import Program
from stretto.program.task import EXPERT_SUM, Kind, Task
from stretto.schedules import dualpipe, gpipe, one_f_one_b
from stretto.timeline.trace import parse_trace, trace_json

LAYERS = [DENSE, EXPERT_PARALLEL_MOE]


def test_a_phase_without_a_backward_has_none() -> None:
    anatomy = Anatomy([[EXPERT_PARALLEL_MOE, DENSE]])
    assert [str(part) for part in anatomy.backward[0]] == ["mlp1", "attn1", "combine0", "mlp0", "dispatch0", "attn0"]
    assert anatomy.forward_steps == ((7, 6, 5, 4, 3, 0),)
    assert anatomy.weight_steps == ((0, 1, 3, 5),)


def test_the_forward_of_an_expert_parallel_layer() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=1), layers=[[EXPERT_PARALLEL_MOE]])
    tasks = [(str(task), task.lane.name) for task in program.tasks() if task.kind is Kind.F]
    assert tasks == [
        ("0F0.attn0", "compute"),
        ("0F0.counts0", "comm"),
        ("0F0.sizes0", "host"),
        ("0F0.dispatch0", "comm"),
        ("0F0.mlp0", "compute"),
        ("0F0.combine0", "comm"),
    ]


def test_while_the_host_waits_it_issues_nothing() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=2), layers=[[EXPERT_PARALLEL_MOE]])
    costs = stretto.Costs(
        phases={
            "attn": stretto.costs.PhaseTimes(1, 1, 1),
            "mlp": stretto.costs.PhaseTimes(1, 1, 1),
            "dispatch": stretto.costs.PhaseTimes(2, 2),
            "combine": stretto.costs.PhaseTimes(2, 2),
            "counts": stretto.costs.PhaseTimes(0.5),
            "sizes": stretto.costs.PhaseTimes(0.25),
        }
    )
    start = {str(span.task): span.start for span in stretto.simulate(program, costs).spans()}
    assert (start["0F0.sizes0"], start["0F0.dispatch0"], start["0F0.mlp0"]) == (1.5, 1.75, 3.75)
    assert start["0F1.attn0"] == 4.75  # compute goes on in order
    assert start["0F1.counts0"] == 6.75  # after the combine


def test_phases_without_a_backward_need_no_times() -> None:
    program = stretto.lower(
        gpipe(devices=1, microbatches=1), layers=[[Layer("odd", (Phase("a"), Phase("look", backward=False)))]]
    )
    costs = stretto.Costs(phases={"a": stretto.costs.PhaseTimes(1, 1, 1)})
    assert stretto.simulate(program, costs).makespan == 3


def test_a_stage_without_a_backward_is_refused() -> None:
    with pytest.raises(stretto.PlanError, match="stage 0 has no layer that computes anything with a backward"):
        stretto.lower(gpipe(devices=1, microbatches=1), layers=[[Layer("look", (Phase("look", backward=False),))]])


def local(program: Program, task: Task) -> tuple[object, ...]:
    """What a task does, for which microbatch of its replica."""
    each = program.placement.microbatches // program.placement.replicas
    backward = None if task.backward is None else (task.backward[0], task.backward[1] % each)
    return task.kind, task.stage, task.part, task.microbatch % each, backward


@settings(max_examples=60)
@given(mesh_plans(), st.booleans(), st.data())
def test_the_ends_of_an_exchange(plan: stretto.Plan, phases: bool, data: st.DataObject) -> None:
    """One on each expert-parallel rank, at the same place along pp and dp, for the same microbatch of each."""
    experts = data.draw(st.lists(st.integers(0, plan.stages - 1), unique=True))
    layers = [LAYERS] * plan.stages if phases else None
    program = stretto.lower(plan, layers=layers, experts=experts)
    mesh = plan.placement.mesh
    assert mesh is not None
    for k, task in enumerate(program.tasks()):
        stages = [task.stage, *([task.backward[0]] if task.backward else [])]
        whole = task.kind in (Kind.F, Kind.B, Kind.I, Kind.PAIR) and any(stage in experts for stage in stages)
        together = whole and (not phases or task.lane.name == "comm")
        assert program.exchanging[k] == together
        if together:
            ends = [program.task(end) for end in program.ends(k)]
            pp, replica = mesh.place(task.device)
            expected = [mesh.device(pp=pp, replica=other) for other in mesh.ep_replicas(replica)]
            assert sorted(end.device for end in ends) == sorted(expected)
            assert {local(program, end) for end in ends} == {local(program, task)}
            assert len({end.microbatch for end in ends}) == mesh.ep


@settings(max_examples=60)
@given(mesh_plans(dp=3), st.data())
def test_experts_are_summed_over_the_devices_that_hold_the_same(plan: stretto.Plan, data: st.DataObject) -> None:
    experts = data.draw(st.lists(st.integers(0, plan.stages - 1), unique=True))
    program = stretto.lower(plan, experts=experts)
    mesh = plan.placement.mesh
    assert mesh is not None
    sums = {
        (task.stage, task.part, task.device): k for k, task in enumerate(program.tasks()) if task.kind is Kind.REDUCE
    }
    for stage in range(plan.stages):
        homes = {device for device, held in plan.placement.homes if held == stage}
        for device in homes:
            everyone = {program.device[end] for end in program.ends(sums[stage, 0, device])}
            assert everyone == homes
            rank = mesh.ep_rank(mesh.place(device)[1])
            same = {other for other in homes if mesh.ep_rank(mesh.place(other)[1]) == rank}
            if stage in experts and len(same) > 1:
                k = sums.pop((stage, EXPERT_SUM, device))
                assert {program.device[end] for end in program.ends(k)} == same
                assert program.needs(k) == program.needs(sums[stage, 0, device])
                assert str(program.task(k)) == f"{stage}REDUCE_GRAD.experts"
    assert not any(part == EXPERT_SUM for _, part, _ in sums)


def test_dualpipes_two_copies_of_a_stage_hold_the_same_experts() -> None:
    program = stretto.lower(dualpipe(devices=2, microbatches=4).on_mesh({"pp": 2, "ep": 2}), experts=[0, 1])
    rings = {
        tuple(sorted(program.device[program.ends(k)].tolist()))
        for k, task in enumerate(program.tasks())
        if task.kind is Kind.REDUCE and task.part == EXPERT_SUM
    }
    assert rings == {(0, 2), (1, 3)}


@settings(max_examples=30)
@given(mesh_plans(least_ep=1), st.booleans(), st.data())
def test_a_trace_of_a_mesh_reads_back(plan: stretto.Plan, phases: bool, data: st.DataObject) -> None:
    experts = data.draw(st.lists(st.integers(0, plan.stages - 1), unique=True))
    program = stretto.lower(plan, layers=[LAYERS] * plan.stages if phases else None, experts=experts)
    again = parse_trace(trace_json(stretto.simulate(program))).program
    assert again.placement == program.placement
    assert again.anatomy.experts == program.anatomy.experts
    assert list(again.tasks()) == list(program.tasks())
    for k in range(len(program)):
        assert {*again.ends(k)} == {*program.ends(k)}
        assert {*again.needs(k)} == {*program.needs(k)}


@settings(max_examples=60)
@given(mesh_plans(least_ep=1), st.integers(1, 4))
def test_the_first_forwards_of_each_replica(plan: stretto.Plan, count: int) -> None:
    each = plan.microbatches // plan.placement.replicas
    count = min(count, each)
    forwards = first_forwards(forwards_of(stretto.lower(plan)), count)
    assert forwards.placement.mesh == plan.placement.mesh
    assert forwards.microbatches == count * plan.placement.replicas
    program = stretto.lower(forwards, experts=range(plan.stages))
    assert stretto.check(program) == []
    ways = len(plan.placement.routes) // plan.placement.replicas
    assert forwards.placement.routes == plan.placement.routes[::ways]


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ([2], "experts are some of the 2 stages, by number"),
        ([-1], "experts are some of the 2 stages, by number"),
        (["a"], "experts are some of the 2 stages, by number"),
        (3, "experts are the stages that have experts"),
        ([1], "stage 1 has no phase in which tokens go to experts on other ranks"),
    ],
)
def test_experts_are_stages_that_exchange_tokens(experts: list[int], says: str) -> None:
    with pytest.raises(stretto.PlanError, match=says):
        stretto.lower(
            gpipe(devices=2, microbatches=1).on_mesh({"pp": 2, "ep": 2}), layers=[[MOE], [DENSE]], experts=experts
        )


@settings(max_examples=30)
@given(mesh_plans(least_ep=1))
def test_without_layers_every_stage_has_experts(plan: stretto.Plan) -> None:
    """A plan says nothing of experts, so nothing may run as if there were none."""
    mesh = plan.placement.mesh
    assert mesh is not None
    stages = range(plan.stages) if mesh.ep > 1 else ()
    program, said = stretto.lower(plan), stretto.lower(plan, experts=range(plan.stages))
    assert program.anatomy.experts == said.anatomy.experts == tuple(stages)
    assert list(program.tasks()) == list(said.tasks())
    assert program.counterpart.tolist() == said.counterpart.tolist()
    assert stretto.check(plan) == []
    assert not stretto.lower(plan, experts=[]).exchanging.any()


def test_a_slow_rank_holds_up_the_others_that_share_its_experts() -> None:
    plan = gpipe(devices=1, microbatches=1).on_mesh({"pp": 1, "ep": 2, "dp": 2})
    timeline = stretto.simulate(plan, stretto.Costs(slowdown=(1, 1, 1, 3), W=0))
    ends = {span.task.device: span.end for span in timeline.spans() if span.task.kind is Kind.B}
    assert ends == {0: 2, 2: 2, 1: 6, 3: 6}


def test_counts_of_tasks_on_a_mesh_are_those_of_its_pipelines() -> None:
    """Every replica runs the plan; only sums are more."""
    plan = one_f_one_b(devices=2, microbatches=3)
    alone, mesh = stretto.lower(plan), stretto.lower(plan.on_mesh({"dp": 2, "pp": 2, "ep": 3}), experts=[])
    kinds = [Counter(task.kind for task in program.tasks()) for program in (alone, mesh)]
    sums = kinds[1].pop(Kind.REDUCE)
    assert sums == 12
    assert kinds[1] == {kind: 6 * count for kind, count in kinds[0].items()}
