"""Models whose experts are divided among ranks: cut ones, our own, and their checkpoints."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exchange_jobs import cut_models, own_models
from moe_jobs import CONFIG
from ranks import Ranks
from stretto.model import CausalLM, ModelError, load_weights, save_pretrained
from stretto.moe import Experts


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.stop()


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_cut_models_with_divided_experts_are_whole(ranks: Ranks, kind: str, name: str) -> None:
    assert ranks.run(cut_models, 2, kind, name) == [[], []]


@pytest.mark.parametrize("name", ["all-to-all", "tokens"])
def test_our_model_with_divided_experts_is_whole(ranks: Ranks, name: str) -> None:
    assert ranks.run(own_models, 2, name) == [[], []]


def divided(rank: int, count: int) -> CausalLM:
    model = CausalLM(CONFIG)
    for module in model.modules():
        if isinstance(module, Experts):
            module.shard(rank, count)
    return model


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_the_experts_that_it_holds(tmp_path: Path, rank: int) -> None:
    whole = CausalLM(CONFIG)
    save_pretrained(whole, tmp_path)
    part = divided(rank, 2)
    load_weights(part, tmp_path)
    expected = whole.state_dict()
    for name, value in part.state_dict().items():
        other = expected[name].chunk(2)[rank] if value.shape != expected[name].shape else expected[name]
        assert torch.equal(value, other), name
    assert part.state_dict()["model.layers.1.mlp.experts.down_proj"].shape[0] == CONFIG.n_routed_experts // 2


def test_a_checkpoint_with_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    more = dataclasses.replace(CONFIG, n_routed_experts=2 * CONFIG.n_routed_experts)
    save_pretrained(CausalLM(more), tmp_path)
    with pytest.raises(ModelError, match=f"has {more.n_routed_experts} experts, not {CONFIG.n_routed_experts}"):
        load_weights(divided(0, 2), tmp_path)


def test_a_share_of_the_experts_is_not_saved_as_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of 8 experts of a layer; collect those of all ranks"):
        save_pretrained(divided(1, 4), tmp_path)
    assert not list(tmp_path.iterdir())
