"""The model in a pipeline is the whole model: loss and all gradients, under every schedule."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_jobs import DEVICE, loaded, trained, without_routers
from ranks import Ranks
from strategies import SCHEDULES

OPTIONS = {"plain": {}, "mtp": {"mtp": True}, "mtp and balance": {"mtp": True, "balance": True}}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4, backend="onegpu" if DEVICE.type == "cuda" else "gloo", device=DEVICE.type)
    yield started
    started.stop()


@pytest.mark.parametrize("options", sorted(OPTIONS))
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_step_is_one_backward_over_the_whole_batch(ranks: Ranks, schedule: str, options: str) -> None:
    assert ranks.run(trained, 2, schedule, OPTIONS[options], False, False) == [[], []]


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev", "one_f_one_b"])
def test_so_it_is_on_four_ranks_with_tied_embeddings(ranks: Ranks, schedule: str) -> None:
    overlap = schedule == "interleaved"
    assert ranks.run(trained, 4, schedule, OPTIONS["mtp"], overlap, True) == [[]] * 4


def test_ranks_load_tied_parameters_that_a_checkpoint_has_once(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(loaded, 2, str(tmp_path)) == [[], []]


def test_a_pipeline_without_routers_says_so_and_can_go_on(ranks: Ranks) -> None:
    assert ranks.run(without_routers, 2) == [["no layer of this pipeline has a stretto.moe.Router", "80.0"]] * 2
