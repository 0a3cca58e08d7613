"""Pipelines train cut models as one process trains the uncut ones, and use the models' own names."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from causal_lms import LM
from cut_jobs import KINDS, all_kinds, names, refused, states, tied_by_name, trained, trains, with_recomputation
from ranks import Ranks
from strategies import SCHEDULES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.stop()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_every_kind_of_model(schedule: str, ranks: Ranks) -> None:
    for found in ranks.run(all_kinds, 2, schedule):
        for kind, result in found.items():
            assert result["loss"] < 1e-10, kind
            assert result["grads"] == [], kind


@pytest.mark.parametrize("kind", KINDS)
def test_only_norms_and_routers_compute_their_weight_gradients_at_once(kind: str, ranks: Ranks) -> None:
    results = ranks.run(trained, 2, "zb_h1", kind)
    for result in results:
        assert all("norm" in name or name.endswith("mlp.gate.weight") for name in result["at once"])
    deferred = {name for result in results for name in result["deferred"]}
    model = LM(kind).model()
    assert deferred > {name for name, _ in model.named_parameters() if ".experts." in name}


@pytest.mark.parametrize("more", [{"checkpoint": True}, {"recompute": ["*norm", "*.act_fn"]}, {"recompute": ["*.mlp"]}])
def test_layers_can_be_recomputed_by_the_names_of_the_model(more: dict[str, Any], ranks: Ranks) -> None:
    assert ranks.run(_recomputing, 2, more) == [[(True, [])] * 2] * 2


def _recomputing(mesh: Any, more: dict[str, Any]) -> list[Any]:
    return with_recomputation(mesh, **more)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_states_load_into_the_pipeline_and_back_into_the_model(kind: str, ranks: Ranks) -> None:
    (first, other), (second, _) = ranks.run(states, 2, kind)
    assert {**first, **second}.keys() == other.keys()
    assert first.keys() != second.keys()
    model = LM(kind, seed=7).model()
    model.load_state_dict({**first, **second})
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_a_pipeline_shows_the_names_of_the_model(ranks: Ranks) -> None:
    first, second = ranks.run(names, 2)
    model = KINDS["qwen3_moe"].model()
    own = {name for name, _ in model.named_parameters()}
    assert first["parameters"] | second["parameters"] == own
    for found in (first, second):
        assert found["main_grads"] == found["parameters"]
        assert found["state_dict"] == found["parameters"]
        assert {name.rpartition(".")[2] for name in found["modules"]} <= {"swiglu"}, "all others are in the model too"
        assert found["all modules"]
    assert first["experts"] + second["experts"] == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]


def test_heads_can_be_tied_by_the_names_of_the_model(ranks: Ranks) -> None:
    assert ranks.run(tied_by_name, 2) == [[], []]


REFUSED = {
    "an unknown tie": "'lm_head.wieght' is no parameter to tie: ",
    "other shapes": "model.embed_tokens.weight and model.norm.weight cannot be tied: ",
    "no module": "memory names '0.*', but no phase or module is called that",
    "float16": "model.embed_tokens.weight is float16, whose gradients need scaling",
    "one name twice": "layers 1 and 4 both have a model.norm.weight, which is not the same; give them other names",
    "a hook": "model.layers.1.mlp.up_proj.weight has a hook for when .grad is set",
    "a state dict": 'Missing key(s) in state_dict: "model.layers.0.mlp.up_proj.weight".',
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_have_the_names_of_the_model(case: str, ranks: Ranks) -> None:
    for said in ranks.run(refused, 2, case):
        assert REFUSED[case] in said
        if case == "a state dict":
            assert 'Unexpected key(s) in state_dict: "model.layers.1.more".' in said
            assert "size mismatch for model.norm.weight" in said


def test_training_the_layers_trains_the_model(ranks: Ranks) -> None:
    for *losses, after, theirs in ranks.run(trains, 2):
        assert losses == sorted(losses, reverse=True)
        assert after < losses[-1]
        assert after == pytest.approx(theirs, rel=1e-5)
