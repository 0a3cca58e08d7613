"""The outputs of models, and the values that the layers of a cut model pass on.

N sequences, T tokens of each, D features, V words of the vocabulary, E experts.
"""

from typing import NamedTuple

from torch import Tensor


class RouterSums(NamedTuple):
    """What the router loss needs to know of the layers so far: sums over their tokens."""

    chosen_E: Tensor
    """How many times each expert was among a token's best."""
    shares_E: Tensor
    """The sum of each expert's probabilities."""


class Hidden(NamedTuple):
    """Hidden states, what the batch says of its tokens, and the sums of the routers so far."""

    states_NTD: Tensor
    attention_mask_NT: Tensor | None = None
    position_ids_NT: Tensor | None = None
    router: RouterSums | None = None

    @staticmethod
    def of(value: "Hidden | Tensor") -> "Hidden":
        return Hidden(value) if isinstance(value, Tensor) else value

    def passed_on(self) -> "Hidden | Tensor":
        """Return the hidden states alone if there is nothing else: a single tensor passes a pipeline faster."""
        return self if any(part is not None for part in self[1:]) else self.states_NTD


class CutOutput(NamedTuple):
    """The output of a model whose routers have a loss (`output_router_logits`)."""

    logits_NTV: Tensor
    router_loss: Tensor
    """The load-balancing loss of all layers' routers, times `router_aux_loss_coef`."""


class Output(NamedTuple):
    """The output of a model that trains more than the next token's logits."""

    logits_NTV: Tensor
    mtp_logits_NTV: Tensor | None
    """The logits of the token after the next one, for all positions but the last; with an MTP module."""
    balance: Tensor | None
    """The sum of the auxiliary losses of all routers, if they are wanted."""
