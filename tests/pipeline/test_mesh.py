"""A mesh of pipelines trains what one process would: losses, gradients, norms, loads, states, under every schedule."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_jobs import refused, saved_and_loaded, trained
from moe_jobs import DEVICE
from ranks import Ranks

MESHES = [
    {"pp": 2, "ep": 2, "dp": 1},
    {"pp": 2, "ep": 1, "dp": 2},
    {"pp": 1, "ep": 2, "dp": 2},
    {"pp": 4, "ep": 1, "dp": 1},
]
SCHEDULES = ["dualpipe", "dualpipev", "interleaved", "zb_v"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(8, backend="onegpu" if DEVICE.type == "cuda" else "gloo", device=DEVICE.type)
    yield started
    started.stop()


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_one_backward_over_the_batches_of_all(ranks: Ranks, schedule: str, sizes: dict[str, int]) -> None:
    if schedule == "dualpipe" and sizes["pp"] == 1:
        schedule = "one_f_one_b"  # DualPipe needs two devices
    assert ranks.run(trained, 4, sizes, schedule, {"mtp": True, "balance": True}, {}) == [[]] * 4
