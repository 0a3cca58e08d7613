"""Layers and phases that `torch.compile` has compiled train with every kind of schedule, and are compiled once."""

from collections.abc import Iterator

import pytest

from compiled_jobs import MAKE, compiled
from ranks import Ranks

SCHEDULES = ["one_f_one_b", "interleaved", "zb_h1", "zb_v", "dualpipe", "dualpipev"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("schedule", "how"),
    [*((schedule, "layers") for schedule in SCHEDULES), *(("zb_v", how) for how in MAKE if how != "layers")],
)
def test_compiled_layers(ranks: Ranks, schedule: str, how: str) -> None:
    assert ranks.run(compiled, 2, schedule, how) == [[], []]
