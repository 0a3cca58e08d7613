"""Small random causal language models of transformers, their batches, and what the uncut models compute."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

VOCABULARY, WIDTH, LAYERS = 13, 8, 3
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 6}
ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
LATENT = {"kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 2, "v_head_dim": 6, "n_shared_experts": 1}
NAMES = {
    "deepseek_v3": "DeepseekV3",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
USUAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **ATTENTION, **LATENT, "num_key_value_heads": 4, "q_lora_rank": 6, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "first_k_dense_replace": 1,
    },
    "llama": {**ATTENTION, "tie_word_embeddings": True},
    "mistral": {**ATTENTION, "head_dim": 4, "sliding_window": 3},
    "mixtral": {**ATTENTION, **EXPERTS, **ROUTER_LOSS, "head_dim": 4, "sliding_window": 3},
    "qwen2": {**ATTENTION, "use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1},
    "qwen3": {**ATTENTION, "head_dim": 4, "use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1},
    "qwen3_moe": {**ATTENTION, **EXPERTS, **ROUTER_LOSS, "num_experts": 4, "head_dim": 4, "mlp_only_layers": [1]},
}  # fmt: skip
"""A config of each kind, with as much as possible of what the kind has."""


@dataclass(frozen=True)
class LM:
    """All that it takes to make the same model and batch everywhere."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    padding: str = ""
    """Where sequences are padded: "left", "right", or not at all."""
    positions: str = ""
    """Which positions a batch has: "shifted", "packed", or the usual ones."""
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def model(self, **more: Any) -> Any:
        """Make the model, with weights that are large enough for errors to show."""
        import transformers

        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 10, "num_hidden_layers": LAYERS}
        options = {**sizes, **USUAL[self.kind], **self.options, **more}
        how = {
            "attn_implementation": self.attention,
            "experts_implementation": "eager",
        }  # others lack float64
        config = getattr(transformers, f"{NAMES[self.kind]}Config")(**options, **how)
        model = getattr(transformers, f"{NAMES[self.kind]}ForCausalLM")(config).to(self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                size = 0.1 if "norm" in name or "bias" in name else 0.4
                tensor.copy_(size * torch.randn(tensor.shape, generator=generator) + (1 if "norm" in name else 0))
        return model

    def batch(self, sequences: int = 4, tokens: int = 6) -> tuple[dict[str, Tensor], Tensor]:
        """Make what a tokenizer gives, and labels."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        batch = {"input_ids": torch.randint(VOCABULARY, (sequences, tokens), generator=generator)}
        labels = batch["input_ids"].clone()
        labels[0, : tokens // 2] = -100  # microbatches have different numbers of predictions
        if self.padding:
            lengths = torch.randint(2, tokens + 1, (sequences, 1), generator=generator)
            mask = (torch.arange(tokens) < lengths).long()
            batch["attention_mask"] = mask if self.padding == "right" else mask.flip(1)
            labels[batch["attention_mask"] == 0] = -100
        if self.positions:
            usual = torch.arange(tokens).expand(sequences, -1)
            batch["position_ids"] = usual + 3 if self.positions == "shifted" else usual % (tokens // 2)
        return batch, labels


class _Exact:
    """PyTorch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def exact(*kinds: str) -> Iterator[None]:
    """Lift the casts to float32 in the code of these models: norms, routers, rotary embeddings and losses.

    With them, differences of 1e-16 may be rounded to differences of 1e-7.
    """
    with contextlib.ExitStack() as stack:
        for kind in kinds or NAMES:
            module = import_module(f"transformers.models.{kind}.modeling_{kind}")
            stack.enter_context(mock.patch.object(module, "torch", _Exact()))
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        yield


def uncut(model: Any, batch: dict[str, Tensor], labels: Tensor, microbatches: int = 1) -> tuple[float, dict[str, Any]]:
    """The model's own loss, each microbatch weighed by its number of predictions, and its gradients by all names."""
    model.zero_grad()
    count, total = int((labels[:, 1:] != -100).sum()), 0.0
    parts = zip(*(tensor.chunk(microbatches) for tensor in (*batch.values(), labels)), strict=True)
    for *inputs, targets in parts:
        predictions = int((targets[:, 1:] != -100).sum())
        given = dict(zip(batch, inputs, strict=True))
        if predictions:
            loss = model(**given, labels=targets, use_cache=False).loss * (predictions / count)
            loss.backward()
            total += float(loss.detach())
    grads = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    return total, grads


def errors(found: dict[str, Any], expected: dict[str, Any], bound: float) -> list[str]:
    """What differs by more than the bound, relative to the largest number.

    Gradients that are 0 but for rounding, such as those of routers with one expert for each token, whose weight is 1,
    differ by rounding.
    """
    wrong = []
    largest = {name: float(grad.abs().max()) for name, grad in expected.items() if grad is not None}
    rounding = 1e-4 * max(largest.values())
    for name, mine in found.items():
        theirs = expected[name]
        if mine is None or theirs is None or (mine - theirs).abs().max() > bound * max(largest[name], rounding):
            wrong.append(f"{name}: {mine} is not {theirs}")
    return wrong
