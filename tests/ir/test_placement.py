import pytest

from stretto import PlanError
from stretto.ir.plan import infer_placement
from stretto.schedules import Action, Op, Placement


def test_microbatches_are_shared_out_in_equal_runs() -> None:
    placement = Placement(routes=((0, 1, 2), (2, 1, 0)), microbatches=6)
    assert [placement.route(k) for k in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [placement.device(0, k) for k in range(6)] == [0, 0, 0, 2, 2, 2]


def test_one_stray_action_does_not_change_the_inferred_placement() -> None:
    rows = [[Action(0, Op.F, k) for k in range(4)], [Action(1, Op.F, k) for k in range(4)] + [Action(0, Op.F, 0)]]
    assert infer_placement(rows) == Placement(((0, 1),), 4)


@pytest.mark.parametrize(
    ("routes", "microbatches"),
    [((), 1), (((0,),), "1"), (((),), 1), (((0,), (0, 1)), 2), (((0, 1), (1, 0)), 3), (((0,),), 0)],
)
def test_impossible_placements_are_refused(routes: tuple[tuple[int, ...], ...], microbatches: int) -> None:
    with pytest.raises(PlanError):
        Placement(routes, microbatches)
