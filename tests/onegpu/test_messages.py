"""Groups of ours: right in every operation, and in order. Ranks look for themselves at what they get (`same`).

Over shared memory of the CPU here; the same over one GPU where STRETTO_TEST_DEVICE=cuda says so.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from messages import (
    collectives,
    far_ahead,
    in_order,
    lazy_tensors,
    left_behind,
    meshes,
    refused,
    refused_by_one,
    rendezvous,
    ring,
    shapes,
    sub_groups,
    uneven,
    unknown_reduction,
    wrong_sizes,
)
from ranks import Ranks

DEVICE = os.environ.get("STRETTO_TEST_DEVICE", "cpu")
WHERE = "the device" if DEVICE == "cuda" else "the host"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4, backend="onegpu" if DEVICE == "cuda" else "onecpu", device=DEVICE)
    yield made
    made.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_collectives(ranks: Ranks, dtype: torch.dtype) -> None:
    for count in (1, 2, 3, 4):
        for size in (0, 1, 7):
            ranks.run(collectives, count, dtype, size)


def test_large_tensors(ranks: Ranks) -> None:
    ranks.run(collectives, 3, torch.float32, 100_003)


def test_shapes_and_several_tensors_at_once(ranks: Ranks) -> None:
    for count in (1, 2, 3):
        ranks.run(shapes, count)


def test_uneven_all_to_all(ranks: Ranks) -> None:
    ranks.run(uneven, 2, [[3, 1], [0, 2]], 3)
    ranks.run(uneven, 4, [[0, 1, 2, 3], [5, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], 2)


def test_messages_keep_their_order(ranks: Ranks) -> None:
    ranks.run(in_order, 2, 200)
    ranks.run(in_order, 4, 40)


def test_everybody_may_send_first(ranks: Ranks) -> None:
    for count in (2, 3, 4):
        ranks.run(ring, count)


def test_many_messages_are_begun_before_any_is_met(ranks: Ranks) -> None:
    ranks.run(far_ahead, 2, 200 if DEVICE == "cuda" else 1000)


@pytest.mark.skipif(DEVICE == "cuda", reason="a group with streams that wait is left when they have ended")
def test_nothing_waits_in_a_group_that_its_rank_has_left(ranks: Ranks) -> None:
    assert ranks.run(left_behind, 2) == [["rank 0 has left this group"] * 2, []]


def test_a_send_ends_when_it_was_received(ranks: Ranks) -> None:
    assert ranks.run(rendezvous, 2)[0] == (False, True)


def test_groups_within_groups(ranks: Ranks) -> None:
    ranks.run(sub_groups, 4)


def test_meshes_and_functional_collectives(ranks: Ranks) -> None:
    ranks.run(meshes, 4)


def test_messages_of_different_size_are_an_error_on_both_sides(ranks: Ranks) -> None:
    for said in ranks.run(wrong_sizes, 2):
        assert said == f"rank 0 sent 16 bytes on {WHERE} as message 0 to rank 1, which expected 12 on {WHERE}"


def test_a_reduction_that_we_do_not_know_is_refused_at_once(ranks: Ranks) -> None:
    assert ranks.run(unknown_reduction, 2) == ["onegpu does not reduce by RedOpType.PREMUL_SUM [2.0, 2.0]"] * 2


def test_what_cannot_be_moved_is_refused_before_anything_is_posted(ranks: Ranks) -> None:
    for errors in ranks.run(refused, 3):
        assert errors == [
            "a tensor to be received must be contiguous",
            "the tensors of a collective must be alike (got 3 of torch.float32 and 4 of torch.float32)",
            "a tensor to be received must not be a lazy conjugate or negative; use resolve_conj() or resolve_neg()",
            "a collective of 3 ranks needs a tensor for each (got 2)",
            "NotImplementedError",
        ]


def test_a_collective_that_one_rank_was_refused_is_not_taken_for_the_next(ranks: Ranks) -> None:
    first, second = ranks.run(refused_by_one, 2)
    assert first.startswith("rank 0 is at collective ")
    assert second.endswith("one of them has left out or was refused a collective that the other has begun 0")


def test_lazy_negatives_and_tensors_of_inference_mode(ranks: Ranks) -> None:
    ranks.run(lazy_tensors, 2)
