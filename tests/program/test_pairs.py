"""Phases of woven pairs: which tasks they are, and that their own times decide the order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import mesh_plans, plans
from stretto import Costs
from stretto.costs import PhaseTimes, WovenTimes
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE, MOE
from stretto.program.task import COMPUTE, Kind
from stretto.schedules import Pair, dualpipe, one_f_one_b


def in_pairs(plan: stretto.Plan) -> set[tuple[str, int, int]]:
    """The passes that stand in pairs: F or B, stage, microbatch."""
    pairs = [cell for row in plan.rows for cell in row if isinstance(cell, Pair)]
    passes = [action for pair in pairs for action in (pair.forward, pair.backward)]
    return {(action.op.name, action.stage, action.microbatch) for action in passes}


def marked(program: stretto.Program) -> set[tuple[str, int, int]]:
    """The passes whose phases are marked; every phase of a pass is marked, or none."""
    found: dict[bool, set[tuple[str, int, int]]] = {False: set(), True: set()}
    for task in program.tasks():
        if task.kind in COMPUTE:
            of = "F" if task.kind is Kind.F else "B"
            found[task.woven].add((of, task.stage, task.microbatch))
        else:
            assert not task.woven, task
    assert not found[True] & found[False]
    return found[True]


@given(plans(devices=4, microbatches=6), st.booleans(), st.integers(1, 3))
def test_phases_of_pairs_are_marked(plan: stretto.Plan, recompute: bool, joined: int) -> None:
    layers = [[MOE, DENSE]] * plan.stages
    program = stretto.lower(plan, layers=layers, recompute=recompute, wgrad_microbatches=joined)
    assert marked(program) == in_pairs(plan)


@given(mesh_plans(devices=2, microbatches=3, dp=1))
def test_phases_of_pairs_are_marked_on_meshes(plan: stretto.Plan) -> None:
    program = stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]] * plan.stages)
    assert marked(program) == in_pairs(plan)


@given(plans())
def test_a_whole_pair_is_one_task_without_a_mark(plan: stretto.Plan) -> None:
    program = stretto.lower(plan)
    assert not program.work.woven.any()
    if plan.placement.replicas == 1 and plan.devices > 1:
        again = stretto.parse_program(str(program))
        assert [task.woven for task in again.tasks()] == [False] * len(program)


def moe_times(comm: float) -> dict[str, PhaseTimes]:
    times = {name: PhaseTimes(1, 1, 1) for name in ("attn", "mlp")}
    return times | {name: PhaseTimes(comm, comm) for name in ("dispatch", "combine")}


def woven(times: dict[str, PhaseTimes]) -> dict[str, WovenTimes]:
    return {name: WovenTimes(x.F, x.I, x.W) for name, x in times.items()}


def test_times_in_pairs_decide_how_a_pair_is_woven() -> None:
    """Communication that is short alone and long in pairs gives DualPipe's order, not Kimi K2's."""
    short, long = moe_times(0.5), moe_times(2)
    plan = dualpipe(devices=2, microbatches=8)

    def order(costs: Costs) -> list[str]:
        program = stretto.lower(plan, layers=[[MOE]] * 2, costs=costs)
        return [str(task) for task in program.tasks() if task.device == 0]

    assert order(Costs(phases=short)) != order(Costs(phases=long))
    assert order(Costs(phases=short, woven=woven(long))) == order(Costs(phases=long))
    assert order(Costs(phases=long, woven=woven(short))) == order(Costs(phases=short))


def test_times_in_pairs_change_nothing_where_there_are_none() -> None:
    plan = one_f_one_b(devices=2, microbatches=4)
    alone, both = Costs(phases=moe_times(0.5)), Costs(phases=moe_times(0.5), woven=woven(moe_times(2)))
    programs = [stretto.lower(plan, layers=[[MOE]] * 2, costs=costs) for costs in (alone, both)]
    assert str(programs[0]) == str(programs[1])
    assert stretto.simulate(programs[1], both).makespan == stretto.simulate(programs[0], alone).makespan


def test_the_mark_is_part_of_a_task() -> None:
    program = stretto.lower(dualpipe(devices=2, microbatches=8), layers=[[MOE]] * 2)
    assert program.work.woven.any()
    tasks = list(program.tasks())
    again = stretto.program.needs.link_tasks(tasks, program.placement, program.anatomy)  # type: ignore[attr-defined]
    assert [task.woven for task in again.tasks()] == program.work.woven.tolist()


@pytest.mark.parametrize(
    ("costs", "lengths"),
    [
        ({}, (3, 1)),
        ({"woven": {"attn": WovenTimes(5)}}, (5, 1)),
        ({"woven": {"attn": WovenTimes(5), "dense.attn": WovenTimes(6)}}, (5, 6)),
        ({"woven": {"moe.attn": WovenTimes(7)}}, (7, 1)),
    ],
)
def test_times_in_pairs_are_looked_up_first(costs: dict[str, dict[str, WovenTimes]], lengths: tuple[int, int]) -> None:
    """By layer and phase, then by phase unless the layer has times of its own; then among those outside of pairs."""
    phases = {"attn": PhaseTimes(3), "dense.attn": PhaseTimes(1), **{name: PhaseTimes(1, 1) for name in OTHERS}}
    table = Costs(phases=phases, **costs)
    program = stretto.lower(dualpipe(devices=2, microbatches=8), layers=[[MOE, DENSE]] * 2, costs=table)
    spans = [span for span in stretto.simulate(program, table).spans() if span.task.kind is Kind.F]
    for layer, length in enumerate(lengths):
        found = {span.task.woven: span.end - span.start for span in spans if span.task.phase == f"attn{layer}"}
        assert found == {False: (3, 1)[layer], True: length}


OTHERS = ("dispatch", "mlp", "combine")


TIMES = st.integers(0, 9).map(float)


@given(st.builds(PhaseTimes, TIMES, TIMES, TIMES, st.none() | TIMES), st.builds(WovenTimes, *[st.none() | TIMES] * 4))
def test_what_an_entry_for_pairs_leaves_out_is_as_outside_of_pairs(alone: PhaseTimes, paired: WovenTimes) -> None:
    """So also recomputation, which takes R, or outside of pairs F."""
    phases = {name: PhaseTimes(1, 1, 1) for name in OTHERS} | {"moe.attn": alone, "attn": PhaseTimes(99, 99, 99)}
    table = Costs(phases=phases, woven={"moe.attn": paired})
    plan = dualpipe(devices=2, microbatches=8)
    program = stretto.lower(plan, layers=[[MOE]] * 2, costs=table, recompute=True)
    found: dict[tuple[str, bool], set[float]] = {}
    for span in stretto.simulate(program, table).spans():
        if span.task.phase == "attn0":
            found.setdefault((span.task.kind.name, span.task.woven), set()).add(span.end - span.start)
    both = {name: getattr(alone if getattr(paired, name) is None else paired, name) for name in "FIW"}
    assert found["F", False] == {alone.F}
    assert found["F", True] == {both["F"]}
    assert found["B", True] == {both["I"]}
    assert found["WGRAD", True] == {both["W"]}
    assert found["RECOMPUTE", True] == {alone.recompute if paired.R is None else paired.R}
