"""Our DeepSeek-V3 against Hugging Face's: logits and all gradients, over random small models."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_models import TINY, configs, exact, hugging_face, pair, relative
from stretto.model import CausalLM, CutOutput, ModelConfig, ModelError, Output, causal_lm_loss
from stretto.model.blocks import MoeBlock

MODELS = {"deepseek-v3": 671.0, "kimi-k2": 1026.4, "moonlight-16b": 16.0}


def _tokens(config: ModelConfig, sequences: int, length: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, config.vocab_size, (sequences, length))


def _differences(config: ModelConfig, dtype: torch.dtype, tokens: Tensor, **options: str) -> tuple[float, float]:
    """How far logits and gradients are apart."""
    ours, theirs = pair(config, dtype, **options)
    mine, expected = ours(tokens), theirs(tokens).logits
    torch.manual_seed(1)
    weights = torch.randn_like(expected)
    (mine * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = dict(ours.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    apart = 0.0
    for name, parameter in theirs.named_parameters():
        grad = gradients[name].grad
        zero = torch.zeros_like(parameter)
        difference = (zero if grad is None else grad) - (zero if parameter.grad is None else parameter.grad)
        apart = max(apart, float(difference.abs().max()) / largest)
    return relative(mine, expected), apart


@settings(max_examples=60)
@given(configs(), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_logits_and_gradients_are_theirs_in_float64(config: ModelConfig, count: int, length: int, seed: int) -> None:
    tokens = _tokens(config, count, length, seed)
    with exact():
        logits, gradients = _differences(config, torch.float64, tokens, experts_implementation="eager")
    assert max(logits, gradients) < 1e-10


@settings(max_examples=20)
@given(configs(least=4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_logits_and_gradients_are_theirs_in_float32(config: ModelConfig, count: int, length: int, seed: int) -> None:
    """With their own casts. Their default kernels refuse odd sizes."""
    tokens = _tokens(config, count, length, seed)
    assert max(_differences(config, torch.float32, tokens, experts_implementation="eager")) < 1e-5


def test_logits_and_gradients_are_theirs_with_their_default_kernels() -> None:
    assert max(_differences(TINY, torch.float32, _tokens(TINY, 3, 20, 0))) < 1e-5


@pytest.mark.parametrize("name", sorted(MODELS))
def test_known_models_have_the_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = CausalLM(ModelConfig.named(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(MODELS[name], abs=0.05)


def test_a_token_sees_only_those_before_it() -> None:
    model = CausalLM(TINY).double()
    tokens = _tokens(TINY, 2, 8, 0)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    assert relative(before[:, :5], after[:, :5]) < 1e-12
    assert relative(before[:, 5:], after[:, 5:]) > 1e-3


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_pairs_are_neighbours_or_halves(interleaved: bool) -> None:
    """Weights of one convention, reordered, give the other convention's logits."""
    config = dataclasses.replace(TINY, rope_interleave=interleaved)
    model, other = CausalLM(config).double(), CausalLM(dataclasses.replace(config, rope_interleave=not interleaved))
    other = other.double()
    half = torch.arange(TINY.qk_rope_head_dim // 2)
    order = torch.stack([half, half + len(half)], 1).flatten()  # the place among halves of each neighbour
    if interleaved:
        order = order.argsort()
    state = model.state_dict()
    for name, weight in state.items():
        if "q_b_proj" in name:
            by_head = weight.unflatten(0, (TINY.num_attention_heads, -1)).clone()
            by_head[:, TINY.qk_nope_head_dim :] = by_head[:, TINY.qk_nope_head_dim :][:, order]
            state[name] = by_head.flatten(0, 1)
        elif "kv_a_proj" in name:
            state[name] = torch.cat([weight[: TINY.kv_lora_rank], weight[TINY.kv_lora_rank :][order]])
    other.load_state_dict(state)
    tokens = _tokens(TINY, 2, 8, 0)
    assert relative(model(tokens), other(tokens)) < 1e-12


def test_experts_with_equal_scores_are_chosen_as_theirs_are() -> None:
    config = dataclasses.replace(TINY, first_k_dense_replace=0)
    ours, theirs = pair(config, torch.float32)
    with torch.no_grad():
        for model in (ours, theirs):
            for name, tensor in model.state_dict().items():
                if "mlp.gate" in name:
                    tensor.zero_()
    tokens = _tokens(config, 2, 6, 0)
    assert relative(ours(tokens), theirs(tokens).logits) < 1e-5
    gate = ours.get_submodule("model.layers.1.mlp.gate")
    routing = gate(torch.randn(5, config.hidden_size))
    assert all(len(set(row)) == config.num_experts_per_tok for row in routing.indices_TK.tolist())
    assert torch.allclose(routing.weights_TK.sum(-1), torch.tensor(config.routed_scaling_factor))


def test_the_mtp_module_is_theirs() -> None:
    from transformers.modeling_layers import MtpModel

    theirs = hugging_face(TINY, experts_implementation="eager").double()
    ours = CausalLM(TINY, mtp=True).double()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    module = ours.get_submodule(f"model.layers.{TINY.num_hidden_layers}")
    with exact():
        mtp = MtpModel(theirs, 1).double()
        for tensor in mtp.layers.state_dict().values():
            tensor.normal_(0.5, 0.3)
        state = {name.removeprefix("layers.0."): value for name, value in mtp.state_dict().items()}
        state = {
            name.removeprefix("mtp_block."): value
            for name, value in state.items()
            if not name.startswith("shared_head")
        }
        state["shared_head.norm.weight"] = state.pop("post_norm.weight")
        module.load_state_dict(state)
        tokens = _tokens(TINY, 2, 7, 0)
        output = ours(tokens)
        hidden = theirs.model(tokens).last_hidden_state
        embedded = theirs.model.embed_tokens(tokens[:, 1:])
        positions = torch.arange(6)[None]
        mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        out = mtp.layers[0](
            embedded, hidden[:, :-1], theirs.model.rotary_emb(embedded, positions), mask, positions, None
        )
        expected = theirs.lm_head(out)
    assert isinstance(output, Output)
    assert output.mtp_logits_NTV is not None
    assert relative(output.mtp_logits_NTV, expected) < 1e-6  # their eager experts and softmax stay float32
    assert relative(output.logits_NTV, theirs(tokens).logits) < 1e-6


def test_the_loss_counts_every_token_once_and_adds_what_is_asked_for() -> None:
    model = CausalLM(TINY, mtp=True, balance=True).double()
    tokens, targets = _tokens(TINY, 2, 7, 0), _tokens(TINY, 2, 7, 1)
    targets[0, :3] = -100
    output = model(tokens)
    total, count = causal_lm_loss(output, targets, mtp_weight=0.5, balance_weight=0.25)
    cross = torch.nn.functional.cross_entropy
    expected = cross(output.logits_NTV.flatten(0, 1), targets.flatten())
    expected = expected + 0.5 * cross(output.mtp_logits_NTV.flatten(0, 1), targets[:, 1:].flatten())
    expected = expected + 0.25 * output.balance
    assert int(count) == 11
    assert torch.allclose(total / count, expected, rtol=1e-12)


def test_the_balance_loss_is_deepseeks_formula() -> None:
    model = CausalLM(dataclasses.replace(TINY, num_hidden_layers=2, first_k_dense_replace=1), balance=True).double()
    seen = []
    block = next(module for module in model.modules() if isinstance(module, MoeBlock))
    block.mlp.gate.register_forward_hook(lambda _, __, routing: seen.append(routing.scores_TE.detach()))
    output = model(_tokens(TINY, 3, 5, 0))
    total = 0.0
    for scores in seen[0].unflatten(0, (3, 5)):  # one sequence
        for expert in range(TINY.n_routed_experts):
            chosen = sum(expert in row.topk(TINY.num_experts_per_tok).indices for row in scores)
            f = float(chosen) * TINY.n_routed_experts / (TINY.num_experts_per_tok * 5)
            total += f * float((scores[:, expert] / scores.sum(1)).mean()) / 3
    assert float(output.balance.detach()) == pytest.approx(total, rel=1e-12)


def test_norms_rotations_and_the_router_are_exact_in_bfloat16() -> None:
    """What a bfloat16 model computes in float32 depends on no cast of its constants."""
    model = CausalLM(TINY).bfloat16()
    attention = model.get_submodule("model.layers.0.self_attn")
    assert attention.heads.rotary.frequencies.dtype == torch.float64
    assert model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias.dtype == torch.float32
    x = torch.randn(1, 1, 3000, TINY.qk_rope_head_dim).bfloat16()
    (rotated,) = attention.heads.rotary(x)
    (expected,) = CausalLM(TINY).get_submodule("model.layers.0.self_attn.heads").rotary(x.float())
    assert torch.equal(rotated, expected.bfloat16())


@pytest.mark.parametrize(
    "tokens", [{"input_ids": torch.zeros(1, 2)}, torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2)]
)
def test_what_is_not_tokens_is_refused(tokens: object) -> None:
    with pytest.raises(ModelError, match="takes one tensor of token ids, sequences × tokens"):
        CausalLM(TINY)(tokens)


def test_targets_and_outputs_that_do_not_belong_together_are_refused() -> None:
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(ModelError, match=r"of shape \(2, 3\) \(got \(2, 2\)\)"):
        causal_lm_loss(logits, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ModelError, match="transformers_loss is for models cut from transformers"):
        causal_lm_loss(CutOutput(logits, torch.zeros(())), torch.zeros(2, 3, dtype=torch.int64))  # type: ignore[arg-type]


def test_mtp_needs_two_tokens() -> None:
    with pytest.raises(ModelError, match="at least two tokens"):
        CausalLM(TINY, mtp=True)(torch.tensor([[1]]))
