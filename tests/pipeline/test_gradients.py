"""Gradients of all parameters by one mechanism: hooks, freezing, ties, counts, kinds of sums; against one backward."""

from collections.abc import Iterator

import pytest
import torch

from devices import device_ranks
from gradient_jobs import (
    REFUSED,
    SETUPS,
    after_failures,
    as_plain,
    data_parallel,
    drift,
    frozen_for_a_while,
    half_used,
    held,
    kept_main_grads,
    kinds,
    lazy,
    masters,
    of_inputs_and_loss,
    on_two_lanes,
    one_graph,
    one_module,
    refused,
    several_at_once,
    tensor_parallel,
    through_inputs,
    tied_builder,
    tied_twins,
)
from ranks import Ranks
from strategies import SCHEDULES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = device_ranks(4)
    yield made
    made.stop()


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("setup", sorted(SETUPS))
def test_gradients_and_hooks_are_those_of_one_whole_batch_backward(ranks: Ranks, setup: str, schedule: str) -> None:
    assert ranks.run(as_plain, 2, setup, schedule, "mean", False) == [[], []]


@pytest.mark.parametrize("loss", ["mean", "counted"])
@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe"])
@pytest.mark.parametrize("setup", sorted(SETUPS))
def test_so_they_are_where_steps_are_added_up(ranks: Ranks, setup: str, schedule: str, loss: str) -> None:
    assert ranks.run(as_plain, 2, setup, schedule, loss, True) == [[], []]


def test_a_replica_need_not_use_what_the_other_does(ranks: Ranks) -> None:
    assert ranks.run(half_used, 2) == [[], []]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "dualpipe", "dualpipev"])
def test_lanes_may_add_to_the_same_sums(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(on_two_lanes, 2, schedule) == [[], []]


@pytest.mark.parametrize("loss", ["mean", "counted"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_v", "dualpipe"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_names_that_are_tied_are_one_parameter(ranks: Ranks, devices: int, schedule: str, loss: str) -> None:
    if schedule == "dualpipe" and devices != 2:
        pytest.skip("dualpipe needs an even number of devices, and twice as many microbatches")
    assert ranks.run(tied_builder, devices, schedule, loss) == [[]] * devices


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "interleaved"])
def test_inputs_and_a_loss_of_its_own_get_theirs_divided_too(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(of_inputs_and_loss, 2, schedule) == [[], []]


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_would_be_wrong_is_refused(ranks: Ranks, what: str) -> None:
    said = ranks.run(refused, 2, what, timeout=60)
    assert any(REFUSED[what] in one for one in said), said


@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe"])
@pytest.mark.parametrize("kind", ["cast", "parameter", "float32"])
def test_kinds_of_sums(ranks: Ranks, kind: str, schedule: str) -> None:
    for found in ranks.run(kinds, 2, kind, schedule):
        assert found["types"] == {torch.float32 if kind == "float32" else torch.bfloat16}
        assert found["unused"] == {"unused.weight", "unused.bias", "lone"}
        assert (found["grads"] == 0) == (kind == "float32")
        assert found["worst"] < 0.02


def test_accumulated_steps_stay_in_the_type_that_sums_have(ranks: Ranks) -> None:
    """bfloat16 has 8 bits: its own rounding is 0.4 %, and 300 of them add up to more."""
    off = {kind: max(ranks.run(drift, 2, kind, 300)) for kind in ("cast", "parameter", "float32")}
    assert off["float32"] < 1e-5
    assert off["cast"] < 0.003
    assert off["parameter"] > 0.01


@pytest.mark.parametrize("how", ["replaced", "none", "zeroed", "halved", "assigned"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_the_user_does_to_gradients_counts(ranks: Ranks, dtype: str, how: str) -> None:
    assert ranks.run(held, 2, dtype, how) == [[], []]


@pytest.mark.parametrize("kind", ["cast", "parameter", "float32"])
def test_failures_leave_gradients_and_hooks_as_they_were(ranks: Ranks, kind: str) -> None:
    assert ranks.run(after_failures, 2, kind) == [[], []]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "dualpipe"])
def test_master_weights_train(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(masters, 2, schedule) == [[], []]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe"])
def test_gradients_are_averaged_over_data_parallel_ranks_by_plain_all_reduces(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(data_parallel, 4, schedule) == [[]] * 4


@pytest.mark.parametrize("names", [("0.a.weight", "a.weight"), ("0.b.weight", "a.weight")])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_v", "dualpipe"])
def test_ties_of_what_layers_share_within(ranks: Ranks, schedule: str, names: tuple[str, str]) -> None:
    assert ranks.run(tied_twins, 2, schedule, names) == [[], []]


@pytest.mark.parametrize("kind", ["cast", "float32"])
def test_graphs_behind_inputs_and_targets(ranks: Ranks, kind: str) -> None:
    assert ranks.run(through_inputs, 2, kind) == [[], []]


def test_one_graph_behind_inputs_and_targets(ranks: Ranks) -> None:
    assert ranks.run(one_graph, 2) == [[], []]


def test_one_module_in_all_stages_of_a_dualpipe(ranks: Ranks) -> None:
    assert ranks.run(one_module, 2) == [[], []]


@pytest.mark.parametrize("how", ["hook", "frozen"])
def test_main_gradients_survive_steps_that_fail(ranks: Ranks, how: str) -> None:
    assert ranks.run(kept_main_grads, 2, how) == [[], []]


@pytest.mark.parametrize("kind", ["cast", "float32"])
def test_a_parameter_may_rest_for_a_step(ranks: Ranks, kind: str) -> None:
    assert ranks.run(frozen_for_a_while, 2, kind) == [[], []]


def test_a_hook_on_several_parameters(ranks: Ranks) -> None:
    assert ranks.run(several_at_once, 2) == [[], []]


def test_parameters_that_the_first_forward_makes(ranks: Ranks) -> None:
    assert ranks.run(lazy, 2) == [[], []]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "dualpipe"])
def test_tensor_parallel_layers_train(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(tensor_parallel, 4, schedule) == [[]] * 4
