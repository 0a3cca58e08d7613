"""Phases without a backward: they pass on the tensors that they get, and add what they have learned from them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import Tree, Value, take_apart
from stretto.pipeline.segments import Grads


@dataclass(frozen=True, slots=True)
class Passage:
    """Which tensors a phase has passed on."""

    places: list[int | None]
    """For each leaf of the output, the leaf of the input that it is, or None if it is a new one."""
    inputs: int
    """The number of leaves of the input."""

    def back(self, grads: Grads) -> Grads:
        """Return the gradients of the input's leaves, from those of the output's."""
        before: list[Tensor | None] = [None] * self.inputs
        for place, grad in zip(self.places, grads, strict=True):
            if place is not None and grad is not None:
                other = before[place]
                before[place] = grad if other is None else other + grad
        return before


def pass_on(function: Callable[[Value], Value], inputs: Tree, who: str) -> tuple[Tree, Passage]:
    """Run a phase without a graph. Return its output, and which tensors of it are those of the input."""
    with torch.no_grad():
        value = function(inputs.value())
    out = take_apart(value, who, inputs)
    first: dict[int, int] = {}
    for place, leaf in enumerate(inputs.leaves):
        if isinstance(leaf, Tensor):
            first.setdefault(id(leaf), place)
    places = [first.get(id(leaf)) for leaf in out.leaves]
    out.needs = [place is not None and inputs.needs[place] for place in places]
    kept = set(map(id, out.leaves))
    if any(needs and id(leaf) not in kept for leaf, needs in zip(inputs.leaves, inputs.needs, strict=True)):
        raise PipelineError(
            f"{who} has a phase without a backward that does not pass on a tensor that needs gradients; let it return "
            "what it gets"
        )
    return out, Passage(places, len(inputs.leaves))
