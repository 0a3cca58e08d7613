"""Modules stay the user's: copies, pickles, modes, buffers and second pipelines are as in PyTorch."""

from collections.abc import Iterator

import pytest
import torch

from module_jobs import (
    across_types,
    autocast_island,
    copies,
    frozen_between_steps,
    kept_after_a_bad_loss,
    modes,
    on_two_devices,
    put_off_twice,
    start_equal,
    statistics_on_two_devices,
)
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.stop()


@pytest.mark.parametrize("when", ["in a step", "between steps", "after close"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_with_their_own_weights(ranks: Ranks, how: str, when: str) -> None:
    assert ranks.run(copies, 2, how, when) == [[], []]


def test_a_second_pipeline_puts_as_many_weight_gradients_off_as_the_first(ranks: Ranks) -> None:
    for first, second in ranks.run(put_off_twice, 2):
        assert first == second > 0


@pytest.mark.parametrize("built", [False, True])
def test_modes_are_those_of_an_nn_module(ranks: Ranks, built: bool) -> None:
    found = ranks.run(_modes, 2, built)
    for rank in found:
        assert len(rank["losses"]) == 1, "evaluation drops nothing"
        assert rank["kept"], "evaluation counts nothing"
        assert rank["same"], "evaluation leaves every module in its own mode"
        assert rank["returned"]
        assert not rank["off"]
        assert rank["on"]
        assert rank["training"]
    assert found[0]["names"][:2] == ["0", "0.linear"]
    assert found[0]["repr"].startswith("Pipeline(  # rank 0 of 2, stages 0 of 2\n  (0): Embed(\n")
    assert found[1]["repr"].endswith("\n)")


def _modes(mesh: object, built: bool) -> dict[str, object]:
    return modes(mesh, built=built)


def test_copies_of_a_stage_start_with_equal_buffers(ranks: Ranks) -> None:
    (before, first), (other, second) = ranks.run(start_equal, 2)
    assert any(not torch.equal(buffer, other[name]) for name, buffer in before.items())
    assert first.keys() == second.keys()
    for name, buffer in before.items():
        assert torch.equal(first[name], buffer)
        assert torch.equal(second[name], buffer), name


def test_steps_and_evaluations_may_compute_in_other_types(ranks: Ranks) -> None:
    for found, expected in ranks.run(across_types, 2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_under_autocast_gradients_are_computed_in_the_types_of_the_forward(ranks: Ranks) -> None:
    for same in ranks.run(autocast_island, 2):
        assert same
        assert all(same)


def test_running_statistics_on_two_devices_are_refused_unless_they_rest(ranks: Ranks) -> None:
    for when in ("when it is made", "in a step"):
        for said in ranks.run(statistics_on_two_devices, 2, when):
            assert "1.norm keeps running statistics, and its stage lives on 2 devices" in said
    assert ranks.run(statistics_on_two_devices, 2, "never") == ["", ""]


def test_a_loss_that_is_not_finite_leaves_gradients_alone(ranks: Ranks) -> None:
    for kept in ranks.run(kept_after_a_bad_loss, 2):
        assert kept
        assert all(kept)


def test_a_parameter_frozen_after_a_step_has_no_gradient_after_the_next(ranks: Ranks) -> None:
    assert [gone for rank in ranks.run(frozen_between_steps, 2) for gone in rank] == [True, True]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("max_norm", "0.weight is changed by forwards (max_norm), and several devices hold it"),
        ("frozen", "the copies of 0.bias on several ranks are frozen in one place, and trained in the other"),
        ("replaced", "the parameter 0.weight was replaced after the pipeline was made"),
    ],
)
def test_copies_that_would_drift_apart_are_refused(ranks: Ranks, what: str, reason: str) -> None:
    said = ranks.run(on_two_devices, 2, what, timeout=60)
    assert all(said), said
    assert any(reason in one for one in said), said
