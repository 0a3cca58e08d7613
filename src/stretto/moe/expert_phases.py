"""The phases of a layer with experts: attention and routing, the exchange of rows, the experts, and what follows.

T tokens of this rank and their R rows at the experts, K experts for each token, D features, E experts on all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.layers import EXPERT_PARALLEL_MOE, MOE, Phase
from stretto.moe.exchange import Dispatched, validate_routing
from stretto.moe.experts import Experts


class Routed(NamedTuple):
    """What the first phase of a layer with experts returns: tokens, and the experts they go to."""

    x_TD: Tensor
    """What the experts compute on."""
    indices_TK: Tensor
    """The numbers of each token's experts."""
    weights_TK: Tensor
    """How much each of them counts."""
    rest: Any
    """What else the layer needs: a tensor, or a container of tensors."""


def expert_phases(
    experts: Experts,
    *,
    route: Callable[[Any], Routed],
    finish: Callable[[Any, Tensor], Any],
    meanwhile: Callable[[Any, Tensor], Any] | None = None,
    count: Callable[[Tensor], None] | None = None,
) -> list[tuple[Phase, Callable[[Any], Any]]]:
    """Return the phases of a layer with these experts, whether all are on this rank or several ranks share them.

    A layer's method `phases` returns them; its `forward` runs them one after the other. It provides:

    - `route(value)`, the phase "attn": makes a `Routed` of the layer's input.
    - `meanwhile(rest, x_TD)`, in the phase "mlp": computes what every token goes through besides its experts, and
      returns the new `rest`.
    - `finish(rest, out_TD)`, in the phase "combine": makes the layer's output. `out_TD` has the weighted sum of each
      token's experts. This runs on the lane of communication, so it should only add.
    - `count(counts_E)`: is told how many of this rank's rows go to each of all experts. `Router.count` is one.
    """
    layer = _ExpertLayer(experts, route, finish, meanwhile, count)
    if experts.ranks > 1:
        before = layer.route, layer.tell, layer.sizes, layer.dispatch
        return list(zip(EXPERT_PARALLEL_MOE.phases, (*before, layer.run, layer.combine), strict=True))
    return list(zip(MOE.phases, (layer.route, layer.sort, layer.run, layer.combine), strict=True))


class _Sending(NamedTuple):
    """The state between routing and dispatch."""

    x_TD: Tensor
    weights_TK: Tensor
    rest: Any
    sent: Any
    """What the exchange has made of the routing."""


class _Arrived(NamedTuple):
    """The state between dispatch and the experts: rows in order of their experts."""

    x_TD: Tensor | None
    """What `meanwhile` computes on; None if there is nothing to compute."""
    rest: Any
    rows: Dispatched
    tokens: int
    dtype: torch.dtype


class _Returning(NamedTuple):
    """The state between the experts and combine."""

    rest: Any
    rows_RD: Tensor
    sent: Any
    """What the exchange needs for the way back."""
    tokens: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _ExpertLayer:
    experts: Experts
    route: Callable[[Any], Routed]
    finish: Callable[[Any, Tensor], Any]
    meanwhile: Callable[[Any, Tensor], Any] | None
    count: Callable[[Tensor], None] | None

    # The next two pass on the very tensors that they get, since they have no backward.

    def tell(self, routed: Routed) -> _Sending:
        if not isinstance(routed, Routed):
            raise PipelineError(f"route must return a stretto.moe.Routed (got a {type(routed).__name__})")
        validate_routing(routed.x_TD, routed.indices_TK, routed.weights_TK)
        counted = self.experts.count(routed.indices_TK)
        if self.count is not None:
            self.count(counted.counts_E)
        return _Sending(routed.x_TD, routed.weights_TK, routed.rest, counted)

    def sizes(self, sending: _Sending) -> _Sending:
        return sending._replace(sent=self.experts.sizes(sending.sent))

    def dispatch(self, sending: _Sending) -> _Arrived:
        x_TD, weights_TK, rest, sized = sending
        rows = self.experts.dispatch(x_TD, weights_TK, sized)
        return _Arrived(None if self.meanwhile is None else x_TD, rest, rows, len(x_TD), x_TD.dtype)

    def sort(self, routed: Routed) -> _Arrived:
        """Dispatch to experts that are all here."""
        return self.dispatch(self.sizes(self.tell(routed)))

    def run(self, arrived: _Arrived) -> _Returning:
        x_TD, rest, (rows_RD, weights_R, counts_e, state), tokens, dtype = arrived
        if self.meanwhile is not None:
            assert x_TD is not None
            rest = self.meanwhile(rest, x_TD)
        return _Returning(rest, self.experts.weighed(rows_RD, counts_e, weights_R), state, tokens, dtype)

    def combine(self, returning: _Returning) -> Any:
        rest, rows_RD, state, tokens, dtype = returning
        return self.finish(rest, self.experts.combine(rows_RD, state, tokens=tokens, dtype=dtype))
