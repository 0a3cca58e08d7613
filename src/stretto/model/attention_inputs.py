"""What attention needs besides hidden states: rotary position embeddings and masks, computed where they are used.

Between ranks travel only the batch's own mask and positions, if it has any; without them nothing does.

N sequences, T tokens of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.model.values import Hidden

MaskFunction = Callable[..., Tensor | None]


class AttentionInputs(NamedTuple):
    """Arguments of a decoder layer of transformers."""

    position_ids: Tensor
    position_embeddings: Any
    attention_mask: Tensor | None
    """None where attention is causal and nothing is padded: the attention function then needs no mask."""


class AttentionInputMaker:
    """Computes the inputs with the functions of transformers, once for all layers of a stage.

    All layers of a cut share one. Results for a batch with a mask or positions are kept on that tensor, which is a new
    one for each microbatch and stage. Results for a batch with neither depend only on its shape; the last are kept.
    """

    def __init__(self, config: Any, masks: dict[str, MaskFunction]) -> None:
        """`masks` are functions that make a mask, by kind of attention ("full_attention", "sliding_attention")."""
        self._config, self._masks = config, masks
        self._shape: tuple[Any, ...] = ()
        self._of_shape: dict[Any, Any] = {}

    def make(self, x: Hidden, kind: str, rotary: nn.Module) -> AttentionInputs:
        """Return the inputs of a layer with this kind of attention."""
        known = self._known(x)
        states = x.states_NTD
        key = states.dtype, states.device, self._config._attn_implementation, torch.is_inference_mode_enabled()
        if key not in known:
            positions = x.position_ids_NT
            if positions is None:
                positions = torch.arange(states.shape[1], device=states.device)[None]
            known[key] = positions, rotary(states, position_ids=positions)
        if (kind, *key) not in known:
            known[kind, *key] = self._masks[kind](
                config=self._config,
                inputs_embeds=states,
                attention_mask=x.attention_mask_NT,
                past_key_values=None,
                position_ids=x.position_ids_NT,  # if these are the usual ones, transformers need not look for packing
            )
        position_ids, position_embeddings = known[key]
        return AttentionInputs(position_ids, position_embeddings, known[kind, *key])

    def _known(self, x: Hidden) -> dict[Any, Any]:
        """Return what is known for this batch already, to be added to."""
        if torch.compiler.is_compiling():
            return {}
        given = x.position_ids_NT if x.attention_mask_NT is None else x.attention_mask_NT
        if given is not None:
            return vars(given).setdefault("_stretto_attention_inputs", {})  # type: ignore[no-any-return]
        if self._shape != x.states_NTD.shape[:2]:
            self._shape, self._of_shape = x.states_NTD.shape[:2], {}
        return self._of_shape
