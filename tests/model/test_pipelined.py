"""The model in a pipeline is the whole model: loss and all gradients, under every schedule."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import stretto
from causal_lms import LM
from moe_jobs import CONFIG, DEVICE, bypassed, loaded, recomputed, trained, without_routers
from planned_jobs import planned
from ranks import Ranks
from strategies import SCHEDULES
from stretto.model import layers
from stretto.pipeline.phases import anatomy_of

PHASES = Path(__file__).parent.parent.parent / "examples" / "phases.toml"
OPTIONS = {"plain": {}, "mtp": {"mtp": True}, "mtp and balance": {"mtp": True, "balance": True}}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4, backend="onegpu" if DEVICE.type == "cuda" else "gloo", device=DEVICE.type)
    yield started
    started.stop()


@pytest.mark.parametrize("options", sorted(OPTIONS))
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_step_is_one_backward_over_the_whole_batch(ranks: Ranks, schedule: str, options: str) -> None:
    assert ranks.run(trained, 2, schedule, OPTIONS[options], False, False) == [[], []]


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev", "one_f_one_b"])
def test_so_it_is_on_four_ranks_with_tied_embeddings(ranks: Ranks, schedule: str) -> None:
    overlap = schedule == "interleaved"
    assert ranks.run(trained, 4, schedule, OPTIONS["mtp"], overlap, True) == [[]] * 4


def test_ranks_load_tied_parameters_that_a_checkpoint_has_once(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(loaded, 2, str(tmp_path), {"pp": 2}) == [[], []]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_ranks_load_the_experts_that_they_hold(ranks: Ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    count = math.prod(sizes.values())
    assert ranks.run(loaded, count, str(tmp_path), sizes) == [[]] * count


def test_a_pipeline_without_routers_says_so_and_can_go_on(ranks: Ranks) -> None:
    assert ranks.run(without_routers, 2) == [["no layer of this pipeline has a stretto.moe.Router", "80.0"]] * 2


@pytest.mark.parametrize("options", [{"checkpoint": True}, {"recompute": ["*gate", "*norm", "*experts"]}])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe", "zb_v"])
def test_recomputation_changes_nothing_and_counts_nothing_twice(
    ranks: Ranks, schedule: str, options: dict[str, object]
) -> None:
    assert ranks.run(recomputed, 2, schedule, options) == [[], []]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("hook", "model.layers.1 runs in phases, so its own hooks or a replaced forward would not run"),
        ("forward", "model.layers.1 runs in phases, so its own hooks or a replaced forward would not run"),
        ("recompute", "offers phases, so it is not recomputed as one module; name modules within it"),
    ],
)
def test_blocks_that_would_not_be_called_are_refused(ranks: Ranks, what: str, says: str) -> None:
    assert all(says in told for told in ranks.run(bypassed, 2, what))


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"pp": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_the_model_runs_what_was_planned_for_its_layers(ranks: Ranks, sizes: dict[str, int]) -> None:
    costs = stretto.load_costs(PHASES)
    count = math.prod(sizes.values())
    assert ranks.run(planned, count, sizes, "embedding,dense,moe*3,loss", costs) == [[]] * count


def test_first_and_last_layers_have_the_names_that_planning_gives_them() -> None:
    for model in (layers(CONFIG), stretto.cut(LM("qwen3_moe").model())):
        names = [phase.name for layer in (model[0], model[-1]) for phase in anatomy_of(layer).phases]
        assert names == ["embedding", "loss"]


class _Called(nn.Linear):
    phase_name: object = "projection"


def test_a_layer_without_phases_is_one_that_it_may_name() -> None:
    assert [phase.name for phase in anatomy_of(_Called(2, 2)).phases] == ["projection"]
    assert [phase.name for phase in anatomy_of(nn.Linear(2, 2)).phases] == ["linear"]
    unnamed = _Called(2, 2)
    unnamed.phase_name = 3
    with pytest.raises(stretto.PipelineError, match=r"phase_name of _Called is the name of a phase \(got 3\)"):
        anatomy_of(unnamed)
