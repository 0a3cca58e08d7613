"""Uneven loads of expert-parallel ranks, against times found by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from strategies import mesh_plans
from stretto.costs import Costs, PhaseTimes, WovenTimes, load_costs
from stretto.layers import DENSE, EXPERT_PARALLEL_MOE
from stretto.schedules import gpipe, one_f_one_b

PHASES = {
    "attn": PhaseTimes(1, 2, 1),
    "counts": PhaseTimes(0.5),
    "sizes": PhaseTimes(0.25),
    "dispatch": PhaseTimes(2, 2),
    "mlp": PhaseTimes(3, 4, 5),
    "combine": PhaseTimes(1, 1),
}
WOVEN = {
    "attn": WovenTimes(1.5, 2, 1),
    "dispatch": WovenTimes(3, 4),
    "mlp": WovenTimes(4, 5, 6),
    "sizes": WovenTimes(1),
}


def step(costs: Costs, *, microbatches: int = 1, ep: int = 2) -> stretto.Timeline:
    plan = gpipe(devices=1, microbatches=microbatches).on_mesh({"pp": 1, "ep": ep})
    return stretto.simulate(stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]]), costs)


def test_all_tokens_on_one_rank() -> None:
    """Of 2 ranks, one has twice its share and the other nothing: exchanges take as long as the busiest end, and the
    idle rank waits for the other at the combine.
    """
    timeline = step(Costs(phases=PHASES, loads=(2, 0)))
    spans = {str(span.task): (span.start, span.end) for span in timeline.spans()}
    assert spans["0F0.attn0"] == spans["0F1.attn0"] == (0, 1)
    assert spans["0F0.counts0"] == (1, 1.5)
    assert spans["0F0.sizes0"] == (1.5, 1.75)
    assert spans["0F0.dispatch0"] == spans["0F1.dispatch0"] == (1.75, 5.75)
    assert spans["0F0.mlp0"] == (5.75, 11.75)
    assert spans["0F1.mlp0"] == (5.75, 5.75)
    assert spans["0F0.combine0"] == spans["0F1.combine0"] == (11.75, 13.75)
    assert spans["0B0.combine0"] == (13.75, 15.75)
    assert spans["0B0.mlp0"] == (15.75, 23.75)
    assert spans["0B0.dispatch0"] == spans["0B1.dispatch0"] == (23.75, 27.75)
    assert spans["0B0.attn0"] == (27.75, 29.75)
    assert spans["0B0.wgrad.mlp0"] == (29.75, 39.75)
    assert spans["0B1.wgrad.mlp0"] == (29.75, 29.75)
    assert timeline.makespan == 40.75


def test_a_slow_device_computes_slowly_and_exchanges_as_fast() -> None:
    even, slow = (step(Costs(phases=PHASES, slowdown=slowdown)) for slowdown in (None, (1, 10)))
    length = {
        (str(a.task), a.task.lane.name): (b.end - b.start) / (a.end - a.start)
        for a, b in zip(even.spans(), slow.spans(), strict=True)
        if a.task.device == 1 and a.end > a.start
    }
    assert {lane for _, lane in length} == {"compute", "comm", "host"}
    for (name, lane), factor in length.items():
        assert factor == pytest.approx(10 if lane == "compute" else 1), name


def test_loads_of_microbatches() -> None:
    timeline = step(Costs(phases=PHASES, loads=((1, 3), 1)), microbatches=2)
    length = {str(span.task): span.end - span.start for span in timeline.spans()}
    assert (length["0F0.mlp0"], length["0F1.mlp0"], length["0F2.mlp0"], length["0F3.mlp0"]) == (3, 9, 3, 3)
    assert (length["0F0.dispatch0"], length["0F1.dispatch0"]) == (2, 6)
    assert (length["0F2.dispatch0"], length["0F3.dispatch0"]) == (2, 6)  # with the other rank


@settings(max_examples=40)
@given(mesh_plans(), st.data())
def test_the_length_of_each_task_is_that_of_its_busiest_end(plan: stretto.Plan, data: st.DataObject) -> None:
    mesh = plan.placement.mesh
    assert mesh is not None
    each = plan.microbatches // plan.placement.replicas
    numbers = st.integers(0, 4).map(float)
    entry = numbers | st.lists(numbers, min_size=each, max_size=each).map(tuple)
    loads = tuple(data.draw(st.lists(entry, min_size=mesh.ep, max_size=mesh.ep)))
    slowdown = tuple(data.draw(st.lists(st.sampled_from([1.0, 1.5]), min_size=plan.devices, max_size=plan.devices)))
    program = stretto.lower(plan, layers=[[DENSE, EXPERT_PARALLEL_MOE]] * plan.stages)
    timeline = stretto.simulate(program, Costs(phases=PHASES, woven=WOVEN, loads=loads, slowdown=slowdown))

    def length(k: int) -> float:
        task = program.task(k)
        phase, kind = task.phase[:-1], {"F": "F", "B": "I", "I": "I", "WGRAD": "W", "W": "W"}[task.kind.name]
        times = WOVEN[phase] if task.woven and phase in WOVEN else PHASES[phase]
        time = getattr(times, kind) * (slowdown[task.device] if task.lane.name == "compute" else 1)
        if task.phase not in ("dispatch1", "mlp1", "combine1"):
            return float(time)
        replica, microbatch = divmod(task.microbatch, each)
        load = loads[mesh.ep_rank(replica)]
        return float(time * (load[microbatch] if isinstance(load, tuple) else load))

    for k, task in enumerate(program.tasks()):
        if task.phase and task.kind.name != "REDUCE":
            expected = max(length(end) for end in program.ends(k))
            assert timeline.end[k] - timeline.start[k] == pytest.approx(expected, abs=1e-6)


@settings(max_examples=20)
@given(mesh_plans())
def test_even_loads_are_as_none(plan: stretto.Plan) -> None:
    mesh = plan.placement.mesh
    assert mesh is not None
    program = stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]] * plan.stages)
    even, none = (stretto.simulate(program, Costs(phases=PHASES, loads=loads)) for loads in ((1,) * mesh.ep, None))
    assert np.array_equal(even.start, none.start)
    assert np.array_equal(even.end, none.end)


@pytest.mark.parametrize(
    ("loads", "says"),
    [
        ((1,), "loads has 1 entries, but the plan has 2 expert-parallel ranks"),
        ((1, (1, 1)), "loads has a list of 2 entries, but each replica has 1 microbatches"),
        ((1, -1), "loads must be a number of at least 0"),
        ((1, ("a",)), "loads must be a number of at least 0"),
        ((), "loads is a list with an entry for each expert-parallel rank"),
        ((1, ()), "loads is a list with an entry for each expert-parallel rank"),
        (2, "loads is a list with an entry for each expert-parallel rank"),
    ],
)
def test_loads_that_do_not_fit_are_refused(loads: object, says: str) -> None:
    with pytest.raises(stretto.CostError, match=says):
        step(Costs(phases=PHASES, loads=loads))  # type: ignore[arg-type]


def test_loads_need_experts_on_several_ranks() -> None:
    costs = Costs(phases=PHASES, loads=(1, 2))
    plan = one_f_one_b(devices=2, microbatches=2)
    with pytest.raises(stretto.CostError, match="put it on a mesh with ep"):
        stretto.simulate(stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]] * 2), costs)
    mesh = plan.on_mesh({"pp": 2, "ep": 2})
    for program in (mesh, stretto.lower(mesh, experts=[0]), stretto.lower(mesh, experts=[])):
        with pytest.raises(stretto.CostError, match=r"give its layers: lower\(plan, layers=…\), --layers"):
            stretto.simulate(program, Costs(loads=(1, 2)))
    with pytest.raises(stretto.CostError, match="no stage of the program has experts"):
        stretto.simulate(stretto.lower(mesh, layers=[[DENSE]] * 2), costs)


def test_loads_are_kept_in_a_file(tmp_path: object) -> None:
    costs = Costs(loads=(1, (0.5, 2)), reduce_experts=(1, 2))
    costs.save(f"{tmp_path}/costs.toml")
    assert load_costs(f"{tmp_path}/costs.toml") == costs


def test_experts_have_a_sum_of_their_own() -> None:
    plan = gpipe(devices=1, microbatches=1).on_mesh({"pp": 1, "ep": 2, "dp": 2})
    program = stretto.lower(plan, layers=[[EXPERT_PARALLEL_MOE]])
    costs = Costs(phases=PHASES, reduce=1, reduce_experts=10)
    timeline = stretto.simulate(program, costs)
    length = {str(span.task): span.end - span.start for span in timeline.spans()}
    assert length["0REDUCE_GRAD"] == pytest.approx(1)
    assert length["0REDUCE_GRAD.experts"] == pytest.approx(10)
    fitted = stretto.fit(timeline)
    assert (fitted.reduce, fitted.reduce_experts) == (pytest.approx((1.0,)), pytest.approx((10.0,)))


def test_fit_counts_exchanges_from_when_the_last_rank_came() -> None:
    timeline = step(Costs(phases=PHASES))
    start = timeline.start.copy()
    for k, task in enumerate(timeline.program.tasks()):
        if task.phase == "combine0" and task.device == 0:
            start[k] -= 0.5  # a rank that came early
    fitted = stretto.fit(stretto.Timeline(timeline.program, start, timeline.end))
    assert {name: fitted.phases[f"moe.{name}"] for name in PHASES} == {
        name: PhaseTimes(times.F, times.I, times.W) for name, times in PHASES.items()
    }
