"""Programs of phases: the same plans, taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto import Costs
from stretto.costs import Link, PhaseTimes
from stretto.layers import DENSE, EMBEDDING, LOSS, MOE, MTP, Layer, Phase, cut_layers
from stretto.program.needs import link_tasks
from stretto.program.task import SENDS, Kind
from stretto.schedules import Pair, dualpipe, gpipe, interleaved, one_f_one_b, zb_h1

TIMES = Costs(
    phases={
        "attn": PhaseTimes(F=2, I=2, W=1),
        "mlp": PhaseTimes(F=1, I=2, W=2),
        "dense.mlp": PhaseTimes(F=3, I=3, W=3),
        "dispatch": PhaseTimes(F=1, I=1),
        "combine": PhaseTimes(F=1, I=1),
        "embedding": PhaseTimes(F=1, I=0, W=1),
        "loss": PhaseTimes(F=1, I=1, W=1),
    }
)


def moe_times(*, comm: float) -> Costs:
    times = {name: PhaseTimes(1, 1, 1) for name in ("attn", "mlp")}
    return Costs(phases=times | {name: PhaseTimes(comm, comm) for name in ("dispatch", "combine")})


def model(stages: int) -> tuple[tuple[Layer, ...], ...]:
    """Layers of different shapes, stages of different depth."""
    return cut_layers([EMBEDDING, DENSE, *[MOE] * stages, MTP, LOSS][: max(stages, 3) + 1], stages=stages)


@given(plans(devices=4, microbatches=6))
def test_every_schedule_is_sound_in_phases(plan: stretto.Plan) -> None:
    program = stretto.lower(plan, layers=model(plan.stages), costs=TIMES)
    assert stretto.check(program) == []
    assert (program.need < program.needing).all()
    timeline = stretto.simulate(program, TIMES)
    whole, found = stretto.simulate(plan).summary(), timeline.summary(TIMES)
    paired = any(isinstance(slot, Pair) for row in plan.rows for slot in row)
    for device, as_whole in zip(found.devices, whole.devices, strict=True):
        # A woven pair may finish its backward before its forward starts; whole, it holds both.
        assert device.peak_activations <= as_whole.peak_activations
        assert paired or device.peak_activations == as_whole.peak_activations


def test_a_warm_up_forward_alternates_lanes() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=1), layers=[[MOE, DENSE]], costs=TIMES)
    shown = [(str(task), task.lane.name) for task in program.tasks()][:6]
    assert shown == [
        ("0F0.attn0", "compute"),
        ("0F0.dispatch0", "comm"),
        ("0F0.mlp0", "compute"),
        ("0F0.combine0", "comm"),
        ("0F0.attn1", "compute"),
        ("0F0.mlp1", "compute"),
    ]


def test_a_backward_sends_its_gradient_before_its_weight_gradients() -> None:
    program = stretto.lower(gpipe(devices=2, microbatches=1), layers=[[MOE], [MOE]])
    names = [str(task) for task in program.tasks() if task.device == 1]
    assert names[-7:] == [
        *("1B0.combine0", "1B0.mlp0", "1B0.dispatch0", "1B0.attn0", "1SEND_B0", "1B0.wgrad.mlp0", "1B0.wgrad.attn0")
    ]


def test_input_and_weight_parts_split_likewise() -> None:
    program = stretto.lower(zb_h1(devices=1, microbatches=1), layers=[[DENSE]])
    assert str(program) == "0F0.attn0,0F0.mlp0,0I0.mlp0,0I0.attn0,0W0.mlp0,0W0.attn0"


def test_a_steady_pair_is_kimi_k2s_block() -> None:
    plan = interleaved(devices=4, microbatches=8, overlap=True)
    row = str(stretto.lower(plan, layers=[[MOE]] * 8, costs=moe_times(comm=0.5))).split("\n")[3].split(",")
    at = row.index("7B0.combine0")
    block = [name for name in row[at:] if "RECV" not in name][:12]
    assert block == [
        *("7B0.combine0", "7F1.attn0", "7B0.mlp0", "7F1.dispatch0", "7B0.dispatch0", "7F1.mlp0"),
        *("7B0.attn0", "7F1.combine0", "7SEND_B0", "7B0.wgrad.mlp0", "7B0.wgrad.attn0", "7B1.combine0"),
    ]


def test_weaving_hides_communication_that_1f1b_exposes() -> None:
    costs = moe_times(comm=1)
    layers = [[MOE] * 2] * 4
    exposed = {}
    for name, plan in {
        "1f1b": one_f_one_b(devices=4, microbatches=16),
        "k2": interleaved(devices=4, stages_per_device=1, microbatches=16, overlap=True),
        "dualpipe": dualpipe(devices=4, microbatches=16),
    }.items():
        program = stretto.lower(plan, layers=layers, costs=costs)
        assert stretto.check(program) == []
        summary = stretto.simulate(program, costs).summary(costs)
        exposed[name] = max(device.exposed_comm for device in summary.devices)
    assert exposed["k2"] < exposed["1f1b"] / 2
    assert exposed["dualpipe"] < exposed["1f1b"] / 2


def test_phases_without_times_share_their_stages() -> None:
    program = stretto.lower(gpipe(devices=1, microbatches=1), layers=[[MOE, DENSE]])
    timeline = stretto.simulate(program, Costs(F=4, I=8, W=2))
    assert timeline.makespan == 14
    assert {found.end - found.start for found in timeline.spans() if found.task.kind is Kind.B} == {2, 0}


def test_a_transfer_leaves_when_the_last_phase_ends() -> None:
    costs = Costs(phases=TIMES.phases, link=Link(latency=1))
    timeline = stretto.simulate(stretto.lower(gpipe(devices=2, microbatches=1), layers=[[MOE]] * 2), costs)
    ends = {str(found.task): (found.start, found.end) for found in timeline.spans()}
    assert ends["0F0.combine0"][1] == ends["0SEND_F0"][0] == 5
    assert ends["1F0.attn0"][0] == 6
    assert ends["1B0.attn0"][1] == ends["1SEND_B0"][0]


@given(plans(devices=3, microbatches=4), st.data())
def test_a_dropped_duplicated_or_early_phase_is_found(plan: stretto.Plan, data: st.DataObject) -> None:
    program = stretto.lower(plan, layers=model(plan.stages), costs=TIMES)
    tasks = list(program.tasks())
    index = data.draw(st.sampled_from([k for k, task in enumerate(tasks) if task.phase and program.needs(k)]))
    task = tasks[index]
    match data.draw(st.sampled_from(["drop", "again", "early"])):
        case "drop":
            tasks.pop(index)
        case "again":
            tasks.insert(data.draw(st.integers(0, len(tasks))), task)
        case _:
            tasks.insert(min(program.needs(index)), tasks.pop(index))
    found = stretto.check(link_tasks(tasks, plan.placement, program.anatomy))
    assert any(task.phase in violation.message for violation in found)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([[MOE]], "the plan has 2 stages, but layers are given for 1"),
        ([[MOE], []], "stage 1 has no layer that computes anything"),
        ([[MOE], [Layer("talk", (Phase("dispatch", "comm"),))]], "stage 1 has no layer that computes anything"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: list[list[Layer]], says: str) -> None:
    with pytest.raises(stretto.PlanError) as caught:
        stretto.lower(gpipe(devices=2, microbatches=1), layers=layers)
    assert says in str(caught.value)


def test_a_phase_without_times_is_named() -> None:
    costs = Costs(phases={"attn": PhaseTimes(1, 1, 1)})
    with pytest.raises(stretto.CostError, match="no times for phase dispatch of moe layers; known are attn"):
        stretto.simulate(stretto.lower(gpipe(devices=1, microbatches=1), layers=[[MOE]]), costs)


def test_times_that_would_be_ignored_are_refused() -> None:
    plan = gpipe(devices=1, microbatches=1)
    with pytest.raises(stretto.CostError, match="times of phases, but the program has none"):
        stretto.simulate(plan, TIMES)
    with pytest.raises(stretto.CostError, match="B, FB and BW are times of whole passes"):
        stretto.simulate(stretto.lower(plan, layers=[[MOE]]), Costs(B=3))


def test_cutting() -> None:
    layers = [EMBEDDING, *[MOE] * 6, LOSS]
    assert [len(stage) for stage in cut_layers(layers, stages=3)] == [3, 3, 2]
    assert [len(stage) for stage in cut_layers(layers, stages=3, balance=[2, 5, 1])] == [2, 5, 1]
    with pytest.raises(stretto.PlanError, match="3 shares of at least 1 that add up"):
        cut_layers(layers, stages=3, balance=[4, 4, 1])


def test_transfers_are_those_of_the_whole_actions() -> None:
    plan = dualpipe(devices=4, microbatches=8)
    whole, phased = stretto.lower(plan), stretto.lower(plan, layers=[[MOE]] * 4)
    names = [[str(task) for task in program.tasks() if task.kind in SENDS] for program in (whole, phased)]
    assert names[0] == names[1]
