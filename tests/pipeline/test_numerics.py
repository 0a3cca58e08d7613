"""Losses and gradients of every schedule against a plain single-process run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from models import (
    REFUSED,
    Case,
    accumulate,
    after_a_bad_loss,
    case_lengths,
    changing_shapes,
    evaluate,
    kept_gradients,
    later,
    load,
    now_and_then_counted,
    order,
    plain,
    plain_of_lengths,
    refused,
    save,
    side_by_side,
    train,
    train_blocking,
    train_csv,
    train_torch,
)
from ranks import Ranks
from strategies import SCHEDULES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


def close(found: Any, expected: Any, bound: float) -> bool:
    return bool(abs(found - expected).max() <= bound * max(1e-30, abs(expected).max()))


def assert_as_plain(ranks: Ranks, case: Case, bound: float = 1e-12) -> None:
    loss, gradients = plain(case)
    seen = set()
    for rank, (found, mine) in enumerate(ranks.run(train, case.devices, case)):
        assert found == pytest.approx(loss, rel=bound)
        for name, gradient in mine.items():
            assert close(gradient, gradients[name], bound), f"{name} on rank {rank} of {case}"
            seen.add(name)
    assert seen == set(gradients)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_schedule(ranks: Ranks, name: str, devices: int) -> None:
    if name == "dualpipe" and devices == 1:
        pytest.skip("dualpipe needs an even number of devices")
    for dicts in (False, True):
        for checkpoint in (False, True):
            assert_as_plain(ranks, Case(name, devices, 2 * devices + 2, dicts=dicts, checkpoint=checkpoint))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_with_modules_recomputed(ranks: Ranks, name: str) -> None:
    for phased in (False, True):
        assert_as_plain(ranks, Case(name, 2, 6, layers=10, phased=phased, recompute=("*norm", "*.down")))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_what_arrived_may_be_handed_on_and_kept(ranks: Ranks, name: str) -> None:
    """Though the memory it arrived in is used again."""
    assert_as_plain(ranks, Case(name, 4, 12, passing=True))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_weight_gradients_of_several_microbatches_at_once(ranks: Ranks, name: str) -> None:
    """What arrives for a microbatch is kept until they are computed, though its own has been issued."""
    for count in (2, 3, 100):
        assert_as_plain(ranks, Case(name, 4, 12, passing=True, wgrad_microbatches=count))
        assert_as_plain(ranks, Case(name, 2, 6, layers=10, phased=True, steps=2, wgrad_microbatches=count))
    assert_as_plain(ranks, Case(name, 2, 6, tied=True, counted=True, wgrad_microbatches=4))
    assert_as_plain(ranks, Case(name, 2, 6, layers=10, recompute=("*norm", "*.down"), wgrad_microbatches=4))
    assert_as_plain(ranks, Case(name, 2, 6, checkpoint=True, dtype=torch.float32, wgrad_microbatches=4), 1e-6)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "dualpipe", "dualpipev", "interleaved"])
def test_uneven_cuts(ranks: Ranks, name: str) -> None:
    stages = Case(name, 2, 6).plan().stages
    balance = (3, *[1] * (stages - 2), 2)
    assert_as_plain(ranks, Case(name, 2, 6, layers=sum(balance), balance=balance))


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "dualpipe"])
def test_a_loss_of_sums_and_counts_weighs_every_token_alike(ranks: Ranks, name: str) -> None:
    assert_as_plain(ranks, Case(name, 4, 8, counted=True))


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "dualpipe", "interleaved"])
def test_tied_weights_get_both_gradients(ranks: Ranks, name: str) -> None:
    assert_as_plain(ranks, Case(name, 2, 6, tied=True))
    assert_as_plain(ranks, Case(name, 4, 8, tied=True))


def test_float32(ranks: Ranks) -> None:
    for name in ("one_f_one_b", "zb_h2", "dualpipe"):
        assert_as_plain(ranks, Case(name, 4, 8, dtype=torch.float32), 1e-6)


def test_bfloat16_is_summed_in_float32(ranks: Ranks) -> None:
    """Against the same model in float32: many microbatches add no error to that of one."""
    for microbatches in (4, 32):
        case = Case("zb_h1", 2, microbatches, dtype=torch.bfloat16)
        _, gradients = plain(replace(case, dtype=torch.float32))
        for _, mine in ranks.run(train, 2, case):
            for name, gradient in mine.items():
                assert close(gradient, gradients[name], 0.05), name


def test_dropout_does_not_depend_on_the_plan(ranks: Ranks) -> None:
    """Random numbers follow the layer, the microbatch and the step, not who draws them when."""
    losses = set()
    for name, devices in (("gpipe", 1), ("gpipe", 2), ("one_f_one_b", 4), ("zb_h1", 4)):
        for checkpoint in (False, True):
            case = Case(name, devices, 8, layers=6, dropout=0.3, steps=2, checkpoint=checkpoint)
            losses.add(round(ranks.run(train, devices, case)[0][0], 12))
    assert len(losses) == 1
    (loss,) = losses
    assert abs(loss - plain(Case("gpipe", 1, 8, layers=6))[0]) > 1e-6


def test_replicas_stay_equal_to_the_bit(ranks: Ranks) -> None:
    found = ranks.run(train, 4, Case("dualpipe", 4, 8, dtype=torch.float32))
    for rank, (_, mine) in enumerate(found):
        for name, gradient in found[3 - rank][1].items():
            assert (mine[name] == gradient).all()


@pytest.mark.parametrize("counted", [False, True])
def test_accumulated_steps_add_up(ranks: Ranks, counted: bool) -> None:
    case = Case("zb_h1", 2, 4, counted=counted)
    _, gradients = plain(case)
    for mine in ranks.run(accumulate, 2, case):
        for name, gradient in mine.items():
            assert close(gradient, 3 * gradients[name], 1e-12)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_evaluation_gives_the_loss(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 6, dicts=True)
    loss, _ = plain(case)
    for found, trained in ranks.run(evaluate, 2, case):
        assert found == pytest.approx(loss, rel=1e-12)
        assert not trained


def test_a_checkpoint_is_reloaded_by_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    """Saved from DualPipe on four ranks, read by ZB-V on two."""
    ranks.run(save, 4, Case("dualpipe", 4, 8, layers=6), str(tmp_path))
    expected = Case("dualpipe", 4, 8, layers=6).modules()
    for state in ranks.run(load, 2, Case("zb_v", 2, 4, layers=6), str(tmp_path)):
        for name, value in state.items():
            number, key = name.split(".", 1)
            assert (value == expected[int(number)].state_dict()[key].numpy() + 1).all()


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_run_is_refused_before_anything_is_sent(ranks: Ranks, case: str) -> None:
    said = ranks.run(refused, 2, case)
    assert any(REFUSED[case] in message for message in said), said


@pytest.mark.parametrize("what", ["raises", "counts nothing"])
def test_gradients_are_untouched_by_a_step_that_failed(ranks: Ranks, what: str) -> None:
    for kept in ranks.run(kept_gradients, 2, what):
        assert kept
        assert all(kept)


def test_what_is_no_plan_is_said_so() -> None:
    for function in (stretto.check, stretto.simulate, stretto.lower):
        with pytest.raises(stretto.PlanError, match=r"a plan is wanted, and a str is none; parse_plan.. reads one"):
            function("zb_v")  # type: ignore[operator]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_layers_in_phases(ranks: Ranks, name: str) -> None:
    for checkpoint in (False, True):
        assert_as_plain(ranks, Case(name, 2, 6, layers=6, phased=True, checkpoint=checkpoint))


def test_a_pair_runs_the_phases_of_both_passes_woven(ranks: Ranks) -> None:
    case = Case("interleaved", 2, 6, layers=6, phased=True)
    for planned, done in ranks.run(order, 2, case):
        assert planned == done
        # Within a pair's first backward part and its last, forward parts of another microbatch run.
        turns = [a.split(".")[0] for a in done if "W" not in a]
        assert any(a == c != b and "B" in a and "F" in b for a, b, c in zip(turns, turns[1:], turns[2:], strict=False))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_links_that_block_until_matched(ranks: Ranks, name: str) -> None:
    case = Case(name, 4, 8)
    _, gradients = plain(case)
    for _, mine in ranks.run(train_blocking, 4, case, timeout=60):
        for key, gradient in mine.items():
            assert close(gradient, gradients[key], 1e-12), key


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zb_v", "dualpipev"])
def test_the_same_file_runs_here_and_in_pytorch(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 6)
    text = str(case.plan())
    _, gradients = plain(case)
    ours, theirs = ranks.run(train_csv, 2, text, case), ranks.run(train_torch, 2, text, case)
    for (_, mine), other in zip(ours, theirs, strict=True):
        assert set(mine) == set(other)
        for key, gradient in mine.items():
            assert close(gradient, gradients[key], 1e-12), key
            assert close(gradient, other[key], 1e-12), key


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipe"}))
def test_bitwise_as_one_process_with_the_same_stages(ranks: Ranks, name: str) -> None:
    """DualPipe sums its two routes apart, so it is not among them."""
    stages = Case(name, 4, 8).plan().stages
    alone = Case("interleaved" if name == "interleaved" else "gpipe", 1, 8, layers=stages, dtype=torch.float32)
    ((_, gradients),) = ranks.run(train, 1, alone)
    for _, mine in ranks.run(train, 4, Case(name, 4, 8, layers=stages, dtype=torch.float32)):
        for key, gradient in mine.items():
            assert (gradient == gradients[key]).all(), key


@pytest.mark.parametrize("name", ["one_f_one_b", "dualpipe"])
def test_pipelines_side_by_side(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 6)
    _, gradients = plain(case)
    for mine in ranks.run(side_by_side, 4, case):
        for key, gradient in mine.items():
            assert close(gradient, gradients[key], 1e-12), key


def test_a_loss_that_is_not_finite_ends_only_its_step(ranks: Ranks) -> None:
    loss, _ = plain(Case("one_f_one_b", 2, 4))
    for said, after in ranks.run(after_a_bad_loss, 2):
        assert said == "the loss of microbatch 2 is not finite"
        assert after == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_shapes_may_change(ranks: Ranks, name: str) -> None:
    case = Case(name, 2, 4)
    expected = [plain_of_lengths(case, lengths) for lengths in case_lengths()]
    for found in ranks.run(changing_shapes, 2, case):
        for (loss, gradients), (plain_loss, plain_gradients) in zip(found, expected, strict=True):
            assert loss == pytest.approx(plain_loss, rel=1e-12)
            for key, gradient in gradients.items():
                assert close(gradient, plain_gradients[key], 1e-12), key


def test_losses_may_be_asked_for_later(ranks: Ranks) -> None:
    expected, _ = plain(Case("one_f_one_b", 2, 4))
    for losses, error in ranks.run(later, 2):
        assert losses == pytest.approx([expected, expected], rel=1e-12)
        assert error == "the loss of microbatch 0 is not finite"


def test_a_loss_that_counts_now_and_then_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(now_and_then_counted, 2):
        assert "the loss gives a sum and a count in some steps only" in said
