"""Losses and gradients of every schedule against a plain single-process run."""

from collections.abc import Iterator
from typing import Any

import pytest

from models import Case, plain, train
from ranks import Ranks
from strategies import SCHEDULES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


def close(found: Any, expected: Any, bound: float) -> bool:
    return bool(abs(found - expected).max() <= bound * max(1e-30, abs(expected).max()))


def compare(ranks: Ranks, case: Case, bound: float = 1e-12) -> None:
    loss, gradients = plain(case)
    seen = set()
    for rank, (found, mine) in enumerate(ranks.run(train, case.devices, case)):
        assert found == pytest.approx(loss, rel=bound)
        for name, gradient in mine.items():
            assert close(gradient, gradients[name], bound), f"{name} on rank {rank} of {case}"
            seen.add(name)
    assert seen == set(gradients)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_schedule(ranks: Ranks, name: str, devices: int) -> None:
    if name == "dualpipe" and devices == 1:
        pytest.skip("dualpipe needs an even number of devices")
    for dicts in (False, True):
        for checkpoint in (False, True):
            compare(ranks, Case(name, devices, 2 * devices + 2, dicts=dicts, checkpoint=checkpoint))
