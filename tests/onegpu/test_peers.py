"""Whole programs over groups of ours, PyTorch's and our own, as over gloo."""

from collections.abc import Iterator

import pytest

from models import Case, plain, train, train_torch
from ranks import Ranks
from strategies import SCHEDULES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4, backend="onecpu")
    yield made
    made.stop()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_trains_where_sends_wait_for_their_receivers(ranks: Ranks, name: str) -> None:
    case = Case(name, 4, 10)
    loss, gradients = plain(case)
    for found, mine in ranks.run(train, 4, case):
        assert found == pytest.approx(loss, rel=1e-12)
        for key, gradient in mine.items():
            assert abs(gradient - gradients[key]).max() <= 1e-12 * abs(gradients[key]).max()


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_v"])
def test_pytorchs_own_schedules_run_on_it(ranks: Ranks, name: str) -> None:
    case = Case(name, 4, 8)
    text = str(case.plan())
    _, gradients = plain(case)
    for mine in ranks.run(train_torch, 4, text, case):
        for key, gradient in mine.items():
            assert abs(gradient - gradients[key]).max() <= 1e-12 * abs(gradients[key]).max()
