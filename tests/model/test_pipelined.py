"""The model in a pipeline is the whole model: loss and all gradients, under every schedule."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import stretto
from causal_lms import LM
from commands import run
from devices import device_ranks
from moe_jobs import CONFIG, bypassed, loaded, recomputed, trained, without_routers
from planned_jobs import fitted, planned
from ranks import Ranks
from strategies import SCHEDULES
from stretto.layers import DENSE, EMBEDDING, EXPERT_PARALLEL_MOE, LOSS, MOE, Layer, Phase
from stretto.model import layers
from stretto.pipeline.phases import anatomy_of

PHASES = Path(__file__).parent.parent.parent / "examples" / "phases.toml"
OPTIONS = {"plain": {}, "mtp": {"mtp": True}, "mtp and balance": {"mtp": True, "balance": True}}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(4)
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
    ],
)
def test_blocks_that_would_not_be_called_are_refused(ranks: Ranks, what: str, says: str) -> None:
    assert all(says in told for told in ranks.run(bypassed, 2, what))


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"pp": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_the_model_runs_what_was_planned_for_its_layers(ranks: Ranks, sizes: dict[str, int]) -> None:
    costs = stretto.load_costs(PHASES)
    count = math.prod(sizes.values())
    assert ranks.run(planned, count, sizes, "embedding,dense,moe*3,loss", costs) == [[]] * count


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_costs_fitted_to_the_model_are_costs_for_planning(ranks: Ranks, sizes: dict[str, int], tmp_path: Path) -> None:
    count, text = math.prod(sizes.values()), "embedding,dense,moe*3,loss"
    assert ranks.run(fitted, count, sizes, text, str(tmp_path / "fitted.toml")) == [[]] * count
    costs = stretto.load_costs(tmp_path / "fitted.toml")
    moe = MOE if "ep" not in sizes else EXPERT_PARALLEL_MOE
    assert costs.phases.keys() == {
        f"{layer.name}.{phase.name}" for layer in (EMBEDDING, DENSE, moe, LOSS) for phase in layer.phases
    }
    plan = stretto.schedules.zb_h1(devices=2, microbatches=4)
    program = stretto.lower(plan, layers=[[moe]] * 2, costs=costs)
    assert stretto.simulate(program, costs.for_stages(2, devices=2)).makespan > 0
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
    options = ("--mesh", mesh, "--layers", text, "--costs", str(tmp_path / "fitted.toml"))
    for command in (("compare", "one_f_one_b", "dualpipev"), ("simulate", "one_f_one_b"), ("show", "dualpipev")):
        done = run(*command, *options)
        assert done.returncode == 0, (command, done.stderr)


def test_first_and_last_layers_have_the_names_that_planning_gives_them() -> None:
    for model in (layers(CONFIG), stretto.cut(LM("qwen3_moe").model())):
        assert [anatomy_of(layer) for layer in (model[0], model[-1])] == [EMBEDDING, LOSS]


def test_blocks_have_the_names_that_planning_gives_them() -> None:
    model = layers(replace(CONFIG, first_k_dense_replace=1))
    assert [anatomy_of(layer) for layer in model[1:-1]] == [DENSE, *[MOE] * (len(model) - 3)]
    for kind in ("qwen3", "mixtral"):  # whose blocks are one phase, so they are not what planning calls dense or moe
        first, *blocks, last = map(anatomy_of, stretto.cut(LM(kind).model()))
        assert (first, last) == (EMBEDDING, LOSS)
        assert {block.name for block in blocks} == {"CutDecoderLayer"}


class _Called(nn.Linear):
    layer_name: object = "Projection"
    phase_name: object = "product"


def test_layers_may_name_themselves_and_their_one_phase() -> None:
    assert anatomy_of(_Called(2, 2)) == Layer("Projection", (Phase("product"),))
    assert anatomy_of(nn.Linear(2, 2)) == Layer("Linear", (Phase("linear"),))
    only = nn.Linear(2, 2)
    only.layer_name = "Head"
    assert anatomy_of(only) == Layer("Head", (Phase("head"),))


@pytest.mark.parametrize("attribute", ["layer_name", "phase_name"])
@pytest.mark.parametrize("name", [3, None, ""])
def test_a_name_that_is_none_is_refused(attribute: str, name: object) -> None:
    unnamed = _Called(2, 2)
    setattr(unnamed, attribute, name)
    with pytest.raises(stretto.PipelineError, match=rf"{attribute} of _Called is a name, .* \(got {name!r}\)"):
        anatomy_of(unnamed)
