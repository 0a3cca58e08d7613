"""Checkpoints: what we write, `transformers` loads, and the other way round; damage is one clear line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_models import TINY, configs, hugging_face, relative
from stretto.model import CausalLM, ModelConfig, ModelError, Yarn, from_pretrained, layer, load_weights, save_pretrained

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16.0}
TOKENS = torch.tensor([[1, 2, 0, 1], [2, 2, 1, 0]])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs())
def test_their_checkpoints_load_here_and_ours_load_there(tmp_path: Path, config: ModelConfig) -> None:
    theirs = hugging_face(config, experts_implementation="eager")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert ours.config == config
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    save_pretrained(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, experts_implementation="eager")
    assert again.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in theirs.state_dict().items())
    assert relative(ours(TOKENS), again(TOKENS).logits) < 1e-5


def test_large_models_are_written_in_several_files_that_replace_earlier_ones(tmp_path: Path) -> None:
    model = CausalLM(TINY, mtp=True)
    save_pretrained(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save_pretrained(model, tmp_path, shard_bytes=200_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {"config.json", "model.safetensors.index.json", *index["weight_map"].values()} == set(names)
    assert len(names) > 4
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters()) + 3 * 8 * 4 + 8 * 4
    again = from_pretrained(tmp_path, dtype=torch.float32, mtp=True)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert again.get_parameter("model.embed_tokens.weight") is again.get_parameter("model.layers.4.embed_tokens.weight")


def test_a_layer_reads_only_its_own_weights(tmp_path: Path) -> None:
    model = CausalLM(TINY)
    save_pretrained(model, tmp_path)
    one = layer(TINY, 2)
    load_weights(one, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in one.state_dict().items())
    assert "model.layers.1.mlp.experts.gate_up_proj" in one.state_dict()


def test_fp8_weights_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    """As DeepSeek stores them: a scale for each block of 128 × 128."""
    config = dataclasses.replace(TINY, intermediate_size=200, hidden_size=136)
    save_pretrained(CausalLM(config), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"):
        stored = tensors[name].mul(100).to(torch.float8_e4m3fn)
        rows, columns = (-(-size // 128) for size in stored.shape)
        scale = torch.arange(1.0, rows * columns + 1).view(rows, columns)
        tensors |= {name: stored, f"{name}_scale_inv": scale}
        expected[name] = stored.float()
        for i in range(stored.shape[0]):
            for j in range(stored.shape[1]):
                expected[name][i, j] *= scale[i // 128, j // 128]
    save_file(tensors, tmp_path / "model.safetensors")
    model = from_pretrained(tmp_path, dtype=torch.float32)
    up, down = expected.values()
    assert torch.equal(model.get_parameter("model.layers.0.mlp.up_proj.weight"), up)
    assert torch.equal(model.get_parameter("model.layers.1.mlp.experts.down_proj")[3], down)


def _without(name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: _without("model.norm.weight", t), "lacks 1 tensors of the model, such as model.norm.weight"),
        (
            lambda t: _without("model.layers.1.mlp.experts.5.up_proj.weight", t),
            "such as model.layers.1.mlp.experts.gate_up_proj",
        ),
        (
            lambda t: _without("model.layers.1.mlp.experts.7.down_proj.weight", t),
            r"model.layers.1.mlp.experts.down_proj has the shape \(7, 64, 32\), not \(8, 64, 32\)",
        ),
        (lambda t: {**t, "lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}, "as float8_e4m3fn without"),
        (lambda t: {**t, "lm_head.weight": t["lm_head.weight"].to(torch.int8)}, "stored as int8 without scales"),
        (
            lambda t: {**t, "lm_head.weight_scale_inv": torch.ones(8, 2)},
            r"lm_head.weight_scale_inv has the shape \(8, 2\), not \(2, 1\)",
        ),
        (lambda t: {**t, "lm_head.weight": torch.zeros(3, 64)}, r"lm_head.weight has the shape \(3, 64\), not"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    save_pretrained(CausalLM(TINY), tmp_path)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", "{", "is no config.json"),
        ("config.json", '{"model_type": "llama"}', "model_type is one of deepseek_v3, kimi_k2"),
        ("model.safetensors", "garbage", "cannot be read"),
        ("model.safetensors.index.json", "[]", "is no index of safetensors files"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"lm_head.weight": "../model.safetensors"}}',
            "'../model.safetensors', which is no file of the folder",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"lm_head.weight": 3}}', "names 3, which is no file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    save_pretrained(CausalLM(TINY), tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=says) as error:
        from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads must equal num_attention_heads"),
        ({"hidden_size": "64"}, "not the configuration of such a model"),
        ({"hidden_size": None}, "not the configuration of such a model"),
        ({"vocab_size": 0}, "vocab_size is a whole number of at least 1"),
        ({"q_lora_rank": 0}, "q_lora_rank is a whole number, or null"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"n_group": 3}, "8 experts, 3 groups and 1 groups per token do not fit"),
        ({"n_group": 8, "topk_group": 8}, "a group needs two experts at least"),
        ({"num_experts_per_tok": 5}, "5 experts per token cannot be chosen from 1 groups of 4"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary embeddings are plain or YaRN"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0"),
        ({"is_causal": False}, "is_causal must be True"),
        ({"rope_theta": -5.0}, "rope_theta is a number above 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is a number above 0"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast is a number above 0"),
        ({"rope_scaling": {**YARN, "attention_factor": 0.0}}, "rotary embeddings are plain or YaRN, with no further"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 3.0}}, "say different things; leave one out"),
        ({"quantization_config": {"quant_method": "gptq"}}, "this quantization_config is not known"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weights are plain, or fp8 in blocks of 128 × 128",
        ),
    ],
)
def test_what_this_architecture_does_not_do_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        ModelConfig.from_hugging_face({**TINY.to_hugging_face(), **change})


@pytest.mark.parametrize("name", ["routed_scaling_factor", "n_group", "q_lora_rank", "first_k_dense_replace"])
def test_fields_that_change_numbers_must_be_there(name: str) -> None:
    values = TINY.to_hugging_face()
    del values[name]
    with pytest.raises(ModelError, match=f"{name} is missing"):
        ModelConfig.from_hugging_face(values)


def test_whole_numbers_may_be_written_as_fractions() -> None:
    config = ModelConfig.from_hugging_face({**TINY.to_hugging_face(), "rope_scaling": YARN})
    assert config.yarn == Yarn(4, 16)


@pytest.mark.parametrize("name", ["tiny", "moonlight-16b", "deepseek-v3", "kimi-k2"])
def test_configurations_survive_their_json(name: str) -> None:
    config = ModelConfig.named(name)
    assert ModelConfig.from_hugging_face(json.loads(json.dumps(config.to_hugging_face()))) == config


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown model 'gpt'; known are tiny, moonlight-16b, deepseek-v3, kimi-k2"):
        ModelConfig.named("gpt")


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    save_pretrained(CausalLM(TINY), tmp_path, shard_bytes=200_000)
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    files["weight_map"]["lm_head.weight"] = files["weight_map"]["model.layers.1.input_layernorm.weight"]
    index.write_text(json.dumps(files))
    with pytest.raises(ModelError, match=r"safetensors lacks lm_head.weight"):
        from_pretrained(tmp_path)


def test_what_is_no_model_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config is a ModelConfig"):
        CausalLM("tiny")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"takes a CausalLM \(got Linear\)"):
        save_pretrained(torch.nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write .*file: File exists"):
        save_pretrained(CausalLM(TINY), tmp_path / "file")


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    save_pretrained(CausalLM(TINY), tmp_path)
    with torch.device("meta"):
        model = CausalLM(TINY)
    with pytest.raises(ModelError, match="on the meta device"):
        load_weights(model, tmp_path)


def test_kimi_k2_is_written_as_what_transformers_knows(tmp_path: Path) -> None:
    config = ModelConfig.from_hugging_face({**TINY.to_hugging_face(), "model_type": "kimi_k2"})
    save_pretrained(CausalLM(config), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "deepseek_v3"
