"""Cut models compute what the uncut models of transformers compute, and leave them as they are."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stretto
from causal_lms import LAYERS, LM, NAMES, VOCABULARY, errors, exact, uncut
from stretto.model import CutOutput, transformers_loss
from stretto.model.router_loss import balance_loss
from stretto.model.values import Hidden, RouterSums
from stretto.moe import RoutedExperts
from stretto.pipeline.named_layer import NamedLayer

MOE = ("deepseek_v3", "mixtral", "qwen3_moe")


@st.composite
def language_models(draw: Any, kind: str) -> LM:
    """A model of this kind, with any of the options that change how it is cut."""
    options: dict[str, Any] = {"tie_word_embeddings": draw(st.booleans())}
    if kind != "deepseek_v3":
        options["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4]))
    if kind in ("llama", "qwen3", "qwen3_moe", "deepseek_v3"):
        options["attention_bias"] = draw(st.booleans())
    if kind in ("mistral", "mixtral"):
        options["sliding_window"] = draw(st.sampled_from([None, 2, 8]))
    if kind in ("qwen2", "qwen3"):
        options["max_window_layers"] = draw(st.integers(0, LAYERS))
    if kind == "qwen3_moe":
        options |= {
            "use_sliding_window": draw(st.booleans()),
            "sliding_window": 3,
            "norm_topk_prob": draw(st.booleans()),
        }
        options["mlp_only_layers"] = draw(st.sampled_from([[], [0], [0, 2]]))
    if kind in ("mixtral", "qwen3_moe"):
        options |= {"output_router_logits": draw(st.booleans()), "num_experts_per_tok": draw(st.integers(1, 3))}
    if kind == "deepseek_v3":
        options |= {"q_lora_rank": draw(st.sampled_from([None, 6])), "rope_interleave": draw(st.booleans())}
        options |= {"first_k_dense_replace": draw(st.integers(0, LAYERS)), "n_group": draw(st.sampled_from([1, 2]))}
    rope = draw(st.sampled_from(["default", "linear", "yarn"]))
    scaled = {} if rope == "default" else {"factor": 2.0}
    options["rope_parameters"] = {"rope_type": rope, "rope_theta": 100.0, **scaled}
    attention, padding = draw(st.sampled_from(["sdpa", "eager"])), draw(st.sampled_from(["", "left", "right"]))
    positions = draw(st.sampled_from(["", "shifted", "packed"]))
    return LM(kind, options, attention, padding, positions, seed=draw(st.integers(0, 99)))


def loss_of(layers: list[nn.Module], batch: Any, labels: Tensor) -> Tensor:
    total, count = transformers_loss(nn.Sequential(*layers)(batch), labels)
    return total / count


def grads_of(model: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("kind", NAMES)
@settings(max_examples=12)
@given(data=st.data())
def test_losses_and_gradients_are_those_of_the_uncut_model(kind: str, data: st.DataObject) -> None:
    validate_same(data.draw(language_models(kind)))


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("kind", NAMES)
def test_windows_ties_and_router_losses_are_those_of_the_uncut_model(kind: str, padding: str) -> None:
    validate_same(LM(kind, padding=padding))


def validate_same(lm: LM) -> None:
    model = lm.model()
    with exact(lm.kind):
        batch, labels = lm.batch()
        expected, expected_grads = uncut(model, batch, labels)
        loss = loss_of(stretto.cut(model), batch if len(batch) > 1 else batch["input_ids"], labels)
        loss.backward()
    assert abs(loss.item() - expected) < 1e-10 * expected
    assert errors(grads_of(model), expected_grads, 1e-10) == []


@pytest.mark.parametrize("kind", NAMES)
def test_logits_are_those_of_the_uncut_model_with_all_its_casts(kind: str) -> None:
    lm = LM(kind, {"output_router_logits": False}, padding="left", dtype=torch.float32)
    model, (batch, _) = lm.model(), lm.batch()
    logits = nn.Sequential(*stretto.cut(model))(batch)
    torch.testing.assert_close(logits, model(**batch, use_cache=False).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", NAMES)
def test_under_autocast_it_computes_in_the_types_of_the_uncut_model(kind: str) -> None:
    model, (batch, labels) = LM(kind, dtype=torch.float32).model(), LM(kind).batch()
    layers = stretto.cut(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, expected_grads = uncut(model, batch, labels)
        value, types = batch, []
        for layer in layers[:-1]:
            value = layer(value)
            types.append((value if isinstance(value, Tensor) else value[0]).dtype)
        loss = loss_of(layers, batch, labels)
    loss.backward()
    assert types == [torch.float32] * (LAYERS + 1)
    assert loss.item() == pytest.approx(expected, rel=2e-2)
    for name, grad in grads_of(model).items():
        assert torch.cosine_similarity(grad.flatten(), expected_grads[name].flatten(), 0) > 0.98, name


def test_without_padding_no_mask_is_made_and_only_hidden_states_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = LM("llama").model(), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*arguments: Any, attn_mask: Any = None, **named: Any) -> Tensor:
        masks.append(attn_mask)
        return attend(*arguments, attn_mask=attn_mask, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    value = LM("llama").batch()[0]["input_ids"]
    for layer in stretto.cut(model):
        value = layer(value)
        assert type(value) is Tensor
    assert masks == [None] * LAYERS


def test_a_mask_is_made_once_for_all_layers_that_get_the_same_batch() -> None:
    lm = LM("qwen3", padding="left")
    first, *decoders, _ = stretto.cut(lm.model())
    made = []
    value = first(lm.batch()[0])
    for layer in decoders:
        layer.module("model.layers." + layer._name[-1]).self_attn.register_forward_pre_hook(
            lambda _, __, given: made.append(given["attention_mask"]), with_kwargs=True
        )
        value = layer(value)
    assert made[1] is made[2] is not made[0], "the first layer sees everything, the others a window"
    other = first({**lm.batch()[0], "attention_mask": torch.ones(4, 6)})
    decoders[0](other)
    assert made[3] is None


def test_a_mask_that_changes_between_steps_is_read_again() -> None:
    lm = LM("llama", padding="left")
    batch, labels = lm.batch()
    model = lm.model()
    layers, mask = stretto.cut(model), batch["attention_mask"].numpy()
    for _ in range(2):
        assert loss_of(layers, batch, labels).item() == pytest.approx(uncut(model, batch, labels)[0], rel=1e-6)
        mask[:, :] = 1  # which PyTorch does not notice


@pytest.mark.parametrize("kind", NAMES)
def test_the_model_stays_as_it_is_and_shares_its_parameters(kind: str) -> None:
    model = LM(kind).model()
    before = [(name, module, type(module), set(vars(module))) for name, module in model.named_modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    layers = stretto.cut(model)
    assert all(isinstance(layer, NamedLayer) for layer in layers)
    loss_of(layers, *LM(kind).batch()).backward()
    assert [(name, module, type(module), set(vars(module))) for name, module in model.named_modules()] == before
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    states = [layer.state_dict(keep_vars=True) for layer in layers]
    held = {name: tensor for state in states for name, tensor in state.items()}
    own = model.state_dict(keep_vars=True)
    assert held.keys() == own.keys()
    assert all(held[name] is tensor for name, tensor in own.items())


@pytest.mark.parametrize("kind", MOE)
def test_experts_are_those_that_defer_unless_they_are_unusual(kind: str) -> None:
    def experts(model: Any) -> list[type]:
        last = stretto.cut(model)[LAYERS]
        return [type(module) for name, module in last.named_modules() if name.endswith("experts")]

    model = LM(kind).model()
    assert experts(model)[0] is RoutedExperts
    theirs = model.model.layers[-1].mlp.experts
    hook = theirs.register_forward_hook(lambda *_: None)
    assert experts(model)[0] is type(theirs), "a hook of the user's must run"
    hook.remove()
    theirs.is_transposed = True
    assert experts(model)[0] is type(theirs)


@pytest.mark.parametrize("kind", MOE)
def test_under_autocast_experts_return_as_many_bits_as_they_are_given(kind: str) -> None:
    lm = LM(kind, dtype=torch.float32)
    model, types = lm.model(), []
    for last in (model.model.layers[-1], stretto.cut(model)[LAYERS].module(f"model.layers.{LAYERS - 1}")):
        hook = last.mlp.experts.register_forward_hook(
            lambda _, given, output: types.append((given[0].dtype, output.dtype))
        )
        with torch.autocast("cpu", torch.bfloat16):
            last.mlp(torch.randn(1, 4, 8))
        hook.remove()
    assert types == [(torch.float32, torch.float32)] * 2


def test_layers_can_be_copied_and_pickled() -> None:
    lm = LM("qwen3_moe", padding="right")
    layers, (batch, labels) = stretto.cut(lm.model()), lm.batch()
    expected = loss_of(layers, batch, labels)
    for copied in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert torch.equal(loss_of(copied, batch, labels), expected)


def test_the_router_loss_can_be_read() -> None:
    lm = LM("mixtral", padding="left")
    model, (batch, labels) = lm.model(), lm.batch()
    output = nn.Sequential(*stretto.cut(model))(batch)
    assert isinstance(output, CutOutput)
    theirs = model(**batch, labels=labels, use_cache=False)
    torch.testing.assert_close(output.router_loss, 0.3 * theirs.aux_loss.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(output.logits_NTV, theirs.logits, rtol=1e-5, atol=1e-5)


# What is refused


def gemma() -> Any:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes, num_attention_heads=2))


def changed(kind: str = "llama", /, **more: Any) -> Any:
    return LM(kind).model(**more)


def with_attribute(of: str, name: str, value: Any) -> Any:
    model = changed()
    setattr(model.get_submodule(of), name, value)
    return model


def with_hook() -> Any:
    model = changed()
    model.model.register_forward_hook(lambda *_: None)
    return model


def checkpointed() -> Any:
    model = changed()
    model.gradient_checkpointing_enable()
    return model


def with_more() -> Any:
    model = changed()
    model.value_head = nn.Linear(2, 2)
    return model


def chunked() -> Any:
    model = changed("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    return model


def dynamic() -> Any:
    return changed(head_dim=4, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})


SAYS = "stretto.cut takes a causal language model of transformers: DeepseekV3ForCausalLM, LlamaForCausalLM, "
REFUSED = {
    "scaled embeddings": (gemma, SAYS, "(got GemmaForCausalLM, of model type 'gemma')"),
    "no head": (lambda: changed().model, SAYS, "(got LlamaModel, of model type 'llama')"),
    "no model": (lambda: nn.Linear(2, 2), SAYS, "(got Linear)"),
    "a subclass": (lambda: type("Mine", (transformers.LlamaForCausalLM,), {})(changed().config), SAYS, "(got Mine, of"),
    "adapters": (lambda: with_attribute("", "peft_config", {"a": 1}), "it has adapters (PEFT); merge them"),
    "quantized": (lambda: with_attribute("", "is_quantized", True), "it is quantized; load it in bfloat16"),
    "spread": (lambda: with_attribute("model.norm", "_hf_hook", 1), "load it without device_map"),
    "hooks": (with_hook, "model.model has hooks, which would not run"),
    "a forward": (lambda: with_attribute("model", "forward", print), "the forward of model.model was replaced"),
    "checkpointed": (checkpointed, "model.gradient_checkpointing_disable()", "checkpoint=True"),
    "compiled": (lambda: with_attribute("", "_compiled_call_impl", print), "the model is compiled; compile the layers"),
    "attention": (lambda: with_attribute("", "config", _config("flex_attention")), "'flex_attention'; call model.set_"),
    "positions": (dynamic, "its position embeddings are of type 'dynamic'"),
    "a kind of attention": (chunked, "layer 1 has 'chunked_attention', which is none of full_attention, sliding_"),
    "parameters": (with_more, "its forward does not use value_head."),
    "no routers": (lambda: changed("qwen3_moe", mlp_only_layers=[0, 1, 2]), "no layer of this model has a router"),
}


def _config(attention: str) -> Any:
    config = changed().config
    config._attn_implementation = attention
    return config


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused_in_one_line(case: str) -> None:
    make, *says = REFUSED[case]
    with pytest.raises(stretto.PipelineError) as raised:
        stretto.cut(make())
    assert all(part in str(raised.value) for part in says), raised.value
    assert "\n" not in str(raised.value)


def test_gradient_checkpointing_that_is_turned_on_later_is_refused() -> None:
    model = LM("llama").model()
    layers = stretto.cut(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(stretto.PipelineError, match="make the Pipeline with checkpoint=True"):
        nn.Sequential(*layers)(LM("llama").batch()[0])


TOKENS = torch.zeros(2, 5, dtype=torch.long)
BATCHES = {
    "words": (torch.zeros(2, 5), "(got float32 of shape (2, 5))"),
    "one sequence": (TOKENS[0], "(got int64 of shape (5,))"),
    "a tuple": ((TOKENS, TOKENS), "(got a tuple)"),
    "labels": ({"input_ids": TOKENS, "labels": TOKENS}, "(got 'input_ids', 'labels')"),
    "no tokens": ({"attention_mask": TOKENS}, "(got 'attention_mask')"),
    "a long mask": (
        {"input_ids": TOKENS, "attention_mask": TOKENS[:, :4]},
        "attention_mask is a tensor of shape (2, 5), as the tokens are (got int64 of shape (2, 4))",
    ),
    "a 4D mask": (
        {"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 5, 5)},
        "(got float32 of shape (2, 1, 5, 5))",
    ),
    "few positions": ({"input_ids": TOKENS, "position_ids": TOKENS[:, :1]}, "(got int64 of shape (2, 1))"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_that_a_cut_model_does_not_take_are_refused(case: str) -> None:
    batch, says = BATCHES[case]
    first, *_ = stretto.cut(LM("llama").model())
    with pytest.raises(stretto.PipelineError) as raised:
        first(batch)
    assert says in str(raised.value)


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(
        stretto.PipelineError, match=r"labels are token ids of shape \(2, 5\).*got int64 of shape \(2, 4\)"
    ):
        transformers_loss(torch.zeros(2, 5, VOCABULARY), TOKENS[:, 1:])


def test_forwards_of_ones_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(transformers.LlamaModel):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            return super().forward(*arguments, **named)

    model = LM("llama").model()
    model.model.__class__ = Own
    with pytest.raises(stretto.PipelineError, match=r"the forward of model\.model was replaced"):
        stretto.cut(model)
    model = LM("llama").model()
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, *_: self)
    with pytest.raises(stretto.PipelineError, match="the forward of the model was replaced"):
        stretto.cut(model)


def test_a_microbatch_of_padding_has_no_router_loss() -> None:
    sums = RouterSums(torch.zeros(4), torch.zeros(4))
    x = Hidden(torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64), None, sums)
    assert float(balance_loss(x, 2)) == 0
