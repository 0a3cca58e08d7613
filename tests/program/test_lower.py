import pytest
from hypothesis import given

import stretto
from machines import completes
from strategies import plans
from stretto.layers import DENSE
from stretto.program.task import COMPUTE, SENDS, Kind
from stretto.schedules import Action, Op, Pair, Placement, gpipe, one_f_one_b, zb_v


def rows_of(program: stretto.Program) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(program.devices)]
    for task in program.tasks():
        rows[task.device].append(str(task))
    return rows


def test_a_small_program_reads_like_the_plan() -> None:
    program = stretto.lower(one_f_one_b(devices=2, microbatches=1))
    assert rows_of(program) == [
        ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0B0.wgrad"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1B0.wgrad"],
    ]
    assert [str(lane) for lane in program.lanes] == ["compute", "send→1", "recv←1", "compute", "send→0", "recv←0"]


@given(plans())
def test_compute_keeps_the_plans_order(plan: stretto.Plan) -> None:
    program = stretto.lower(plan)
    rows: list[list[str]] = [[] for _ in plan.rows]
    for task in program.tasks():
        if task.kind in COMPUTE and task.kind is not Kind.WGRAD:
            rows[task.device].append(str(task))
    assert rows == [[str(cell) for cell in row] for row in plan.rows]


@given(plans())
def test_the_gradient_leaves_before_the_weight_part(plan: stretto.Plan) -> None:
    program = stretto.lower(plan)
    at = {str(task): index for index, task in enumerate(program.tasks())}
    for name, index in at.items():
        if ".wgrad" in name:
            stage, _, microbatch = name.removesuffix(".wgrad").partition("B")
            assert at.get(f"{stage}SEND_B{microbatch}", -1) < index


@given(plans())
def test_the_sequence_is_a_global_order(plan: stretto.Plan) -> None:
    """Needs come first and a transfer's ends side by side, so every device can block on everything."""
    program = stretto.lower(plan)
    assert (program.need < program.needing).all()
    for index, task in enumerate(program.tasks()):
        if task.kind in SENDS:
            assert program.counterpart[index] == index + 1
    assert completes(list(program.tasks()), plan.placement, serial=True)
    assert completes(list(program.tasks()), plan.placement)


@given(plans())
def test_csv_with_transfers_reads_back_as_the_same_program(plan: stretto.Plan) -> None:
    program = stretto.lower(plan)
    again = stretto.parse_program(str(program))
    assert rows_of(again) == rows_of(program)
    assert stretto.check(again) == []
    assert stretto.simulate(again).makespan == stretto.simulate(program).makespan


def test_stages_on_one_device_hand_over_without_a_transfer() -> None:
    program = stretto.lower(zb_v(devices=2, microbatches=3))
    assert not [task for task in program.tasks() if task.kind in SENDS and task.stage == 1 and task.kind is Kind.SEND_F]


def test_senseless_plans_are_refused() -> None:
    one = Placement(((0,),), 1)
    forward, backward = (
        Action(0, Op.F, 0),
        Action(0, Op.B, 0),
    )
    with pytest.raises(stretto.PlanError, match="at least one action"):
        stretto.Plan(((),), one)
    with pytest.raises(stretto.PlanError, match="speaks of 2 devices, but there are 1 rows"):
        stretto.Plan(((forward,),), Placement(((0, 1),), 1))
    with pytest.raises(stretto.PlanError, match="a pair is a forward and a full backward"):
        Pair(backward, forward)
    with pytest.raises(stretto.ProgramError, match="stage -1 does not exist"):
        stretto.lower(stretto.Plan(((Action(-1, Op.F, 0),),), one))


def test_a_plan_that_contradicts_its_placement_is_refused() -> None:
    plan = gpipe(devices=2, microbatches=2)
    with pytest.raises(stretto.ProgramError, match="microbatch 1 does not exist"):
        stretto.lower(stretto.Plan(plan.rows, Placement(((0, 1),), 1)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": [DENSE, DENSE]}, "layers are lists of Layer, one per stage; cut_layers\\(\\) makes them"),
        ({"layers": "moe*2"}, "layers are lists of Layer"),
        ({"layers": [[DENSE]]}, "the plan has 2 stages, but layers are given for 1"),
        ({"ties": [0, 1]}, "ties are lists of stages that share weights"),
        ({"ties": ["01"]}, "a tie is of two or more of the 2 stages"),
        ({"ties": [[0, 1.0]]}, "a tie is of two or more of the 2 stages"),
        ({"ties": [[False, True]]}, "a tie is of two or more of the 2 stages"),
        ({"ties": [[0, 2]]}, "a tie is of two or more of the 2 stages"),
        ({"costs": "F=1"}, "costs are a stretto.Costs"),
        ({"offload": True}, "offload is a number of actions"),
    ],
)
def test_odd_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(stretto.StrettoError, match=says):
        stretto.lower(gpipe(devices=2, microbatches=2), **options)
