"""A slice of the model on one device: the forwards, backwards and weight gradients of its microbatches."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from stretto.ir.errors import PipelineError
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.losses import OneLoss
from stretto.pipeline.module_buffers import ModuleBuffers, Snapshot
from stretto.pipeline.pytree import Tree, Value, flatten_once, take_apart, tensors_of
from stretto.pipeline.recompute import Sites, Table
from stretto.pipeline.rng import Generators, RngKey
from stretto.pipeline.segments import Grads, Segment, call, leaves_of, run_segment, settled
from stretto.pipeline.split_backward import Deferral
from stretto.pipeline.weight_gradients import WeightGradient, add_together
from stretto.program.phases import Anatomy, Layer, Phase

CPU = torch.device("cpu")
Function = Callable[[Value, int], Value]
"""A part of the forward, of a value and a microbatch."""


@runtime_checkable
class Phased(Protocol):
    """A layer that offers its phases. Run one after the other, each on what the one before returned, they are it."""

    def phases(self) -> Sequence[tuple[Phase, Callable[[Value], Value]]]: ...


def is_phased(layer: nn.Module) -> TypeGuard[Phased]:
    return isinstance(layer, Phased) and callable(layer.phases)


def anatomy_of(layers: Sequence[nn.Module]) -> list[Layer]:
    """The phases of each layer; one that offers none is one phase."""
    return [
        Layer(type(layer).__name__, tuple(phase for phase, _ in layer.phases()))
        if is_phased(layer)
        else Layer(type(layer).__name__, (Phase(type(layer).__name__.lower()),))
        for layer in layers
    ]


@dataclass(slots=True)
class _Pass:
    """What a microbatch leaves in a stage between its forward and its weight gradients."""

    segments: list[Segment | None]
    owed: list[list[WeightGradient]]
    """Weight gradients of each part."""
    sites: Table


class Stage:
    """Its layers, and what of each microbatch is under way. Parts are those of the program's anatomy."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        anatomy: Anatomy,
        index: int,
        *,
        gradients: Gradients,
        device: torch.device = CPU,
        checkpointed: bool = False,
        recomputed: Mapping[str, nn.Module] | None = None,
        elsewhere: Callable[[Tensor], str | None] = lambda _: None,
        replicated: bool = False,
    ) -> None:
        """`elsewhere` gives the name of a parameter that another rank trains, if a tensor is one; `replicated` says
        whether the stage lives on several devices.
        """
        self.index = index
        self.layers = dict(layers)
        self._checkpointed = checkpointed
        self._module = nn.ModuleList(layers.values())
        self._buffered: list[nn.Module] = []
        self._generators = Generators(device)
        self._gradients = gradients
        self.deferral = Deferral(self._module, gradients)
        self._device = device
        self._sites = Sites(recomputed, self._generators) if recomputed else None
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        """The scalar that all segments hang on."""
        self._last_layers: list[str] = []  # of each part, in words
        self._in_phases = not anatomy.is_whole
        self._functions = self._parts(anatomy)
        self._weight_of = {step: k for k, step in enumerate(anatomy.weight_steps[index])}
        self._passes: dict[int, _Pass] = {}
        self._joining: list[list[list[WeightGradient]]] = [[] for _ in self._weight_of]  # of earlier microbatches
        self.used: list[object] | None = None
        """If given, what backwards and weight gradients have used is put there, and not let go of."""
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._searching = True  # whether all graphs are looked at for what is no layer's parameter
        self._searched_microbatch, self._microbatches = 0, 0  # the one whose graph is looked at in any case, of so many
        self._others: list[weakref.ref[Tensor]] = []  # leaves that are no parameters
        self._elsewhere, self._replicated = elsewhere, replicated
        gradients.ignore(self.anchor)
        gradients.ignore(self.deferral.anchor)
        self._key = RngKey()

    def parameters(self) -> list[nn.Parameter]:
        """All of its layers' parameters, as they are now."""
        found = (p for module in self._module.modules() for p in module._parameters.values() if p is not None)
        return list(dict.fromkeys(found))

    @contextmanager
    def running(self, key: RngKey, *, training: bool) -> Iterator[None]:
        """A step, with these random numbers. Within, layers that train run as the split backward needs it."""
        self._key = key
        self._buffered = [module for module in self._module.modules() if module._buffers]
        for number, layer in self.layers.items():
            if self._in_phases and is_phased(layer) and _has_hooks(layer):
                raise PipelineError(
                    f"layer {number} runs in phases, and its own hooks would not run; put them on modules within it"
                )
        if not training:
            with self._generators.kept():
                yield
            return
        before, self._parameters = self._parameters, self.parameters()
        self._searching = self._searching or list(map(id, before)) != list(map(id, self._parameters))
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._others = [other for other in self._others if other() is not None]
        for leaf in [other() for other in self._others]:
            if leaf is not None and leaf.requires_grad and not self._gradients.knows(leaf):
                self._gradients.adopt(leaf)
        sites = nullcontext() if self._sites is None else self._sites.overrides
        with self._generators.kept(), self.deferral.overrides, sites:
            try:
                yield
                self._gradients.collect(self._parameters)  # what a layer's own backward() has left
                self._searching = False
                self._searched_microbatch = key.step % max(1, self._microbatches)
            finally:
                self._passes.clear()
                for waiting in self._joining:
                    waiting.clear()

    def forward(self, microbatch: int, part: int, given: Tree, loss: OneLoss | None = None) -> Tree:
        """A part of the forward: of what the part or stage before it returned, what the next one takes.

        The last one of all goes on to the loss.
        """
        if part == 0:
            self._microbatches = max(self._microbatches, microbatch + 1)
            owed: list[list[WeightGradient]] = [[] for _ in self._weight_of]
            self._passes[microbatch] = _Pass([None] * len(self._functions), owed, {})
        going = self._passes[microbatch]
        with self._discarding(going):
            out, segment = run_segment(
                self._function(part, microbatch, loss), given, self.anchor, self._last_layers[part]
            )
        going.segments[part] = segment
        if self._searching or microbatch == self._searched_microbatch:
            self._find_others(segment.leaves(), self._last_layers[part], loss)
        if part == len(self._functions) - 1:
            going.sites.clear()
        return self._own(out)

    def evaluate(self, microbatch: int, part: int, given: Tree, loss: OneLoss | None = None) -> Tree:
        """The same, and nothing is kept for a backward."""
        out = call(self._function(part, microbatch, loss), given)
        made = take_apart(out, self._last_layers[part], given)
        made.leaves = [settled(leaf) for leaf in made.leaves]
        return self._own(made)

    def backward(self, microbatch: int, part: int, grads: Grads) -> list[Tensor | None]:
        """A part of the backward, counted from the stage's end: gradients of its inputs' leaves, None where there are
        none.
        """
        going = self._passes[microbatch]
        at = len(self._functions) - 1 - part
        segment = going.segments[at]
        assert segment is not None, "a backward that was run before"
        going.segments[at] = None
        owed = going.owed[self._weight_of[part]] if part in self._weight_of else None
        with self.deferral.into(owed), self._discarding(going), self._as_computed():
            out = segment.backward(grads, keep=self.used is not None)
        going.sites.clear()
        if self.used is not None:
            self.used.append(segment)
        self._gradients.collect(self._parameters)
        return out

    def weight(self, microbatch: int, part: int, *, joins: bool = False) -> None:
        """The weight gradients that a part of the backward put off; with `joins`, to be added with the next one's."""
        going, waiting = self._passes[microbatch], self._joining[part]
        waiting.append(going.owed[part])
        going.owed[part] = []
        if part == len(going.owed) - 1 and all(segment is None for segment in going.segments):
            del self._passes[microbatch]
        if joins:
            return
        if self.used is not None:
            self.used.append([owed.copy() for owed in waiting])
        with self._as_computed(), torch.no_grad():
            add_together(waiting)

    def _discarding(self, going: _Pass) -> Any:
        return _NOTHING if self._sites is None else self._sites.into(going.sites)

    def _as_computed(self) -> Any:
        """Gradients are computed in the types of the forward, though a step may be called under autocast."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING

    def _own(self, out: Tree) -> Tree:
        """The same; what of it is a buffer of ours, copied: the next microbatch may change that."""
        if not self._buffered:
            return out
        mine = {
            buffer.untyped_storage()._cdata
            for module in self._buffered
            for buffer in module._buffers.values()
            if buffer is not None
        }
        return out.copied(lambda tensor: tensor.untyped_storage()._cdata in mine)

    def take_behind(self, given: Sequence[Tensor], own: Collection[int]) -> None:
        """Take in what the graphs behind inputs or targets lead to; `own` are the tensors that the user gave."""
        for leaf in leaves_of([get_gradient_edge(tensor).node for tensor in given], ()):
            if self._gradients.knows(leaf):
                continue
            if (name := self._elsewhere(leaf)) is not None:
                raise PipelineError(f"inputs or targets depend on {name}, {_ELSEWHERE}")
            if self._replicated and id(leaf) not in own:
                raise PipelineError(
                    f"inputs or targets depend on a tensor of shape {tuple(leaf.shape)}, and the stage that takes them "
                    "lives on two devices, each of which would see half of its gradient; use it in a layer"
                )
            self._gradients.adopt(leaf)

    def demand_as_before(self) -> None:
        """Refuse what a step cannot know of before: that a forward adds or replaces parameters, or freezes them."""
        now = self.parameters()
        if list(map(id, now)) != list(map(id, self._parameters)):
            raise PipelineError(f"a layer of stage {self.index} has other parameters than before the step; {_BEFORE}")
        if [parameter.requires_grad for parameter in now] != self._trained:
            raise PipelineError(
                f"a layer of stage {self.index} froze or unfroze a parameter while a step ran; {_BEFORE}"
            )

    def _adopt(self, loss: Tensor, outputs: Sequence[Tensor], of: OneLoss) -> None:
        """Take in what the loss has of its own that gets gradients."""
        assert loss.grad_fn is not None
        ends = [output.grad_fn for output in outputs if output.grad_fn is not None]
        for leaf in leaves_of([loss.grad_fn], ends):
            if self._gradients.knows(leaf) or of.gave(leaf):
                continue
            if (name := self._elsewhere(leaf)) is not None:
                raise PipelineError(f"the loss uses {name}, {_ELSEWHERE}")
            if self._replicated:
                raise PipelineError(
                    f"the loss trains a tensor of its own, of shape {tuple(leaf.shape)}, and the last stage lives on "
                    "two devices, each of which would see half of its gradient; make it a parameter of the last layer"
                )
            self._gradients.adopt(leaf)

    def _find_others(self, leaves: Sequence[Tensor], last: str, loss: OneLoss | None) -> None:
        """Look at what a part differentiates: a parameter must be some layer's; other leaves are taken in, where only
        one device has them. (A leaf that a forward makes is another one for every microbatch.)
        """
        for leaf in leaves:
            known = self._gradients.knows(leaf) or (loss is not None and loss.gave(leaf))
            again = any(other() is leaf for other in self._others)
            if known and not (again and self._replicated):
                continue
            if any(leaf is parameter for parameter in self.parameters()):
                raise PipelineError(f"{last}, or one before it, adds or unfreezes a parameter in a step; {_BEFORE}")
            if isinstance(leaf, nn.Parameter) or again:
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor that requires gradients"
                raise PipelineError(
                    f"{last}, or one before it, uses a {kind} of shape {tuple(leaf.shape)} that it has not registered, "
                    "so its gradient could not be summed over ranks; make it a parameter of the layer"
                )
            self._gradients.adopt(leaf)
            self._others.append(weakref.ref(leaf))

    def _function(self, part: int, microbatch: int, loss: OneLoss | None) -> Callable[[Value], Value]:
        function = self._functions[part]
        if loss is None:
            return lambda value: function(value, microbatch)

        def and_loss(value: Value) -> Value:
            out = function(value, microbatch)
            self._generators.seed(self._key.seed_of(_LOSS, 0, microbatch))
            made = loss(out)
            if made.grad_fn is not None:
                self._adopt(made, tensors_of(out), loss)
            return made

        return and_loss

    def _parts(self, anatomy: Anatomy) -> list[Function]:
        if anatomy.is_whole:
            self._last_layers.append(f"layer {max(self.layers)}")
            parts = [self._part(number, 0, layer) for number, layer in self.layers.items()]

            def whole(value: Value, microbatch: int) -> Value:
                for part in parts:
                    value = part(value, microbatch)
                return value

            return [whole]
        functions: list[Function] = []
        for number, layer in self.layers.items():
            self._last_layers += [f"layer {number}"] * (len(layer.phases()) if is_phased(layer) else 1)
            if is_phased(layer):
                functions += [self._part(number, phase, run) for phase, (_, run) in enumerate(layer.phases())]
            else:
                functions.append(self._part(number, 0, layer))
        return functions

    def _part(self, number: int, phase: int, function: Callable[[Value], Value]) -> Function:
        """A layer, or a phase of it, with its random numbers, and recomputed if it is to be."""
        buffers = ModuleBuffers(f"layer {number}", self.layers[number])

        def run(value: Value, microbatch: int) -> Value:
            seed = self._key.seed_of(number, phase, microbatch)
            if self._checkpointed and torch.is_grad_enabled():
                return _Checkpointed(number, function, buffers, self._generators, seed).run(value)
            self._generators.seed(seed)
            return function(value)

        return run


def _has_hooks(layer: object) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, name) for name in names)


_BEFORE = "do that before the step"
_ELSEWHERE = "which another rank trains; let layers use it, and tie them"
_NOTHING = nullcontext()
_LOSS = -1  # the number that the loss has among layers


class _Checkpointed:
    """One run of a layer that is recomputed whole, on what it was given and with what it drew the first time."""

    def __init__(
        self, number: int, function: Callable[[Value], Value], buffers: ModuleBuffers, generators: Generators, seed: int
    ) -> None:
        self._number, self._function, self._buffers = number, function, buffers
        self._generators, self._seed = generators, seed
        self._snapshot: Snapshot | None = None
        self._parameters = buffers.parameters()

    def run(self, value: Value) -> Value:
        leaves, self._spec = flatten_once(value, f"layer {self._number}")
        self._versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        return checkpoint(self._once, *leaves, use_reentrant=False, preserve_rng_state=False)

    def _once(self, *leaves: Any) -> Value:
        """The first time, and again: in new containers, since a layer may write into those it is given."""
        if self._snapshot is not None:
            self._buffers.demand_parameters(self._parameters)
        if self._versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]:
            raise PipelineError(
                f"layer {self._number} was given what was changed in place afterwards, so it cannot be checkpointed"
            )
        value = pytree.tree_unflatten(leaves, self._spec)
        if self._snapshot is None:
            self._generators.seed(self._seed)
            with self._buffers.followed() as self._snapshot:  # complete at once: a layer may ask for gradients within
                return self._function(value)
        with self._generators.kept(), self._buffers.restored(self._snapshot):
            self._generators.seed(self._seed)
            return self._function(value)
