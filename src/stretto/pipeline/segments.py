"""Segments: parts of a forward whose backwards run separately."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import LEAF, Tree, Value, take_apart

Grads = Sequence[Tensor | None]
"""One gradient for each leaf of a value; None for leaves that have none."""

# torch.autograd.backward without its Python checks, which take as long as the rest of a small backward. The engine
# checks shapes itself.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its functorch set-up, which takes as long as the rest.

    Do not use it under functorch transforms.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


class _Arrived:
    """Collects the gradients of a segment's inputs. They may arrive only while the segment's own backward runs."""

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
    """The autograd graph of one run of a function, from its inputs to its outputs.

    Inputs enter through an autograd function that saves nothing and whose only differentiable input is a dummy scalar.
    Outputs are stored as graph edges. So a segment keeps no tensor alive that its operations did not save.
    """

    __slots__ = ("_arrived", "_edges", "zeros")

    def __init__(self, arrived: _Arrived, edges: list[GradientEdge | None]) -> None:
        self._arrived, self._edges = arrived, edges
        self.zeros: list[Callable[[], Tensor]] | None = None
        """If set, functions that make the gradients of outputs for which none comes, so that all of the graph runs."""

    def backward(self, grads: Grads, *, keep: bool = False) -> list[Tensor | None]:
        """Run the backward, once: return the gradients of the inputs' leaves, and accumulate those of parameters.

        With `keep`, saved tensors live as long as the segment.
        """
        if self.zeros is not None:
            grads = [
                zero() if grad is None and edge is not None else grad
                for edge, grad, zero in zip(self._edges, grads, self.zeros, strict=True)
            ]
        pairs = [
            (edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if edge is not None and grad is not None
        ]
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            self._arrived.expected = True
            _run_backward(edges, gradients, keep, False, (), allow_unreachable=True, accumulate_grad=True)
            self._arrived.expected = False
        if not keep:
            self._edges = []
        return self._arrived.grads

    def leaves(self) -> list[Tensor]:
        """Return the leaves of the graph, which its backward gives gradients."""
        return leaves_of([edge.node for edge in self._edges if edge is not None], ())


def leaves_of(roots: Iterable[Node], ends: Collection[Node]) -> list[Tensor]:
    """Return the leaves that are reachable from `roots` without passing through `ends`."""
    leaves: list[Tensor] = []
    seen, open_ = set(ends), list(roots)
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        open_ += [following for following, _ in node.next_functions if following is not None]
    return leaves


def depending(result: Tensor, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> Tensor:
    """Return a result whose backward, with those of the others, runs through all of these tensors.

    Those on which none of them depends get zeros.
    """
    nodes = {tensor.grad_fn: tensor for tensor in tensors if tensor.grad_fn is not None}
    seen, open_ = set[Node](), [tensor.grad_fn for tensor in (result, *others) if tensor.grad_fn is not None]
    missing = dict(nodes)
    while open_ and missing:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        missing.pop(node, None)
        if node not in nodes:
            open_ += [following for following, _ in node.next_functions if following is not None]
    return _Depending.apply(result, *missing.values()) if missing else result  # type: ignore[no-untyped-call]


class _Depending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *missing: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in missing]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return (grad, *zeros)


def run_segment(
    function: Callable[[Value], Value], inputs: Tree, anchor: Tensor, who: str = "a layer"
) -> tuple[Tree, Segment]:
    """Run a function. Return its output, detached, and its graph as a segment. `who` names the layer in errors."""
    arrived = _Arrived(len(inputs.leaves))
    if inputs.spec is LEAF:  # fast path for the usual case; this is hot
        (leaf,) = inputs.leaves
        return _cut(function(_enter(anchor, leaf, arrived, 0) if inputs.needs[0] else leaf), arrived, who)
    entered: dict[int, Any] = {}
    for place, (leaf, needs) in enumerate(zip(inputs.leaves, inputs.needs, strict=True)):
        if needs and id(leaf) not in entered:  # a tensor that occurs twice enters once
            entered[id(leaf)] = _enter(anchor, leaf, arrived, place)
    leaves = [entered.get(id(leaf), leaf) for leaf in inputs.leaves]
    entered_tree = Tree(leaves, inputs.spec, inputs.needs, inputs.shared)
    return _cut(call(function, entered_tree), arrived, who, entered_tree)


def call(function: Callable[[Value], Value], inputs: Tree) -> Value:
    """Apply a function to a tree's value. Raise PipelineError if it changes a memory-sharing tensor in place."""
    versions = [inputs.leaves[place]._version for place in inputs.shared]
    out = function(inputs.value())
    if versions != [inputs.leaves[place]._version for place in inputs.shared]:
        raise PipelineError(
            "a layer changes in place a tensor that shares memory with another one it was handed; "
            "clone one of them in the layer that returns both"
        )
    return out


def _cut(value: Value, arrived: _Arrived, who: str, inputs: Tree | None = None) -> tuple[Tree, Segment]:
    out = take_apart(value, who, inputs)
    if out.spec is LEAF:
        (leaf,) = out.leaves
        # get_gradient_edge, since a GradientEdge made by hand does not keep the graph alive
        edges = [get_gradient_edge(leaf) if out.needs[0] else None]
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
    """Return the leaf, after waiting if it is the pending result of a tensor-parallel collective."""
    return leaf.trigger_wait() if isinstance(leaf, AsyncCollectiveTensor) else leaf  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, arrived: _Arrived, place: int) -> Tensor:  # noqa: ARG004
        ctx.arrived, ctx.place = arrived, place
        return x.detach()  # not a view, so a layer may change it in place; shares x's version counter, so we notice

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.arrived.put(ctx.place, grad)
        return None, None, None, None


_enter: Callable[..., Tensor] = direct(_Enter)
