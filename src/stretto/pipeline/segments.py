"""A piece of a forward whose backward is run by itself."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import LEAF, Tree, Value, take_apart

Grads = Sequence[Tensor | None]
"""One for each leaf of a value, None for leaves without."""

# torch.autograd.backward without its checks in Python, which cost as much as the rest of a small backward; the engine
# checks shapes itself.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its preparations for functorch, which take as long as the rest. It is not for use under
    transforms.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


class _Arrived:
    """The gradients of a segment's inputs, as they come. They come only while the segment's own backward runs."""

    __slots__ = ("expected", "grads")

    def __init__(self, leaves: int) -> None:
        self.grads: list[Tensor | None] = [None] * leaves
        self.expected = False

    def put(self, place: int, grad: Tensor) -> None:
        if not self.expected:
            raise PipelineError(
                "a layer ran backward() through its own input in its forward, which a pipeline cannot follow into "
                "earlier layers; detach the input, or use torch.autograd.grad"
            )
        before = self.grads[place]
        self.grads[place] = grad if before is None else before + grad


class Segment:
    """The graph of one run of a function, from its inputs to its outputs.

    Inputs enter through a function whose only differentiable input is a dummy scalar and which saves nothing, and
    outputs are remembered as edges of the graph: a segment keeps no tensor alive that its operations did not save.
    """

    __slots__ = ("_arrived", "_edges")

    def __init__(self, arrived: _Arrived, edges: list[GradientEdge | None]) -> None:
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
            self._arrived.expected = True
            _run_backward(edges, given, keep, False, (), allow_unreachable=True, accumulate_grad=True)
            self._arrived.expected = False
        if not keep:
            self._edges = []
        return self._arrived.grads

    def leaves(self) -> list[Tensor]:
        """The leaves of the graph that get gradients by it."""
        return leaves_of([edge.node for edge in self._edges if edge is not None], ())


def leaves_of(roots: Iterable[Node], ends: Collection[Node]) -> list[Tensor]:
    """The leaves of a graph, from these nodes as far as some others."""
    found: list[Tensor] = []
    seen, open_ = set(ends), list(roots)
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        open_ += [following for following, _ in node.next_functions if following is not None]
    return found


def run_segment(
    function: Callable[[Value], Value], given: Tree, anchor: Tensor, who: str = "a layer"
) -> tuple[Tree, Segment]:
    """The function's output, cut off from its graph, and the graph as a segment; `who` hands the output on."""
    arrived = _Arrived(len(given.leaves))
    if given.spec is LEAF:  # the usual case, taken by itself: this is hot
        (leaf,) = given.leaves
        return _cut(function(_enter(anchor, leaf, arrived, 0) if given.needs[0] else leaf), arrived, who)
    entered: dict[int, Any] = {}
    for place, (leaf, needs) in enumerate(zip(given.leaves, given.needs, strict=True)):
        if needs and id(leaf) not in entered:  # a tensor that is there twice enters once
            entered[id(leaf)] = _enter(anchor, leaf, arrived, place)
    leaves = [entered.get(id(leaf), leaf) for leaf in given.leaves]
    entered_tree = Tree(leaves, given.spec, given.needs, given.shared)
    return _cut(call(function, entered_tree), arrived, who, entered_tree)


def call(function: Callable[[Value], Value], given: Tree) -> Value:
    """What a function makes of a tree; it may not change in place what shares memory in it."""
    versions = [given.leaves[place]._version for place in given.shared]
    out = function(given.value())
    if versions != [given.leaves[place]._version for place in given.shared]:
        raise PipelineError(
            "a layer changes in place a tensor that shares memory with another one it was handed; "
            "clone one of them in the layer that returns both"
        )
    return out


def _cut(value: Value, arrived: _Arrived, who: str, given: Tree | None = None) -> tuple[Tree, Segment]:
    out = take_apart(value, who, given)
    if out.spec is LEAF:
        (leaf,) = out.leaves
        edges = [get_gradient_edge(leaf) if out.needs[0] else None]  # made by hand, it would not keep the graph
        if isinstance(leaf, Tensor):
            out.leaves = [settled(leaf.detach())]
        return out, Segment(arrived, edges)
    edges, cut = [], dict[int, Any]()
    for leaf, needs in zip(out.leaves, out.needs, strict=True):
        edges.append(get_gradient_edge(leaf) if needs and id(leaf) not in cut else None)
        if id(leaf) not in cut:
            cut[id(leaf)] = settled(leaf.detach()) if isinstance(leaf, Tensor) else leaf
    out.leaves = [cut[id(leaf)] for leaf in out.leaves]
    return out, Segment(arrived, edges)


def settled(leaf: Any) -> Any:
    """The same; what a collective of tensor parallelism is still to give, waited for."""
    return leaf.trigger_wait() if isinstance(leaf, AsyncCollectiveTensor) else leaf  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, arrived: _Arrived, place: int) -> Tensor:  # noqa: ARG004
        ctx.arrived, ctx.place = arrived, place
        return x.detach()  # no view, so that it may be changed in place; with the version of x, so that this is seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.arrived.put(ctx.place, grad)
        return None, None, None, None


_enter: Callable[..., Tensor] = direct(_Enter)
