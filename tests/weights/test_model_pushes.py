"""A pipeline of our own model, with experts on several ranks, is pushed under the names of its checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doc_pages import blocks
from model_pushes import model_of, pushed
from moe_jobs import CONFIG
from ranks import Ranks
from stretto.model import ModelConfig, save_pretrained
from stretto.weights import Export, Receiver

CONFIGS = [dataclasses.replace(CONFIG, tie_word_embeddings=tied) for tied in (False, True)]


def export_of(config: ModelConfig) -> Export:
    """The export that docs/models.md shows."""
    (block,) = [block for block in blocks("docs/models.md") if "export = Export(" in block.code]
    names: dict[str, Any] = {"config": config}
    exec(block.code, names)
    export = names["export"]
    assert isinstance(export, Export)
    return export


def saved(config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model's checkpoint, with each parameter doubled."""
    model = model_of(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    save_pretrained(model, folder / "saved")
    return load_file(folder / "saved" / "model.safetensors")


@pytest.mark.parametrize("config", CONFIGS, ids=["untied", "tied"])
def test_the_export_of_the_docs_gives_the_names_and_shapes_of_a_checkpoint(config: ModelConfig, tmp_path: Path) -> None:
    held = [shard.entry for shard in export_of(config)(model_of(config)).held()]
    expected = saved(config, tmp_path)
    assert {entry.name: entry.shape for entry in held} == {name: tuple(it.shape) for name, it in expected.items()}
    assert len(held) == len(expected)


@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"ep": 2, "pp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_every_expert_arrives_from_the_rank_that_holds_it(
    ranks: Ranks, folder: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    config = CONFIGS[0]
    expected = saved(config, tmp_path)
    live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with Receiver(f"unix://{folder}/engine", into=live).start() as receiver:
        address = str(receiver.address)
        assert ranks.run(pushed, 4, sizes, config, export_of(config), address) == ["verified"] * 4
        assert receiver.ensure_serving() == "doubled"
    assert [name for name in expected if not torch.equal(live[name], expected[name])] == []
