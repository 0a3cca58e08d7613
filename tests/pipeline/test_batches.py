"""Batches of any number of rows give what the whole batch gives: losses, gradients, metrics and outputs."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batch_jobs
import stretto
from batch_jobs import REFUSED, Found
from models import Case
from ranks import Ranks
from strategies import SCHEDULES, plans
from stretto.pipeline.evaluation import Given, agree
from stretto.pipeline.microbatches import cut, row_counts
from stretto.pipeline.programs import evaluation_of
from stretto.program.lower import lower


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


def close(found: Any, expected: Any, bound: float = 1e-12) -> bool:
    return bool(np.abs(found - expected).max() <= bound * max(1e-30, np.abs(expected).max()))


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for name, gradient in found[1].items():
        assert close(gradient, expected[1][name]), name


@given(st.integers(1, 40), st.integers(1, 12))
def test_rows_are_shared_as_equally_as_they_can_be(rows: int, count: int) -> None:
    shares = row_counts(rows, count)
    assert sum(shares) == rows
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


@given(st.integers(1, 12), st.integers(0, 30))
def test_microbatches_are_the_batch_in_order(count: int, more: int) -> None:
    batch = {"x": torch.arange(count + more), "y": (torch.arange(count + more) * 2, "word")}
    microbatches, rows = cut(batch, count, "inputs")
    assert rows == count + more
    assert torch.equal(torch.cat([part["x"] for part in microbatches]), batch["x"])
    assert torch.equal(torch.cat([part["y"][0] for part in microbatches]), batch["y"][0])
    assert [len(part["x"]) for part in microbatches] == row_counts(rows, count)
    assert {part["y"][1] for part in microbatches} == {"word"}


@given(plans(), st.data())
def test_fewer_microbatches_make_a_sound_program_of_the_same_stages(plan: Any, data: st.DataObject) -> None:
    program = lower(plan)
    count = data.draw(st.integers(1, program.placement.microbatches))
    evaluation = evaluation_of(program, count)  # which raises if it is not sound
    placement = evaluation.placement
    assert (placement.stages, placement.microbatches) == (program.placement.stages, count)
    assert placement.homes <= program.placement.homes
    assert set(evaluation.lanes) <= set(program.lanes)


@given(st.integers(1, 9), st.integers(0, 20), st.integers(2, 4))
def test_ranks_agree_on_as_many_microbatches_as_there_are_rows(microbatches: int, rows: int, ranks: int) -> None:
    middle = [Given(None, None, [], False)] * (ranks - 2)
    count, has_targets, _ = agree([Given(rows, None, [], False), *middle, Given(None, rows, [], False)], microbatches)
    assert (count, has_targets) == (min(rows or microbatches, microbatches), True)


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        ((4, 4), (4, -1), "rank 1 was given no targets, but another rank that runs the last stage was"),
        ((4, 4), (3, 4), "rank 0 was given inputs of 4 rows, but rank 1 of 3 rows; give both the same"),
        ((4, 4), (4, 0), "rank 0 was given targets of 4 rows, but rank 1 of a list; give both the same"),
    ],
)
def test_copies_of_the_first_and_last_stage_must_be_given_the_same(first: Any, last: Any, says: str) -> None:
    with pytest.raises(stretto.PipelineError, match=says):
        agree([Given(*first, [], True), Given(*last, [], True)], 4)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_step_weighs_every_row_alike(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 6, tied=True)
    every = [7, 12, 11, 7, 6]
    expected = [batch_jobs.plain(case, rows) for rows in every]
    for found in ranks.run(batch_jobs.train, 2, case, every):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_v", "dualpipe", "dualpipev"])
def test_so_it_does_on_four_ranks_and_in_every_way_to_compute(ranks: Ranks, name: str) -> None:
    for case in (
        Case(name, 4, 8, tied=True, wgrad_microbatches=3),
        Case(name, 4, 8, layers=10, phased=True),
        Case(name, 4, 8, counted=True),
        Case(name, 4, 8, checkpoint=True),
    ):
        every = [9, 15, 9]
        expected = [batch_jobs.plain(case, rows) for rows in every]
        for found in ranks.run(batch_jobs.train, 4, case, every):
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)


def test_an_uneven_step_is_recorded_like_any_other(ranks: Ranks) -> None:
    case = Case("zb_v", 2, 6)
    (losses, spans), (others, none) = ranks.run(batch_jobs.train_recorded, 2, case, 8)
    assert losses == others == pytest.approx([batch_jobs.plain(case, 8)[0]] * 2, rel=1e-12)
    assert spans > 0
    assert none == 0


@pytest.mark.parametrize("name", ["one_f_one_b", "dualpipe"])
def test_microbatches_of_a_list_weigh_alike(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 4)
    for listed, alike, whole in ranks.run(batch_jobs.train_in_lists, 2, case, [2, 2, 1, 1]):
        assert_same(listed, alike)
        assert_same(whole, batch_jobs.plain(case, 6))
        assert listed[0] != pytest.approx(whole[0], rel=1e-9)


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_an_even_batch_is_to_the_bit_the_list_of_its_microbatches(ranks: Ranks, name: str) -> None:
    for (whole, listed), evaluated in ranks.run(batch_jobs.whole_and_listed, 2, Case(name, 2, 6, dtype=torch.float32)):
        assert whole[0] == listed[0]
        assert evaluated[0] == evaluated[1]
        assert all((gradient == listed[1][key]).all() for key, gradient in whole[1].items())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("counted", [False, True])
def test_an_evaluation_measures_the_whole_batch(ranks: Ranks, name: str, counted: bool) -> None:
    case = Case(name, 2, 6, tied=True, counted=counted)
    every = [12, 8, 1, 3, 8, 5, 2, 3]
    per_rank = ranks.run(batch_jobs.evaluate, 2, case, every)
    for at, rows in enumerate(every):
        loss, metrics, output = batch_jobs.plain_measures(case, rows)
        count = min(rows, 6)
        found = [on_rank[at] for on_rank in per_rank]
        for mean, measured, outputs, same in found:
            assert mean == pytest.approx(loss, rel=1e-12)
            assert measured == pytest.approx({**metrics, "rows": rows / count}, rel=1e-12)
            assert measured == found[0][1]
            assert len(outputs) == count
            assert same
        by_microbatch = [[outputs[k] for _, _, outputs, _ in found if outputs[k] is not None] for k in range(count)]
        assert [len(one) for one in by_microbatch] == [1] * count
        assert close(np.concatenate([one for (one,) in by_microbatch]), output)


def test_ranks_in_the_middle_need_nothing_to_agree(ranks: Ranks) -> None:
    for name in ("one_f_one_b", "dualpipe"):
        case = Case(name, 4, 8)
        for found in ranks.run(batch_jobs.evaluate, 4, case, [3, 9, 1]):
            for (loss, metrics, _, _), rows in zip(found, [3, 9, 1], strict=True):
                expected, measured, _ = batch_jobs.plain_measures(case, rows)
                assert loss == pytest.approx(expected, rel=1e-12)
                assert metrics == pytest.approx({**measured, "rows": rows / min(rows, 8)}, rel=1e-12)


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_v", "dualpipe"])
def test_outputs_are_not_overwritten_though_they_came_in_a_receive_buffer(ranks: Ranks, name: str) -> None:
    found = ranks.run(batch_jobs.handed_out, 2, name)
    for before, after, _ in found:
        for one, other in zip(before, after, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one == other).all()
    whole = [next(after[k] for _, after, _ in found if after[k] is not None) for k in range(4)]
    assert close(np.concatenate(whole), found[0][2])


def test_outputs_may_be_containers_and_buffers(ranks: Ranks) -> None:
    first, second = ranks.run(batch_jobs.containers, 2)
    assert first == [None] * 3
    assert second == [([0.0, 1.0], 2, 1.0), ([2.0], 1, 2.0), ([3.0], 1, 3.0)]


def test_without_targets_there_is_no_loss_to_read(ranks: Ranks) -> None:
    line = "this evaluation was given no targets, so it has no loss and no metrics"
    assert ranks.run(batch_jobs.without_targets, 2) == [[f"StepResult({line})", line, line]] * 2


def test_a_metric_may_be_infinite_or_count_nothing(ranks: Ranks) -> None:
    for none, infinite in ranks.run(batch_jobs.uncounted, 2):
        assert math.isnan(none)
        assert infinite == math.inf


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_measured_exactly_is_refused(ranks: Ranks, name: str) -> None:
    said = ranks.run(batch_jobs.refused, 2, name, timeout=60)
    assert all(REFUSED[name] in text for text in said), said


@pytest.mark.parametrize("check_finite", [True, False])
def test_ends_of_separate_routes_must_be_given_batches_of_the_same_size(ranks: Ranks, check_finite: bool) -> None:
    for said in ranks.run(batch_jobs.unlike_routes, 4, check_finite):
        assert "given batches of different sizes" in said or "given targets of 5 and of 7 rows" in said
