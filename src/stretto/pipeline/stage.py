"""A slice of the model on one device: the forwards, backwards and weight gradients of its microbatches."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from stretto.ir.action import Op
from stretto.ir.errors import PipelineError
from stretto.memory import Memory
from stretto.moe.hooks import has_hooks
from stretto.pipeline.exchanges import Exchanges
from stretto.pipeline.forward_only import Passage, pass_on
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.host_pool import HostPool
from stretto.pipeline.layer_state import LayerState
from stretto.pipeline.losses import OneLoss
from stretto.pipeline.memory_sites import Part, PartSites
from stretto.pipeline.module_buffers import ModuleBuffers
from stretto.pipeline.offload import Away, Stored, within
from stretto.pipeline.phases import bypassed, is_phased
from stretto.pipeline.pytree import Tree, Value, storage_of, take_apart, tensors_of
from stretto.pipeline.rng import Generators, RngKey
from stretto.pipeline.saving import SavedPass, Saving
from stretto.pipeline.segments import Grads, Segment, call, leaves_of, run_segment, settled
from stretto.pipeline.sites_seen import SitesSeen
from stretto.pipeline.split_backward import Deferral
from stretto.pipeline.storages import WeakStorage, alive, storages_of, weak_storages
from stretto.pipeline.weight_gradients import WeightGradient, add_together
from stretto.program.anatomy import Anatomy

CPU = torch.device("cpu")
KEEP_ALL = Memory()
Function = Callable[[Value, int], Value]
"""A part of the forward, as a function of a value and a microbatch."""


@dataclass(slots=True)
class _Pass:
    """The state of a microbatch in a stage between its forward and its weight gradients."""

    segments: list[Segment | None]
    deferred: list[list[WeightGradient]]
    """The deferred weight gradients of each part."""
    saved: SavedPass
    """What becomes of the tensors that it has saved."""
    passages: dict[int, Passage]
    """What each forward-only part has passed on."""
    entered: dict[int, list[WeakStorage]]
    """By part, weak references to the memory that came into its forward and backward, where lanes are streams: all that
    can be another stream's of what the part has saved."""


