"""A slice of the model on one device: the forwards, backwards and weight gradients of its microbatches."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.program.phases import Anatomy, Layer, Phase
from stretto.runtime.draws import Draw, draws
from stretto.runtime.segments import Grads, Segment, run_segment
from stretto.runtime.sites import Sites, Table
from stretto.runtime.split_backward import Closure, Deferral
from stretto.runtime.structure import Room, Value, rooms_of


@runtime_checkable
class Phased(Protocol):
    """A layer that offers its phases. Run one after the other, each on what the one before returned, they are it."""

    def phases(self) -> Sequence[tuple[Phase, Callable[[Value], Value]]]: ...


def anatomy_of(layers: Sequence[nn.Module]) -> list[Layer]:
    """The phases of each layer; one that offers none is one phase."""
    return [
        Layer(type(layer).__name__, tuple(phase for phase, _ in layer.phases()))
        if isinstance(layer, Phased)
        else Layer(type(layer).__name__, (Phase(type(layer).__name__.lower()),))
        for layer in layers
    ]


@dataclass(slots=True)
class _Pass:
    """What a microbatch leaves in a stage between its forward and its weight gradients."""

    segments: list[Segment | None]
    closures: list[list[Closure]]
    inputs: list[Room | None]
    """What the leaves of its input were, None for those that have no gradient."""
    sites: Table


class Stage:
    """Its layers, and what of each microbatch is under way. Parts are those of the program's anatomy."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        anatomy: Anatomy,
        index: int,
        *,
        checkpointed: bool = False,
        recomputed: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.index = index
        self.layers = dict(layers)
        self._checkpointed = checkpointed
        self._module = nn.ModuleList(layers.values())
        self.deferral = Deferral(self._module)
        self._sites = Sites(recomputed) if recomputed else None
        self.anchor = torch.zeros((), requires_grad=True)
        """The scalar that all segments hang on."""
        self._drawing = {number for number, layer in layers.items() if draws(layer)}
        self._functions = self._parts(anatomy)
        self._weight_of = {step: k for k, step in enumerate(anatomy.weight_steps[index])}
        self._passes: dict[int, _Pass] = {}
        self.used: list[object] | None = None
        """If given, what backwards and weight gradients have used is put there, and not let go of."""
        late = {id(parameter) for layer in self.deferral.layers for parameter in layer.parameters()}
        self._early = [p for p in self._module.parameters() if p.requires_grad and id(p) not in late]
        self._without = self._early.copy()  # of these, the ones that have no gradient yet
        self.draw = Draw()

    def forward(self, microbatch: int, part: int, value: Value, loss: Callable[[Value], Value] | None = None) -> Value:
        """A part of the forward: of what the part or stage before it returned, what the next one takes.

        The last one of all goes on to the loss.
        """
        if part == 0:
            closures: list[list[Closure]] = [[] for _ in self._weight_of]
            rooms = rooms_of(value) if self.index > 0 else []
            self._passes[microbatch] = _Pass([None] * len(self._functions), closures, rooms, {})
        going = self._passes[microbatch]
        differentiable = self.index > 0 or part > 0
        with self.deferral.into(self._closures(going, part)):
            function = self._functions[part]

            def run(value: Value) -> Value:
                out = function(value, microbatch)
                return out if loss is None else loss(out)

            if self._sites is not None:
                self._sites.keeps = self.used is not None
            with nullcontext() if self._sites is None else self._sites.into(going.sites):
                out, going.segments[part] = run_segment(run, value, self.anchor, differentiable=differentiable)
        if part == len(self._functions) - 1:
            going.sites.clear()
        return out

    def evaluate(self, microbatch: int, part: int, value: Value, loss: Callable[[Value], Value] | None = None) -> Value:
        """The same, and nothing is kept for a backward."""
        out = self._functions[part](value, microbatch)
        return out if loss is None else loss(out)

    def backward(self, microbatch: int, part: int, grads: Grads) -> list[Tensor | None]:
        """A part of the backward, counted from the stage's end."""
        going = self._passes[microbatch]
        at = len(self._functions) - 1 - part
        segment = going.segments[at]
        assert segment is not None, "a backward that was run before"
        going.segments[at] = None
        with self.deferral.into(self._closures(going, at)):
            out = segment.backward(grads, keep=self.used is not None)
        if self.used is not None:
            self.used.append(segment)
        if self._without:
            self._own_gradients()
        if at == 0 and self.index > 0:  # what was not used has a gradient too: nothing
            out = [
                room.zeros() if grad is None and room else grad for grad, room in zip(out, going.inputs, strict=True)
            ]
        return out

    def weight(self, microbatch: int, part: int) -> None:
        """The weight gradients that a part of the backward put off."""
        going = self._passes[microbatch]
        closures, going.closures[part] = going.closures[part], []
        closures.reverse()
        if self.used is not None:
            self.used.append(closures.copy())
        while closures:  # nothing in them needs a gradient, so nothing is recorded
            closures.pop()()  # each is dropped, with what it holds, once it has run
        if part == len(going.closures) - 1 and all(segment is None for segment in going.segments):
            del self._passes[microbatch]

    def _own_gradients(self) -> None:
        """Copy parameters' first gradients: autograd may take one for its own that others still hold, to send it, say,
        or to make a weight gradient of, and would then add to it in place.
        """
        first = [parameter for parameter in self._without if parameter.grad is not None]
        for parameter in first:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        if first:
            self._without = [parameter for parameter in self._without if parameter.grad is None]

    def begin(self, draw: Draw) -> None:
        """Begin a step, with these random numbers and no gradients."""
        self.draw = draw
        self._without = self._early.copy()

    def forget(self) -> None:
        """Drop all that is under way."""
        self._passes.clear()

    def _closures(self, going: _Pass, at: int) -> list[Closure]:
        """Where the part of the forward at this place puts its weight gradients off to."""
        step = len(self._functions) - 1 - at
        return going.closures[self._weight_of[step]] if step in self._weight_of else []

    def _parts(self, anatomy: Anatomy) -> list[Callable[[Value, int], Value]]:
        if anatomy.is_whole:
            return [self._whole]
        functions: list[Callable[[Value, int], Value]] = []
        for number, layer in self.layers.items():
            if isinstance(layer, Phased):
                functions += [self._part(number, function) for _, function in layer.phases()]
            else:
                functions.append(self._part(number, layer))
        return functions

    def _whole(self, value: Value, microbatch: int) -> Value:
        for number, layer in self.layers.items():
            value = self._run(number, layer, value, microbatch)
        return value

    def _part(self, number: int, function: Callable[[Value], Value]) -> Callable[[Value, int], Value]:
        return lambda value, microbatch: self._run(number, function, value, microbatch)

    def _run(self, number: int, function: Callable[[Value], Value], value: Value, microbatch: int) -> Value:
        with self.draw.seeded(number, microbatch) if number in self._drawing else nullcontext():
            if self._checkpointed and torch.is_grad_enabled():
                return checkpoint(function, value, use_reentrant=False, preserve_rng_state=number in self._drawing)
            return function(value)
