"""The model in a pipeline is the whole model: loss and all gradients, under every schedule."""

from collections.abc import Iterator

import pytest

from moe_jobs import DEVICE, trained
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
