"""Cuts a causal language model of Hugging Face `transformers` into layers for a `Pipeline`."""

from typing import Any

from torch import nn

from stretto.ir.errors import PipelineError
from stretto.model.attention_inputs import AttentionInputMaker
from stretto.model.cut_layers import CutDecoderLayer, CutEmbedding, CutHead
from stretto.model.shared_copy import shared_copy
from stretto.model.supported import SUPPORTED, mask_functions, refusal


def cut(model: Any) -> list[nn.Module]:
    """Cut a causal language model of `transformers` into layers for a `Pipeline`.

    The layers are the embedding, each decoder layer, and the final norm with the head. The first takes token ids of
    shape sequences × tokens, or a dict with "input_ids" and if needed "attention_mask" and "position_ids". The last
    returns logits; if the config says `output_router_logits` and the model has a router loss (Mixtral, Qwen3-MoE), it
    returns a `stretto.model.CutOutput` of logits and that loss. `stretto.model.transformers_loss` is the loss for
    both. A forward equals the model's own with `use_cache=False`.

    The layers share the model's parameters, so training them trains the model, which itself is not changed. Experts
    are replaced in the layers by `stretto.moe.RoutedExperts`, which defer their weight gradients. In a `Pipeline`, all
    names are the model's own, e.g. "model.layers.0.mlp.gate.weight".
    """
    if (wrong := refusal(model)) is not None:
        raise PipelineError(wrong)
    config, base = model.config, model.model
    _, kind_of = SUPPORTED[config.model_type]
    inputs = AttentionInputMaker(config, mask_functions())
    records = bool(getattr(config, "output_router_logits", False)) and hasattr(model, "router_aux_loss_coef")
    decoders = []
    for number, layer in enumerate(base.layers[: config.num_hidden_layers]):
        has_experts = _has_experts(layer)
        routed = records and has_experts
        decoders.append(
            CutDecoderLayer(
                f"model.layers.{number}",
                shared_copy(layer, records=routed),
                base.rotary_emb,
                kind=kind_of(config, number),
                inputs=inputs,
                router="mlp.gate" if routed else "",
                top_k=model.num_experts_per_tok if routed else 0,
            )
        )
    routers = sum(decoder.has_router for decoder in decoders)
    if records and not routers:
        raise PipelineError("the config says output_router_logits, but no layer of this model has a router")
    weight = model.router_aux_loss_coef if records else 0.0
    head = CutHead(base.norm, model.lm_head, routers=routers, router_weight=weight)
    layers: list[nn.Module] = [CutEmbedding(base.embed_tokens), *decoders, head]
    _validate_complete(model, layers)
    return layers


def _has_experts(layer: nn.Module) -> bool:
    block = layer._modules.get("mlp")
    return block is not None and "gate" in block._modules and "experts" in block._modules


def _validate_complete(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raise PipelineError if the layers do not hold exactly the parameters and buffers that the model has."""
    held = {name: tensor for layer in layers for name, tensor in layer.state_dict(keep_vars=True).items()}
    own = model.state_dict(keep_vars=True)
    for name in own.keys() | held.keys():
        if own.get(name) is not held.get(name):
            raise PipelineError(
                f"this {type(model).__name__} cannot be cut: its forward does not use {name}, or in another way than "
                "transformers' own"
            )
