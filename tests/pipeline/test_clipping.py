"""Gradients are clipped by the norm of the whole model, in which what several ranks hold counts once."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import clipping_jobs
from clipping_jobs import SENSELESS
from models import Case
from ranks import Ranks
from strategies import SCHEDULES
from stretto.pipeline.clipping import scale


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


def close(found: Any, expected: Any, bound: float = 1e-12) -> bool:
    return bool(np.abs(found - expected).max() <= bound * max(1e-30, np.abs(expected).max()))


def assert_as_plain(
    ranks: Ranks, case: Case, every: list[tuple[float, float]], job: Any = clipping_jobs.clipped
) -> None:
    expected = [clipping_jobs.plain(case, *given) for given in every]
    per_rank = ranks.run(job, case.devices, case, every)
    for at, (norm, gradients) in enumerate(expected):
        for found, mine in (on_rank[at] for on_rank in per_rank):
            assert found.dtype == torch.float64
            assert float(found) == pytest.approx(norm, rel=1e-12)
            assert torch.equal(found, per_rank[0][at][0])
            for name, gradient in mine.items():
                assert close(gradient, gradients[name]), (name, case, every[at])


EVERY = [(0.05, 2.0), (0.05, math.inf), (0.05, 1.0), (0.05, 3.5), (1e6, 2.0), (math.inf, 2.0), (0, 2.0)]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("tied", [False, True])
def test_as_the_uncut_model(ranks: Ranks, name: str, tied: bool) -> None:
    assert_as_plain(ranks, Case(name, 2, 6, tied=tied), EVERY)


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_v", "dualpipe", "dualpipev"])
def test_on_four_ranks(ranks: Ranks, name: str) -> None:
    assert_as_plain(ranks, Case(name, 4, 8, tied=True, counted=True), EVERY[:2])


def test_on_one_rank_and_with_shapes_that_are_not_remembered(ranks: Ranks) -> None:
    assert_as_plain(ranks, Case("gpipe", 1, 2, tied=True), EVERY[:1])
    assert_as_plain(ranks, Case("dualpipe", 2, 6, tied=True), EVERY[:2], clipping_jobs.clipped_dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_stay_equal_to_the_bit(ranks: Ranks, dtype: torch.dtype) -> None:
    case = Case("dualpipe", 4, 8, tied=True, dtype=dtype)
    seen: dict[str, Any] = {}
    copies = 0
    for ((norm, mine),) in ranks.run(clipping_jobs.clipped, 4, case, [(0.05, 2.0)]):
        assert norm.dtype == torch.float32
        for name, gradient in mine.items():
            copies += name in seen
            assert (seen.setdefault(name, gradient) == gradient).all(), name
    assert copies == len(seen)
    assert (seen["0.table.weight"] == seen["3.out.weight"]).all()  # which are tied
    whole = math.sqrt(sum(float((seen[name] ** 2).sum()) for name in seen if name != "3.out.weight"))
    assert whole == pytest.approx(0.05, rel=1e-3 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("name", ["zb_v", "dualpipe"])
def test_training_with_it(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 6, tied=True)
    expected = clipping_jobs.plain_trained(case, 4)
    for found in ranks.run(clipping_jobs.trained, 2, case, 4):
        for key, parameter in found.items():
            assert close(parameter, expected[key], 1e-10), key


@pytest.mark.parametrize("setup", ["nothing", "frozen bias", "frozen weights", "scaled"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe"])
def test_what_has_no_gradient_or_is_frozen_does_not_count(ranks: Ranks, setup: str, schedule: str) -> None:
    assert ranks.run(clipping_jobs.in_setups, 2, setup, schedule) == [[], []]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe"])
def test_float32_sums_are_clipped_where_they_are(ranks: Ranks, schedule: str) -> None:
    found = ranks.run(clipping_jobs.main_grads, 2, schedule)
    every = {name: grad for on_rank in found for name, grad in on_rank["before"].items() if grad is not None}
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in every.values()))
    for on_rank in found:
        assert on_rank["unset"]
        assert on_rank["norm"].dtype == torch.float32
        assert float(on_rank["norm"]) == pytest.approx(norm, rel=1e-5)
        for name, grad in on_rank["before"].items():
            if grad is None:
                assert on_rank["after"][name] is None
                continue
            assert torch.allclose(on_rank["after"][name], grad * (0.1 / norm), rtol=1e-5, atol=0), name
            assert torch.allclose(on_rank["added"][name], on_rank["after"][name] + grad, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe"])
def test_sparse_complex_empty_and_strided_gradients(ranks: Ranks, schedule: str, norm_type: float) -> None:
    assert ranks.run(clipping_jobs.odd, 2, schedule, norm_type) == [[], []]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe"])
def test_tensor_parallel_gradients_count_whole(ranks: Ranks, schedule: str, norm_type: float, partial: bool) -> None:
    found = ranks.run(clipping_jobs.tensor_parallel, 4, schedule, norm_type, partial)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert len({norm for _, norm in found}) == 1


def test_a_norm_that_is_not_finite_raises_if_asked_and_ends_nothing(ranks: Ranks) -> None:
    for said, kept, spoilt, loss in ranks.run(clipping_jobs.not_finite, 2):
        assert said == [f"the norm of all gradients is {value}, so they were not clipped" for value in ("inf", "nan")]
        assert kept
        assert spoilt
        assert loss > 0


@pytest.mark.parametrize("says", sorted(SENSELESS))
def test_senseless_arguments_are_refused(ranks: Ranks, says: str) -> None:
    for said in ranks.run(clipping_jobs.senseless, 2, SENSELESS[says]):
        assert says in said


@pytest.mark.parametrize("what", ["max_norm", "norm_type", "error", "senseless", "step", "evaluation"])
def test_ranks_that_are_asked_for_different_things_are_told(ranks: Ranks, what: str) -> None:
    for said in ranks.run(clipping_jobs.mismatched, 2, what, timeout=60):
        assert any(
            text in said for text in ("; all ranks must call", "max_norm is a number of at least 0 (got -1.0)")
        ), said


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    first, _ = ranks.run(clipping_jobs.absent, 2)
    assert first.startswith(
        "rank 1 has not begun clipping 1 (max_norm=1.0, norm_type=2.0); it was last seen after step 1; rank 0 waited"
    )


def test_a_pipeline_that_has_ended_says_so(ranks: Ranks) -> None:
    for _, failed, closed in ranks.run(clipping_jobs.after_the_end, 2):
        assert "this pipeline has failed and is finished (PipelineError: " in failed
        assert closed == "this pipeline was closed; make a new one"


def test_a_norm_without_limit_is_only_measured() -> None:
    gradient = torch.tensor([float("inf"), 1.0])
    scale([gradient], float("inf"), torch.tensor(float("inf"), dtype=torch.float64))
    assert gradient.tolist() == [float("inf"), 1.0]
