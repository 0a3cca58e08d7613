"""The layers of a cut model: embedding, decoder layers, and the final norm with the head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.layers import EMBEDDING, LOSS
from stretto.model.attention_inputs import AttentionInputMaker
from stretto.model.router_loss import add_router, balance_loss
from stretto.model.values import CutOutput, Hidden
from stretto.pipeline.named_layer import NamedLayer

CHECKPOINTING = (
    "gradient checkpointing of transformers is on, which a pipeline cannot follow; turn it off "
    "(model.gradient_checkpointing_disable()) and make the Pipeline with checkpoint=True or recompute="
)
_INPUTS = ("input_ids", "attention_mask", "position_ids")


class CutEmbedding(NamedLayer):
    """Takes token ids N × T, or a dict of a tokenizer: "input_ids", and if given "attention_mask", "position_ids"."""

    layer_name = EMBEDDING.name

    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__({"model.embed_tokens": embed_tokens})

    def forward(self, batch: Any) -> Hidden | Tensor:
        tokens_NT, mask_NT, positions_NT = _inputs(batch)
        states_NTD = self.module("model.embed_tokens")(tokens_NT)
        # copies, since later layers keep what they compute from these tensors on them
        return Hidden(states_NTD, _copied(mask_NT), _copied(positions_NT)).passed_on()


class CutDecoderLayer(NamedLayer):
    """Runs one decoder layer, with position embeddings and the mask of its kind of attention."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        rotary: nn.Module,
        *,
        kind: str,
        inputs: AttentionInputMaker,
        router: str = "",
        top_k: int = 0,
    ) -> None:
        """`router` is the name of the router whose loss is trained, "" if there is none."""
        super().__init__({name: layer, "model.rotary_emb": rotary})
        self._name, self._kind, self._inputs = name, kind, inputs
        self._router, self._top_k = router, top_k

    @property
    def has_router(self) -> bool:
        """Whether the layer has a router whose loss is trained."""
        return bool(self._router)

    def forward(self, value: Hidden | Tensor) -> Hidden | Tensor:
        x = Hidden.of(value)
        layer = self.module(self._name)
        if getattr(layer, "gradient_checkpointing", False):
            raise PipelineError(CHECKPOINTING)
        inputs = self._inputs.make(x, self._kind, self.module("model.rotary_emb"))
        if not self._router:
            states_NTD = layer(x.states_NTD, **inputs._asdict(), past_key_values=None, use_cache=False)
            return x._replace(states_NTD=states_NTD).passed_on()
        router = layer.get_submodule(self._router)
        vars(router)[LOGITS] = None
        states_NTD = layer(x.states_NTD, **inputs._asdict(), past_key_values=None, use_cache=False)
        logits_TE = vars(router).pop(LOGITS)
        if logits_TE is None:
            raise PipelineError(
                f"{self._name}.{self._router} did not run in its layer's forward, which was replaced, so its loss is "
                "unknown; cut the model before you replace forwards"
            )
        return x._replace(
            states_NTD=states_NTD, router=add_router(x.router, logits_TE, x.attention_mask_NT, self._top_k)
        )


class CutHead(NamedLayer):
    """Returns logits N × T × V, or a `CutOutput` if there are `routers` whose loss is trained."""

    layer_name = LOSS.name

    def __init__(self, norm: nn.Module, head: nn.Module, *, routers: int, router_weight: float) -> None:
        super().__init__({"model.norm": norm, "lm_head": head})
        self._routers, self._router_weight = routers, router_weight

    def forward(self, value: Hidden | Tensor) -> CutOutput | Tensor:
        x = Hidden.of(value)
        logits_NTV = self.module("lm_head")(self.module("model.norm")(x.states_NTD))
        if not self._routers:
            return logits_NTV  # type: ignore[no-any-return]
        return CutOutput(logits_NTV, self._router_weight * balance_loss(x, self._routers))


LOGITS = "_stretto_router_logits"
"""The attribute in which a router leaves its logits, while the layer that has put it there runs."""


def record_logits(router: nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
    """Leave the logits to the layer that runs the router: a forward hook."""
    if LOGITS in vars(router):
        vars(router)[LOGITS] = output[0]


def _inputs(batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a batch's tokens, mask and positions. Raise PipelineError if it is something else."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    unknown = [name for name in given if name not in _INPUTS]
    tokens, mask, positions = (given.get(name) for name in _INPUTS)
    if unknown or not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        what = ", ".join(map(repr, given)) if isinstance(batch, Mapping) else _in_words(batch)
        raise PipelineError(
            f"a cut model takes token ids, sequences × tokens, or a dict with input_ids and if needed attention_mask "
            f"and position_ids (got {what:.100})"
        )
    for name, tensor, sequences in (
        ("attention_mask", mask, {len(tokens)}),
        ("position_ids", positions, {1, len(tokens)}),
    ):
        fits = isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == tokens.shape[1]
        if tensor is not None and not (fits and len(tensor) in sequences):
            raise PipelineError(
                f"{name} is a tensor of shape {tuple(tokens.shape)}, as the tokens are (got {_in_words(tensor)})"
            )
    return tokens, mask, positions


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.clone(tensor)
