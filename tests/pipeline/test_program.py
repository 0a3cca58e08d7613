"""A pipeline runs the program that it was given, sums and all, and refuses one that is not for its layers."""

from collections.abc import Iterator

import pytest

from models import Case
from program_jobs import (
    REFUSED,
    borrowed,
    by_program,
    changed_on_one_rank,
    in_its_order,
    late_sums,
    refused,
    sparse_table,
    summed,
)
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


@pytest.mark.parametrize(
    "case",
    [
        Case("dualpipe", 4, 8, layers=8),
        Case("dualpipe", 2, 4, tied=True),
        Case("one_f_one_b", 3, 4, tied=True),
        Case("zb_v", 2, 4),
        Case("interleaved", 2, 4, layers=8, phased=True),
    ],
    ids=lambda case: f"{case.schedule}{' tied' * case.tied}{' phased' * case.phased}",
)
def test_a_plan_and_its_program_are_the_same(ranks: Ranks, case: Case) -> None:
    assert ranks.run(by_program, case.devices, case) == [[]] * case.devices


def test_a_program_runs_in_its_own_order(ranks: Ranks) -> None:
    order, _ = ranks.run(in_its_order, 2)
    assert order[-2:] == ["1W3", "1W2"]


@pytest.mark.parametrize("what", REFUSED)
def test_refused(ranks: Ranks, what: str) -> None:
    said = ranks.run(refused, 2, what)
    assert any(REFUSED[what] in it for it in said), said
    assert all(it != "nothing was refused" for it in said)


def test_a_weight_that_a_later_stage_borrows(ranks: Ranks) -> None:
    assert ranks.run(borrowed, 2) == [[], []]


@pytest.mark.parametrize(("case", "sums"), [(Case("dualpipe", 4, 8), 8), (Case("one_f_one_b", 4, 4, tied=True), 2)])
def test_sums_are_recorded(ranks: Ranks, case: Case, sums: int) -> None:
    first, *others = ranks.run(summed, 4, case)
    assert (first, others) == ([str(sums)], [[]] * 3)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_table_that_is_sparse_on_one_rank_and_dense_on_another(ranks: Ranks, transposed: bool) -> None:
    assert ranks.run(sparse_table, 2, transposed) == [[], []]


@pytest.mark.parametrize("how", ["rows", "type", "strides"])
def test_a_table_that_changes_on_one_rank_is_refused(ranks: Ranks, how: str) -> None:
    said = ranks.run(changed_on_one_rank, 2, how)
    assert all("ranks 0, 1 hold the same parameters, but not the same of them are trained" in it for it in said), said


def test_inputs_that_depend_on_a_weight_that_ranks_sum(ranks: Ranks) -> None:
    assert ranks.run(late_sums, 2) == [[], []]
