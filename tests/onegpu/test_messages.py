"""Groups of ours: right in every operation, and in order. Ranks look for themselves at what they get (`same`).

Over shared memory of the CPU here; the same over one GPU where STRETTO_TEST_DEVICE=cuda says so.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from messages import (
    collectives,
    in_order,
    meshes,
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
