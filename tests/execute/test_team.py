"""Teams over groups that let ranks go on when they fail, as those of devices do: here ours, over shared memory."""

from collections.abc import Iterator

import pytest

import team_jobs
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(3, backend="onecpu")
    yield made
    made.stop()


def test_all_groups_of_a_team_fail_together(ranks: Ranks) -> None:
    """Also on a rank that is not in the one that fails: what it has got may be made of what others never got."""
    said = ranks.run(team_jobs.one_group_fails, 3)
    assert said == ["rank 0 gave up"] * 3


def test_a_closed_team_knows_that_it_has_failed(ranks: Ranks) -> None:
    for before, after in ranks.run(team_jobs.asked_when_closed, 2):
        assert before == after == "rank 0 gave up"


def test_an_error_of_a_group_within_a_layer_is_that_of_the_rank_that_failed(ranks: Ranks) -> None:
    _, said = ranks.run(team_jobs.collective_in_a_layer, 2)
    assert said.startswith("PipelineError: rank 0 failed at 0F1 of step 1: ValueError: no more; rank 1 was waiting for")
