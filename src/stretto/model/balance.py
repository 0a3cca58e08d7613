"""Balances experts after a step, without a loss."""

from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.moe.router import Router
from stretto.pipeline.pipeline import Pipeline


def update_router_biases(pipe: Pipeline, *, rate: float = 1e-3) -> dict[int, Tensor]:
    """Update the biases of all routers of a pipeline from the tokens that their experts got since the last update.

    All ranks must call this. Returns the number of tokens of each expert, for this rank's layers with routers, by the
    layer's number in the list of layers (the embedding is 0).
    """
    routers = {number: router for number, layer in pipe.layers.items() if (router := _router_of(number, layer))}
    own = {number: router.counts_E for number, router in routers.items()}
    counts = pipe.sum_by_layer(own, what="a stretto.moe.Router")  # which models cut from transformers do not have
    for number, router in routers.items():
        router.counts_E.copy_(counts[number])
        router.update_bias(rate)
    return counts


def _router_of(number: int, layer: nn.Module) -> Router | None:
    routers = [module for module in layer.modules() if isinstance(module, Router)]
    if len(routers) > 1:
        raise PipelineError(f"layer {number} has {len(routers)} routers; update their biases one by one")
    return routers[0] if routers else None
