import pytest

import stretto
from strategies import SCHEDULES
from stretto import Plan
from stretto.program.needs import link_tasks
from stretto.program.task import COMPUTE, RECEIVES, SENDS
from stretto.schedules import Action, Pair, interleaved, one_f_one_b

K2 = interleaved(devices=4, microbatches=8, overlap=True)


def messages(text: str) -> list[str]:
    return [str(violation) for violation in stretto.check(stretto.parse_program(text))]


def test_deadlock_names_the_cycle_task_by_task() -> None:
    assert messages("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1") == [
        "deadlock: tasks wait in a circle: 0B0 on device 0 needs 1B0 on device 1, which comes after 1F1 on device 1, "
        "which needs 0F1 on device 0, which comes after 0B0 on device 0"
    ]


def test_a_long_way_along_a_device_is_one_step_of_the_cycle() -> None:
    assert messages("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F2,1B0,1F1,1B1,1B2") == [
        "deadlock: tasks wait in a circle: 0B0 on device 0 needs 1B0 on device 1, which comes after 1F2 on device 1, "
        "which needs 0F2 on device 0, which comes after 0B0 on device 0"
    ]


def test_order_that_only_blocking_transfers_mind_is_a_deadlock_too() -> None:
    text = "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    assert messages(text) == [
        "deadlock: tasks wait in a circle where transfers block until matched: 0SEND_F1 from device 0 to 1 comes on "
        "device 0 after 1SEND_B0 from device 1 to 0, which comes on device 1 after 0SEND_F1 from device 0 to 1"
    ]


@pytest.mark.parametrize("plan", [one_f_one_b(devices=2, microbatches=4), K2], ids=["1f1b", "k2"])
def test_agreeing_link_by_link_is_not_enough(plan: Plan) -> None:
    """Receive right before use, send right after: every link agrees, yet two devices both want to send first."""
    program = stretto.lower(plan)
    order = []
    for index, task in enumerate(program.tasks()):
        if task.kind in COMPUTE:
            order += [need for need in program.needs(index) if program.task(need).kind in RECEIVES]
            order.append(index)
            order += [k for k, other in enumerate(program.tasks()) if other.kind in SENDS and index in program.needs(k)]
    assert sorted(order) == list(range(len(program)))
    found = stretto.check(link_tasks((program.task(index) for index in order), plan.placement))
    assert [violation.rule for violation in found] == ["deadlock"]
    assert "where transfers block until matched" in found[0].message


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("stages_per_device", [1, 2, 3])
def test_pairing_without_the_extra_warmup_is_a_deadlock(devices: int, stages_per_device: int) -> None:
    plan = interleaved(devices=devices, stages_per_device=stages_per_device, microbatches=2 * devices)
    rows = []
    for row in plan.rows:
        paired: list[Action | Pair] = []
        for slot in row:
            before = paired[-1] if paired else None
            if isinstance(before, Action) and (before.op, slot.op) == ("F", "B"):  # type: ignore[union-attr]
                paired[-1] = Pair(before, slot)  # type: ignore[arg-type]
            else:
                paired.append(slot)
        rows.append(tuple(paired))
    found = stretto.check(Plan(tuple(rows), plan.placement))
    assert {violation.rule for violation in found} == {"deadlock"}
    last = devices * stages_per_device - 1
    assert f"({last}F0;{last}B0)OVERLAP_F_B waits for itself: its backward {last}B0 needs its forward {last}F0" in str(
        found[0]
    )
    with pytest.raises(stretto.ProgramError, match="wait in a circle"):
        stretto.simulate(Plan(tuple(rows), plan.placement))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0\n1B0", ["coverage: 1F0 never runs"]),
        (
            "0F0\n1F0,1B0",
            ["coverage: the backward of stage 0 for microbatch 0 never runs: neither 0B0 nor 0I0 is there"],
        ),
        ("0F0,0I0", ["coverage: 0W0 never runs, so 0I0 yields no weight gradient"]),
        (
            "0F0,0B0,0I0,0W0",
            ["coverage: the backward of stage 0 for microbatch 0 runs 2 times: 0B0 on device 0, 0I0 on device 0"],
        ),
        (
            "0F0,0B0,0W0",
            [
                "coverage: the weight gradient of stage 0 for microbatch 0 runs 2 times: "
                "0B0.wgrad on device 0, 0W0 on device 0"
            ],
        ),
        (
            "0F0,0F0,0F1\n1F0,1F1",
            ["coverage: the forward of stage 0 for microbatch 0 runs 2 times: 0F0 on device 0, 0F0 on device 0"],
        ),
        (
            "0F0,0F1,0F2,0F3,1F0\n1F1,1F2,1F3",
            ["placement: 1F0 is on device 0, but stage 1 of microbatch 0 belongs on device 1"],
        ),
        ("0W0,0F0,0I0", ["dependencies: 0W0 comes before 0I0 on device 0, but needs its result"]),
        (
            "0F0\n1RECV_F0,1F0",
            [
                "transfers: device 0 never sends the output of 0F0 to device 1",
                "transfers: 1RECV_F0 on device 1 waits for device 0, but nothing sends it from there",
            ],
        ),
        (
            "0F0,0F1,0SEND_F1,0SEND_F0\n1RECV_F0,1F0,1RECV_F1,1F1",
            ["transfers: device 0 sends 0SEND_F1 before 0SEND_F0, but device 1 receives 1RECV_F0 first"],
        ),
        (
            "0F0,0SEND_F0,0SEND_F0\n1RECV_F0,1F0",
            [
                "transfers: 0SEND_F0 takes place 2 times",
                "transfers: 0SEND_F0 on device 0 sends to device 1, but nothing receives it there",
            ],
        ),
        (
            "0F0,1F0,0SEND_F0\n2F0",
            [
                "transfers: device 0 never sends the output of 1F0 to device 1",
                "transfers: device 1 never receives the output of 1F0 from device 0",
                "transfers: 0SEND_F0 on device 0 moves what nobody there needs",
                "transfers: 0SEND_F0 on device 0 sends to device 0, but nothing receives it there",
            ],
        ),
    ],
)
def test_messages_a_newcomer_understands(text: str, expected: list[str]) -> None:
    assert messages(text) == expected


def test_memory_limit() -> None:
    plan = one_f_one_b(devices=2, microbatches=4)
    costs = stretto.Costs(activation_bytes=10, parameter_bytes=1)
    assert stretto.check(plan, costs=costs, memory_limit=21) == []
    assert [str(violation) for violation in stretto.check(plan, costs=costs, memory_limit=20)] == [
        "memory: device 0 holds 21 bytes at 0F1 and up to 21 bytes in all, over the limit of 20 bytes"
    ]
    with pytest.raises(stretto.CostError, match="needs bytes in the costs"):
        stretto.check(plan, memory_limit=1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_all_violations_are_reported_not_just_the_first(name: str) -> None:
    plan = SCHEDULES[name].make(devices=2, microbatches=6)
    rows = tuple(row[1:] for row in plan.rows)
    found = stretto.check(Plan(rows, plan.placement))
    missing = {str(row[0]) for row in plan.rows}
    assert missing <= {violation.message.removesuffix(" never runs") for violation in found}
