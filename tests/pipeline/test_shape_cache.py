"""Messages are described once: a step that begins like an earlier one takes them to look as they did, or is refused."""

from collections.abc import Iterator

import pytest

from devices import device_ranks
from ranks import Ranks
from shape_cache_jobs import (
    MICROBATCHES,
    SEEN,
    THEN,
    changes,
    freezing_in_turns,
    inference,
    many_shapes,
    nested,
    odd_inputs,
    scripted,
    seen,
    unforeseen,
    words,
)

UNLIKE = {"shapes": "float64 of shape (2, ", "values": "['factor'] is 5.0, was 1.0"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = device_ranks(2)
    yield made
    made.stop()


def test_a_step_like_an_earlier_one_says_nothing(ranks: Ranks) -> None:
    # One word when it begins; else one for every microbatch too, in evaluation only from the first rank.
    m = MICROBATCHES + 1
    assert ranks.run(words, 2, False) == [[m, 1, m, 1, 1, m, 1], [m, 1, m, 1, 1, 1, 1]]


def test_with_dynamic_shapes_every_message_is_described(ranks: Ranks) -> None:
    m = MICROBATCHES
    assert ranks.run(words, 2, True) == [[m] * 7, [m] * 5 + [0, 0]]


def test_what_may_change_between_steps(ranks: Ranks) -> None:
    assert ranks.run(changes, 2) == [[], []]


def test_more_shapes_than_are_remembered(ranks: Ranks) -> None:
    assert ranks.run(many_shapes, 2) == [[], []]


def test_inputs_that_cannot_be_compared(ranks: Ranks) -> None:
    assert ranks.run(odd_inputs, 2) == [[], []]


@pytest.mark.parametrize("what", THEN)
def test_messages_that_change_unforeseen(ranks: Ranks, what: str) -> None:
    assert ranks.run(unforeseen, 2, what, True) == ["", ""]
    for said in ranks.run(unforeseen, 2, what, False):
        assert (
            f"stage 0 hands on other shapes or values than in an earlier step that began alike ({UNLIKE[what]}" in said
        )
        assert "); if it should, make the pipeline with dynamic_shapes=True" in said


@pytest.mark.parametrize("what", SEEN)
def test_what_is_seen_when_a_step_begins_may_change(ranks: Ranks, what: str) -> None:
    assert ranks.run(seen, 2, what) == [[], []]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_without_strides(ranks: Ranks, dynamic: bool) -> None:
    assert ranks.run(nested, 2, dynamic) == [[], []]


def test_evaluation_in_inference_mode(ranks: Ranks) -> None:
    for losses in ranks.run(inference, 2):
        assert len(set(losses)) == 1


def test_scripted_layers(ranks: Ranks) -> None:
    assert ranks.run(scripted, 2) == [True, True]


def test_what_is_trained_in_turns_is_described_once_each(ranks: Ranks) -> None:
    m = MICROBATCHES
    first, last = ranks.run(freezing_in_turns, 2)
    assert first == [m + 1, m + 1, 1, 1, 1, 1]
    assert last[2:] == [1, 1, 1, 1]
