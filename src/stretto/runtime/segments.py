"""A piece of a forward whose backward is run by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stretto.runtime.structure import Value, leaves_of, rebuilt

Grads = Sequence[Tensor | None]
"""One for each leaf of a value, None for leaves without."""

# torch.autograd.backward without its checks in Python, which cost as much as the rest of a small backward; the engine
# checks shapes itself.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


class Segment:
    """The graph of one run of a function, from its inputs to its outputs.

    Inputs enter through a function whose only differentiable input is a dummy scalar and which saves nothing, and
    outputs are remembered as edges of the graph: a segment keeps no tensor alive that its operations did not save.
    """

    __slots__ = ("_arrived", "_edges")

    def __init__(self, arrived: list[Tensor | None], edges: list[GradientEdge | None]) -> None:
        self._arrived, self._edges = arrived, edges

    def backward(self, grads: Grads, *, keep: bool = False) -> list[Tensor | None]:
        """The gradients of the inputs' leaves, from those of the outputs' leaves; parameters get theirs. Only once.

        With `keep`, what was saved is let go of only with the segment.
        """
        pairs = [
            (edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if edge is not None and grad is not None
        ]
        if pairs:
            edges, given = zip(*pairs, strict=True)
            _run_backward(edges, given, keep, False, (), allow_unreachable=True, accumulate_grad=True)
        if not keep:
            self._edges = []
        return self._arrived


def run_segment(
    function: Callable[[Value], Value], value: Value, anchor: Tensor, *, differentiable: bool
) -> tuple[Value, Segment]:
    """The function's output, cut off from its graph, and the graph as a segment.

    Without `differentiable`, inputs get no gradients.
    """
    if isinstance(value, Tensor) and value.is_floating_point():  # the usual case, taken by itself: this is hot
        arrived: list[Tensor | None] = [None]
        out = function(_enter(anchor, value, arrived, 0) if differentiable else value)
        if isinstance(out, Tensor):
            return out.detach(), Segment(arrived, [_edge(out)])
        return _cut(out, arrived)
    leaves = leaves_of(value)
    arrived = [None] * len(leaves)
    if differentiable:
        leaves = [
            _enter(anchor, leaf, arrived, k) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for k, leaf in enumerate(leaves)
        ]
        value = rebuilt(value, leaves)
    return _cut(function(value), arrived)


def _cut(out: Value, arrived: list[Tensor | None]) -> tuple[Value, Segment]:
    outs = leaves_of(out)
    edges = [_edge(leaf) if isinstance(leaf, Tensor) else None for leaf in outs]
    cut = rebuilt(out, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outs])
    return cut, Segment(arrived, edges)


def _edge(leaf: Tensor) -> GradientEdge | None:
    """Where the gradient of an output enters the graph."""
    return get_gradient_edge(leaf) if leaf.requires_grad else None  # made by hand, it would not keep the graph


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, arrived: list[Tensor | None], place: int) -> Tensor:  # noqa: ARG004
        ctx.arrived, ctx.place = arrived, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.arrived[ctx.place] = grad
        return None, None, None, None


_enter: Callable[..., Tensor] = _Enter.apply
