import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import SCHEDULES, plans
from stretto.schedules import Action, Op, dualpipe, dualpipev, forward_only, interleaved


@given(plans(devices=6, microbatches=14))
def test_every_plan_is_sound(plan: stretto.Plan) -> None:
    assert stretto.check(plan) == []
    assert stretto.check(forward_only(plan)) == []


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipe"}))
def test_one_device_is_legal(name: str) -> None:
    plan = SCHEDULES[name].make(devices=1, microbatches=2)
    assert stretto.check(plan) == []
    assert stretto.simulate(plan).summary().devices[0].bubble == 0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", [{"devices": 0}, {"microbatches": -1}, {"devices": 2.0}, {"microbatches": True}])
def test_senseless_sizes_are_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(stretto.PlanError, match=f"{name} needs {next(iter(sizes))} to be a whole number"):
        SCHEDULES[name].make(**{"devices": 2, "microbatches": 4, **sizes})


@pytest.mark.parametrize(
    ("devices", "microbatches", "says"),
    [
        (3, 8, "even number of devices (got 3); use 2 or 4, or dualpipev for 3"),
        (1, 8, "even number of devices (got 1); use 2, or dualpipev for 1"),
        (4, 6, "at least 8 (got 6); use 8"),
        (4, 7, "at least 8 (got 7); use 8"),
        (4, 11, "at least 8 (got 11); use 10 or 12"),
        (4, 9, "at least 8 (got 9); use 8 or 10"),
    ],
)
def test_dualpipe_names_the_nearest_legal_sizes(devices: int, microbatches: int, says: str) -> None:
    with pytest.raises(stretto.PlanError) as caught:
        dualpipe(devices=devices, microbatches=microbatches)
    assert says in str(caught.value)


def test_dualpipev_names_the_nearest_legal_size() -> None:
    with pytest.raises(stretto.PlanError, match=r"at least 6 microbatches \(got 5\); use 6"):
        dualpipev(devices=3, microbatches=5)


@given(st.integers(1, 6), st.integers(1, 30))
def test_interleaved_groups_are_even_and_as_many_as_fit(devices: int, microbatches: int) -> None:
    """Where devices do not divide the microbatches, groups differ by at most one and hold at least `devices`."""
    first = interleaved(devices=devices, microbatches=microbatches, stages_per_device=2).rows[0]
    forwards = [action for action in first if isinstance(action, Action) and action.op is Op.F]
    groups: list[int] = []
    for before, action in zip([None, *forwards], forwards, strict=False):
        if before is None or (before.stage, action.stage) == (devices, 0):
            groups.append(0)
        groups[-1] += action.stage == 0
    assert sum(groups) == microbatches
    assert max(groups) - min(groups) <= 1
    assert microbatches < devices or min(groups) >= devices


def test_forward_only_keeps_the_order() -> None:
    plan = forward_only(dualpipev(devices=1, microbatches=3))
    assert str(plan) == "0F0,1F0,0F1,1F1,0F2,1F2"