class Stage:
    """A stage's layers, and the state of the microbatches in flight. Parts are those of the program's anatomy."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        anatomy: Anatomy,
        index: int,
        *,
        gradients: Gradients,
        device: torch.device = CPU,
        sites: Mapping[Part, PartSites] | None = None,
        memory: Memory = KEEP_ALL,
        elsewhere: Callable[[Tensor], str | None] = lambda _: None,
        replicated: bool = False,
        exchanges: Exchanges | None = None,
    ) -> None:
        """`sites` say what becomes of saved tensors, and `memory` how much of them leaves; without `sites` all stay.
        `elsewhere` returns the name of a tensor that is a parameter of another rank, else None. `replicated` tells
        whether the stage lives on several devices. `exchanges` connect its experts with those of other ranks.
        """
        self.index = index
        self.layers = dict(layers)
        self._module = nn.ModuleList(layers.values())
        self._buffered: list[nn.Module] = []
        self._generators = Generators(device)
        self._gradients = gradients
        self.deferral = Deferral(self._module, gradients)
        self._device = device
        self._anatomy, self._sites = anatomy, sites
        self._saving = None if sites is None else Saving(sites, self._generators)
        if self._saving is not None:  # a backward within a forward defers nothing
            self._saving.around_second_runs = partial(self.deferral.into, None)
        self._memory = memory
        self._held: set[int] = set()  # storages of parameters and buffers
        self.streams: list[Any] = []
        """On a device, the streams that compute, and so own memory: that of the compute lane first."""
        self.leaving: frozenset[int] = frozenset()
        """The microbatches whose saved tensors the program offloads."""
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        """The dummy scalar through which inputs enter every segment's graph."""
        self._last_layers: list[str] = []  # the last layer of each part, for error messages
        self._in_phases = not anatomy.is_whole
        self._functions = self._parts(anatomy)
        self._weight_steps = anatomy.weight_steps[index]
        self._weight_of = {step: k for k, step in enumerate(self._weight_steps)}
        self._lanes = [part.phase.lane for part in anatomy.forward[index]]
        self._layer_state = LayerState(self.layers, anatomy.forward[index])
        self._forward_of = anatomy.forward_steps[index]
        self._joint = [anatomy.is_joint(index, part) for part in anatomy.forward[index]]
        self._exchanges = exchanges
        self._passes: dict[int, _Pass] = {}
        self._joining: list[list[list[WeightGradient]]] = [
            [] for _ in self._weight_of
        ]  # of earlier microbatches, by part
        self._entered: list[list[WeakStorage]] = [[] for _ in self._weight_of]  # of these, what came into their parts
        self.used: list[object] | None = None
        """If set, lanes are streams, and backwards and weight gradients append to it what they used that may be another
        stream's memory, to keep it alive."""
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._searching = True  # whether to search every graph for unregistered leaves
        self._searched_microbatch = 0  # the microbatch whose graph is searched in every step
        self._microbatches: list[int] = []  # those that this stage has run in the current step
        self._others: list[weakref.ref[Tensor]] = []  # leaves that are not parameters
        self._elsewhere, self._replicated = elsewhere, replicated
        gradients.ignore(self.anchor)
        gradients.ignore(self.deferral.anchor)
        self._key = RngKey()

    def parameters(self) -> list[nn.Parameter]:
        """Return the current parameters of all layers, without duplicates."""
        parameters = (p for module in self._module.modules() for p in module._parameters.values() if p is not None)
        return list(dict.fromkeys(parameters))

    @contextmanager
    def running(self, key: RngKey, *, training: bool) -> Iterator[None]:
        """Run a step within this context. In training, it replaces the layers' forwards for the split backward."""
        self._key = key
        self._buffered = [module for module in self._module.modules() if module._buffers]
        for number, layer in self.layers.items():
            for name, module in bypassed(number, layer).items() if self._in_phases else ():
                if has_hooks(module) or "forward" in vars(module):
                    raise PipelineError(
                        f"{name} runs in phases, so its own hooks or a replaced forward would not run; put them on "
                        "modules within it"
                    )
        connected = _NOTHING if self._exchanges is None else self._exchanges.connected()
        if not training:
            with self._generators.kept(), connected:
                yield
            return
        before, self._parameters = self._parameters, self.parameters()
        self._searching = self._searching or list(map(id, before)) != list(map(id, self._parameters))
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._others = [other for other in self._others if other() is not None]
        for leaf in [other() for other in self._others]:
            if leaf is not None and leaf.requires_grad and not self._gradients.knows(leaf):
                self._gradients.adopt(leaf)
        saving = nullcontext() if self._saving is None else self._saving.overrides
        self._microbatches = []
        if self.leaving or self._memory.compresses:
            self._held = {storage_of(getattr(tensor, "_local_tensor", tensor)) for tensor in self._own_tensors()}
        with self._generators.kept(), self.deferral.overrides, saving, connected:
            try:
                yield
                self._gradients.collect(self._parameters)  # gradients left by a layer's own backward()
                self._searching = False
                self._searched_microbatch = self._microbatches[key.step % len(self._microbatches)]
            finally:
                self.deferral.casts = None
                for state in self._passes.values():
                    state.saved.end()
                self._passes.clear()
                for deferred, entered in zip(self._joining, self._entered, strict=True):
                    deferred.clear()
                    entered.clear()

    def forward(
        self, microbatch: int, part: int, inputs: Tree, loss: OneLoss | None = None, *, held: bool = False
    ) -> Tree:
        """Run a part of the forward on the output of the previous part or stage, and return its output.

        With `loss`, which only the last part of the last stage gets, return the loss instead. With `held`, others hold
        the memory of the inputs for as long as the pass lasts, so it need not leave the device.
        """
        if part == 0:
            self._microbatches.append(microbatch)
            deferred: list[list[WeightGradient]] = [[] for _ in self._weight_of]
            saved = SavedPass(self._device, self._memory.min_bytes, self._held, leaves=microbatch in self.leaving)
            self._passes[microbatch] = _Pass([None] * len(self._functions), deferred, saved, {}, {})
        state = self._passes[microbatch]
        if state.saved.away is not None or self._memory.compresses:
            if held:
                state.saved.hold(tensors_of(inputs.leaves))
            elif part == 0:  # as it would be if another rank had sent it
                state.saved.hold_exact(tensors_of(inputs.leaves))
            self.deferral.casts = lambda weight: state.saved.hold([weight])
        if self._exchanges is not None:
            self._exchanges.take_turn(Op.F, part)
        looks = self._searching or microbatch == self._searched_microbatch
        watching = self._keeping_state(part, looks=looks)
        if part not in self._forward_of:
            run = self._function(part, microbatch, None)
            with watching:
                out, state.passages[part] = pass_on(run, inputs, self._last_layers[part])
            return out
        with watching, self._replacing(state):
            out, segment = run_segment(
                self._function(part, microbatch, loss), inputs, self.anchor, self._last_layers[part]
            )
        state.segments[part] = segment
        if self.used is not None:
            state.entered[part] = weak_storages((*tensors_of(inputs.leaves), *self._layer_state.replaced()))
        if self._joint[part]:  # other ranks wait for this one in the backward
            segment.zeros = [_zeros_like(leaf) for leaf in out.leaves]
        if looks:
            self._find_others(segment.leaves(), self._last_layers[part], loss)
        if part == len(self._functions) - 1:
            state.saved.end_forward()
        return self._own(out)

    def evaluate(
        self, microbatch: int, part: int, inputs: Tree, measure: Callable[[Value], Value] | None = None
    ) -> Tree:
        """Run a part of the forward, keeping nothing for a backward.

        With `measure`, which only the last part of the last stage gets, return what it makes of the output.
        """
        if self._exchanges is not None:
            self._exchanges.take_turn(Op.F, part)
        function = self._functions[part]

        def measured(value: Value) -> Value:
            out = function(value, microbatch)
            if measure is None:
                return out
            self._generators.seed(self._key.seed_of(_LOSS, 0, microbatch))
            return measure(out)

        with self._keeping_state(part, looks=microbatch == self._searched_microbatch):
            value = call(measured, inputs)
        tree = take_apart(value, self._last_layers[part], inputs)
        tree.leaves = [settled(leaf) for leaf in tree.leaves]
        return self._own(tree)

    def _keeping_state(self, part: int, *, looks: bool) -> Any:
        """Keep what phases of other lanes have set in layers, if this part may read it, and else note what this one
        sets, within the context that is returned.
        """
        if self.used is None:
            return _NOTHING
        if self._lanes[part] == "compute":
            self.used += self._layer_state.replaced()
            return _NOTHING
        return self._layer_state.watching(part) if looks else _NOTHING

    def backward(self, microbatch: int, part: int, grads: Grads) -> list[Tensor | None]:
        """Run a part of the backward, counted from the stage's end. Return the gradients of its inputs' leaves, None
        for leaves without one.
        """
        state = self._passes[microbatch]
        if self._exchanges is not None:
            self._exchanges.take_turn(Op.B, part)
        at = self._forward_of[part]
        segment = state.segments[at]
        assert segment is not None, "this backward has run already"
        state.segments[at] = None
        if state.saved.away is not None and (not self.streams or torch.cuda.current_stream() == self.streams[0]):
            state.saved.away.settle()
        deferred = state.deferred[self._weight_of[part]] if part in self._weight_of else None
        shares = self.used is not None and self._lanes[at] != "compute"
        if self.used is not None:
            state.entered[at] += weak_storages(tensors_of(grads))
            # What comes back from host memory is the compute lane's, so another lane keeps all that it saved.
            self.used.append(segment if shares else alive(state.entered[at]))
        with self.deferral.into(deferred), self._replacing(state), self._as_computed():
            out = segment.backward(grads, keep=shares)
        state.saved.outputs.clear()
        self._gradients.collect(self._parameters)
        while (passage := state.passages.pop(at := at - 1, None)) is not None:
            out = list(passage.back(out))
        return out

    def weight(self, microbatch: int, part: int, *, joins: bool = False) -> None:
        """Add the weight gradients that a part of the backward deferred; with `joins`, leave them for the next call."""
        state, waiting = self._passes[microbatch], self._joining[part]
        waiting.append(state.deferred[part])
        state.deferred[part] = []
        if self.used is not None:
            self._entered[part] += state.entered.pop(self._forward_of[self._weight_steps[part]])
        if part == len(state.deferred) - 1 and all(segment is None for segment in state.segments):
            self._passes.pop(microbatch).saved.end()
        if joins:
            return
        if self.used is not None:
            self.used.append(alive(self._entered[part]))
            self._entered[part].clear()
        with self._as_computed(), torch.no_grad():
            add_together(waiting)

    def offload(self, microbatch: int, pool: HostPool, number: int) -> None:
        """Start to copy what a pass has saved to the host buffer of this number."""
        away = self._passes[microbatch].saved.away
        assert away is not None
        memory, chosen = pool.take(number, self._chosen(away))
        if self._saving is not None and self._saving.seen is not None:
            self._saving.seen.left |= bool(chosen)
        away.leave(chosen, memory)
        if not self.streams:
            away.release()
        else:
            away.copied = torch.cuda.current_stream().record_event()

    def release(self, microbatch: int) -> None:
        """Return to the allocator what has been offloaded, before the device's next task allocates memory."""
        state = self._passes.get(microbatch)
        if state is None or state.saved.away is None or state.saved.away.copied is None:
            return
        for stream in self.streams:
            stream.wait_event(state.saved.away.copied)
        state.saved.away.copied = None
        state.saved.away.release()

    def onload(self, microbatch: int, pool: HostPool, number: int) -> None:
        """Start to copy back what was offloaded to the host buffer of this number."""
        away = self._passes[microbatch].saved.away
        assert away is not None
        if not self.streams:
            away.come_back(partial(torch.empty, dtype=torch.uint8, device=self._device))
            return
        self.release(microbatch)
        now, main = torch.cuda.current_stream(), self.streams[0]  # whose memory it is

        def empty(nbytes: int) -> Tensor:
            with torch.cuda.stream(main):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

        away.come_back(empty, lambda: now.wait_stream(main))
        pool.read(number, now.record_event())

    def _chosen(self, away: Away) -> list[Stored]:
        """Return what leaves of all that may."""
        limit = None if self._memory.max_in_flight is None else self._memory.max_in_flight // self._memory.copy_actions
        return within(away.candidates(), fraction=self._memory.fraction_of(self.index), limit=limit)

    def sites_seen(self) -> tuple[SitesSeen, Mapping[Part, PartSites]] | None:
        """Return which sites have run, and all sites; None without any, or if they were returned before."""
        if self._saving is None or self._sites is None or self._saving.seen is None:
            return None
        seen, self._saving.seen = self._saving.seen, None
        return seen, self._sites

    def _own_tensors(self) -> Iterator[Tensor]:
        """Return the parameters, buffers and other tensors that layers hold."""
        for module in self._module.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not is_lazy(tensor):
                    yield tensor

    def _replacing(self, state: _Pass) -> Any:
        return _NOTHING if self._saving is None else self._saving.into(state.saved)

    def _as_computed(self) -> Any:
        """Return a context without autocast: gradients are computed in the dtypes of the forward."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING

    def _own(self, out: Tree) -> Tree:
        """Return the output with module buffers copied, since the next microbatch may change them."""
        if not self._buffered:
            return out
        held = {
            storage._cdata
            for module in self._buffered
            for buffer in module._buffers.values()
            if buffer is not None
            for storage in storages_of(buffer)
        }
        return out.copied(lambda tensor: any(storage._cdata in held for storage in storages_of(tensor)))

    def adopt_behind(self, tensors: Sequence[Tensor], own: Collection[int]) -> None:
        """Adopt the leaves of the graphs behind inputs or targets. `own` holds the ids of the user's own tensors."""
        for leaf in leaves_of([get_gradient_edge(tensor).node for tensor in tensors], ()):
            if self._gradients.knows(leaf):
                continue
            if (name := self._elsewhere(leaf)) is not None:
                raise PipelineError(f"inputs or targets depend on {name}, {_ELSEWHERE}")
            if self._replicated and id(leaf) not in own:
                raise PipelineError(
                    f"inputs or targets depend on a tensor of shape {tuple(leaf.shape)}, and the stage that takes them "
                    "lives on several devices, each of which would see a part of its gradient; use it in a layer"
                )
            self._gradients.adopt(leaf)

    def validate_parameters(self) -> None:
        """Raise PipelineError if a forward has added, replaced, frozen or unfrozen parameters during the step."""
        now = self.parameters()
        if list(map(id, now)) != list(map(id, self._parameters)):
            raise PipelineError(f"a layer of stage {self.index} has other parameters than before the step; {_BEFORE}")
        if [parameter.requires_grad for parameter in now] != self._trained:
            raise PipelineError(
                f"a layer of stage {self.index} froze or unfroze a parameter while a step ran; {_BEFORE}"
            )

    def _adopt(self, loss: Tensor, outputs: Sequence[Tensor], function: OneLoss) -> None:
        """Adopt the leaves that the loss function itself uses."""
        assert loss.grad_fn is not None
        ends = [output.grad_fn for output in outputs if output.grad_fn is not None]
        for leaf in leaves_of([loss.grad_fn], ends):
            if self._gradients.knows(leaf) or function.is_target(leaf):
                continue
            if (name := self._elsewhere(leaf)) is not None:
                raise PipelineError(f"the loss uses {name}, {_ELSEWHERE}")
            if self._replicated:
                raise PipelineError(
                    f"the loss trains a tensor of its own, of shape {tuple(leaf.shape)}, and the last stage lives on "
                    "several devices, each of which would see a part of its gradient; make it a parameter of the last "
                    "layer"
                )
            self._gradients.adopt(leaf)

    def _find_others(self, leaves: Sequence[Tensor], last: str, loss: OneLoss | None) -> None:
        """Check the leaves of a part's graph: a parameter must be registered with a layer; other leaves are adopted.

        A replicated stage refuses a leaf that occurs again, since its gradient could not be summed over ranks. (A leaf
        that a forward creates is a new one for every microbatch.)
        """
        for leaf in leaves:
            known = self._gradients.knows(leaf) or (loss is not None and loss.is_target(leaf))
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
        exchanges = self._exchanges if self._joint[part] else None
        if loss is None and exchanges is not None:
            return lambda value: exchanges.kept_in(function(value, microbatch))
        if loss is None:
            return lambda value: function(value, microbatch)

        def with_loss(value: Value) -> Value:
            out = function(value, microbatch)
            self._generators.seed(self._key.seed_of(_LOSS, 0, microbatch))
            result = loss(out)
            if result.grad_fn is not None:
                self._adopt(result, tensors_of(out), loss)
            return result if exchanges is None else exchanges.kept_in_loss(result, out)

        return with_loss

    def _parts(self, anatomy: Anatomy) -> list[Function]:
        """Return the functions of all parts: the whole stage, or one per phase."""
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
        """Return a function that seeds and runs a layer or phase."""
        name, saving = f"layer {number}", self._saving
        buffers = ModuleBuffers(name, self.layers[number])

        def run(value: Value, microbatch: int) -> Value:
            self._generators.seed(self._key.seed_of(number, phase, microbatch))
            if saving is None:
                return function(value)
            return saving.run((number, phase), name, function, value, buffers)

        return run


def _zeros_like(leaf: Any) -> Callable[[], Tensor]:
    """Return a function that makes zeros of a leaf's shape, and does not keep the leaf."""
    if not isinstance(leaf, Tensor):
        return lambda: torch.zeros(())
    return partial(torch.zeros, leaf.shape, dtype=leaf.dtype, device=leaf.device)


_BEFORE = "do that before the step"
_ELSEWHERE = "which another rank trains; let layers use it, and tie them"
_NOTHING = nullcontext()
_LOSS = -1  # stands for the loss in place of a layer number
