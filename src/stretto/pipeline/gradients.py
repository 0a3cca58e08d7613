"""The gradients of a step: summed in buffers of ours, given out once at its end, or put back as they were."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import UninitializedParameter

from stretto.ir.errors import PipelineError
from stretto.pipeline.gradient_buffers import Block, Buffer, Sum, add_all

Kind = Literal["cast", "parameter", "float32"]
"""What gradients are summed in, and given out as: in float32, and cast to the parameter's type; in that type; or in
float32, as `main_grads`.
"""
Message = tuple[tuple[int, ...], tuple[int, ...]]
"""What is summed over ranks at once: the ranks, and the stages whose gradients these are."""

KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(slots=True)
class _Kept:
    """What a parameter had before the step."""

    parameter: Tensor
    grad: Tensor | None
    hooks: dict[int, Callable[[Tensor], Any]]
    """Those on its gradient."""
    after: dict[int, Callable[[Tensor], None]]
    """Those that run once the gradient is there."""
    adds: bool
    """Whether the step's gradient is added to the one before, or replaces it."""


class Gradients:
    """Those of a rank's parameters: each is added to a `Sum`, and `.grad` is set when the step ends."""

    def __init__(
        self,
        kind: Kind = "cast",
        *,
        is_loose: Callable[[Tensor], bool] = lambda _: False,
        shared_as: Callable[[Tensor, int], tuple[Message, str] | None] = lambda *_: None,
        demand: Callable[[Sequence[Tensor]], None] = lambda _: None,
        name_of: Callable[[Tensor], str] = lambda tensor: f"a parameter of shape {tuple(tensor.shape)}",
    ) -> None:
        """`is_loose` says which parameters' gradients are not dense; `shared_as` gives the message by which the
        gradient of a parameter of a stage is summed with other ranks', if it is, and its name there; `demand` refuses
        parameters that cannot be trained, whenever they are others than before.
        """
        self._kind, self._is_loose, self._shared_as = kind, is_loose, shared_as
        self._demand, self._name_of = demand, name_of
        self._sums: dict[int, Sum] = {}
        self._adopted: dict[int, Sum] = {}
        self._buffers: list[Buffer] = []
        self._signature: list[Any] | None = None
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._kept: list[_Kept] = []
        self._exact: dict[int, Tensor] = {}  # the sums of the steps before, that gradients are added to
        self._resting: dict[int, tuple[Tensor, Tensor]] = {}  # frozen parameters, and sums that they had before
        self._ignored: dict[int, Tensor] = {}
        self._open = self._accumulates = self._lost = False
        self._blocks: dict[tuple[Message, str, str], Block] = {}  # what is summed over ranks
        self._loose: dict[tuple[Message, str], Sum] = {}
        self._names: list[tuple[Message, str]] = []
        self._digests: dict[tuple[int, ...], int] = {}
        self.several_streams = False
        """Whether gradients are added on several streams of a device."""

    def begin(self, stages: Mapping[int, Sequence[nn.Parameter]], *, accumulate: bool = False) -> bool:
        """Begin a step: no parameter has a gradient or a hook until it has ended. Returns whether other parameters are
        trained than in the step before.
        """
        every = {id(parameter): parameter for parameters in stages.values() for parameter in parameters}
        for parameter in every.values() if self._kind == "float32" else ():
            if parameter._post_accumulate_grad_hooks:
                raise PipelineError(
                    f'{self._name_of(parameter)} has a hook for when .grad is set, which gradients="float32" does not '
                    'do; use register_hook, or gradients="cast"'
                )
        if accumulate:
            self.demand_main_grads()
        self._open, self._accumulates = True, accumulate
        self._exact = self._exact_sums() if accumulate else {}
        if not accumulate:
            self._resting.clear()
        changed = self._lay_out(stages)
        if self._kind == "float32":
            frozen = self._exact.keys() - self._sums.keys() & every.keys()
            self._resting.update((key, (every[key], self._exact[key])) for key in frozen)
        self._kept = [self._take(parameter, adds=accumulate) for parameter in every.values()]
        for buffer in self._buffers:
            if accumulate or buffer.flat is None:
                buffer.renew()
            buffer.divisor = None
        for sum_ in self._sums.values():
            sum_.value = sum_.stream = None
            sum_.is_summed = False
        return changed

    def of(self, parameter: Tensor) -> Sum:
        """The sum to add a parameter's gradient to."""
        sum_ = self._sums.get(id(parameter)) or self._adopted.get(id(parameter)) or self.adopt(parameter)
        if sum_.is_summed:
            raise PipelineError(
                f"a gradient of {self._name_of(parameter)} came after it was summed over the ranks that hold it: a "
                "layer of another stage uses it; register it there too, or tie the two"
            )
        if self.several_streams:
            now = torch.cuda.current_stream()
            if sum_.stream is not None and sum_.stream != now:
                now.wait_stream(sum_.stream)
            sum_.stream = now
        return sum_

    @property
    def layout(self) -> int:
        """A number for which parameters are trained, and what they look like."""
        return self._layouts.setdefault(tuple(self._signature or ()), len(self._layouts))

    def knows(self, tensor: Tensor) -> bool:
        """Whether this is a parameter of this rank's layers that is trained, or was adopted, or is to be left alone."""
        return id(tensor) in self._sums or id(tensor) in self._adopted or id(tensor) in self._ignored

    def ignore(self, tensor: Tensor) -> None:
        """Let a tensor alone that is in graphs for reasons of ours."""
        self._ignored[id(tensor)] = tensor

    def adopt(self, tensor: Tensor) -> Sum:
        """Take a tensor in that is nobody's parameter, for this step. Its gradient is added to the one it has."""
        self._kept.append(self._take(tensor, adds=True))
        sum_ = self._adopted[id(tensor)] = Sum(tensor, self._summed_in(tensor), _given_as(tensor))
        return sum_

    def collect(self, tensors: Iterable[Tensor], times: Tensor | None = None) -> None:
        """Add what autograd has put into `.grad`: at once, as others may hold it, to send it, or to make weight
        gradients of it. `times` is what it was divided by before all else is.
        """
        if self._adopted:
            tensors = [*tensors, *(sum_.parameter for sum_ in self._adopted.values())]
        found = []
        for tensor in tensors:
            if (grad := tensor.grad) is not None:
                tensor.grad, sum_ = None, self.of(tensor)
                found.append((sum_, grad.detach() if times is None else grad.detach().to(sum_.dtype) * times))
        add_all(found)

    def demand_no_hooks(self) -> None:
        """Refuse hooks that would not see what is deferred: those that a layer has put on a parameter meanwhile, and
        those on nodes.
        """
        for sum_ in self._sums.values():
            if _has_node_hooks(sum_.parameter):
                raise PipelineError(
                    f"the node that accumulates the gradient of {self._name_of(sum_.parameter)} has a hook; use "
                    "register_hook or register_post_accumulate_grad_hook on the parameter"
                )
        for kept in self._kept:
            if kept.parameter._backward_hooks or kept.parameter._post_accumulate_grad_hooks:
                name = self._name_of(kept.parameter)
                raise PipelineError(f"a hook was put on {name} while a step ran; do that before the step")

    @torch.no_grad()
    def give_out(self, count: Tensor | None = None) -> None:
        """Divide the sums by a count, if by anything, run the parameters' hooks, and set `.grad`."""
        for sum_ in self._sums.values():
            sum_.is_summed = False
        for buffer in self._buffers:
            buffer.divisor = count
        for sum_ in self._all():
            if count is not None and sum_.value is not None and sum_.value is not sum_.place:
                sum_.value = sum_.value / count
        for kept in self._kept:
            if kept.hooks:
                _hooks_of(kept)[0][0].update(kept.hooks)
        used = {id(sum_.parameter): sum_ for sum_ in self._all() if sum_.value is not None}
        hooked = [used[id(kept.parameter)] for kept in self._kept if kept.hooks and id(kept.parameter) in used]
        if hooked or self._accumulates or self._kind == "float32":
            for buffer in self._buffers:
                buffer.divide()
        try:
            _run_hooks(hooked)
        except BaseException:
            self.restore()
            raise
        for kept in self._kept:
            if kept.after:
                _hooks_of(kept)[1][0].update(kept.after)
            if kept.adds:
                self._add_before(kept)
        self._set_grads()
        self._lost = False
        after = [(kept.parameter, hook) for kept in self._kept for hook in kept.after.values()]
        self._end()
        for parameter, hook in after:
            if id(parameter) in used:
                hook(parameter)

    def restore(self) -> None:
        """As if there had been no step; only sums that are the gradients themselves are lost."""
        if not self._open:
            return
        for kept in self._kept:
            kept.parameter.grad = kept.grad
            for hooks, before in _hooks_of(kept):
                hooks.update(before)
        if self._kind == "float32":
            self._lost = self._lost or not self._accumulates
            for sum_ in self._sums.values():
                sum_.value = self._exact.get(id(sum_.parameter))
        self._end()

    def demand_main_grads(self) -> None:
        """Refuse to go on with sums that a step has begun to replace."""
        if self._lost:
            raise PipelineError(
                'a step that failed has overwritten the gradients of gradients="float32"; run one without accumulate'
            )

    def main_grad(self, parameter: Tensor) -> Tensor | None:
        """The sum itself, with `gradients="float32"`."""
        sum_, resting = self._sums.get(id(parameter)), self._resting.get(id(parameter))
        return sum_.value if sum_ is not None else None if resting is None else resting[1]

    def blocks(self, message: Message) -> list[Block]:
        """What is summed over ranks by this message, in an order that they agree on."""
        return [self._blocks[key] for key in sorted(self._blocks) if key[0] == message]

    def loose(self, message: Message) -> list[Sum]:
        """The same, of what does not lie in blocks."""
        return [self._loose[key] for key in sorted(self._loose) if key[0] == message]

    def digest(self, ranks: tuple[int, ...]) -> int:
        """A number of 63 bits, of what is summed over these ranks: it must be the same on all."""
        if ranks not in self._digests:
            text = "".join(
                f"{key} {[(*sum_.parameter.shape, *sum_.parameter.stride()) for sum_ in block.sums]}"
                for key, block in sorted(self._blocks.items())
                if key[0][0] == ranks
            )
            names = [name for message, name in self._names if message[0] == ranks]
            text += "".join(
                f"{key} {sum_.dtype} {sum_.given_as} {shape_of(sum_.parameter)}"
                for key, sum_ in sorted(self._loose.items())
                if key[0][0] == ranks
            )
            made = hashlib.blake2b(f"{text} {sorted(names)}".encode(), digest_size=8).digest()
            self._digests[ranks] = int.from_bytes(made) >> 1
        return self._digests[ranks]

    def _all(self) -> Iterable[Sum]:
        return (*self._sums.values(), *self._adopted.values())

    def _take(self, tensor: Tensor, *, adds: bool) -> _Kept:
        """What a tensor has, which it has not until the step has ended."""
        made = []
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            made.append(dict(hooks) if hooks else {})
            if hooks:
                hooks.clear()
        kept = _Kept(tensor, tensor.grad, made[0], made[1], adds)
        tensor.grad = None
        return kept

    def _lay_out(self, stages: Mapping[int, Sequence[nn.Parameter]]) -> bool:
        """Find places for the sums of all parameters that are trained, if they are other ones than before."""
        trained = [(stage, p) for stage, parameters in stages.items() for p in parameters if p.requires_grad]
        signature = [(stage, id(p), shape_of(p), p.device, p.dtype, _given_as(p)) for stage, p in trained]
        if signature == self._signature:
            return False
        self._demand([p for parameters in stages.values() for p in parameters])
        self._signature, self._sums, self._blocks, self._loose = signature, {}, {}, {}
        self._names, self._digests = [], {}
        groups: dict[Any, dict[Message | None, dict[str, Sum]]] = defaultdict(lambda: defaultdict(dict))
        for stage, parameter in trained:
            if id(parameter) in self._sums:
                continue
            sum_ = self._sums[id(parameter)] = Sum(parameter, self._summed_in(parameter), _given_as(parameter))
            message, name = self._shared_as(parameter, stage) or (None, f"{len(self._sums):08}")
            if message is not None:
                self._names.append((message, name))
            dense = type(parameter) is nn.Parameter and parameter.layout is torch.strided
            if dense and not self._is_loose(parameter):
                groups[stage, sum_.dtype, sum_.given_as, parameter.device][message][name] = sum_
            elif message is not None:
                self._loose[message, name] = sum_
        self._buffers = []
        for (_, dtype, given_as, _), messages in groups.items():
            blocks = {
                message: Block([sums[name] for name in sorted(sums)], shared=message is not None)
                for message, sums in messages.items()
            }
            self._buffers.append(Buffer(list(blocks.values())))
            for message, block in blocks.items():
                if message is not None:
                    self._blocks[message, str(dtype), str(given_as)] = block
        return True

    def _summed_in(self, tensor: Tensor) -> torch.dtype:
        given = _given_as(tensor)
        short = given.is_floating_point and given.itemsize < 4
        return torch.float32 if short and self._kind != "parameter" else given

    def _exact_sums(self) -> dict[int, Tensor]:
        """Those that the parameters' gradients were made of, where these have another type."""
        for buffer in self._buffers:
            buffer.divide()
        resting = {id(parameter): exact for parameter, exact in self._resting.values()}
        return resting | {
            id(sum_.parameter): sum_.value
            for sum_ in self._sums.values()
            if sum_.value is not None and (sum_.dtype != sum_.given_as or self._kind == "float32")
        }

    def _add_before(self, kept: _Kept) -> None:
        """Add the gradient of the steps before: the sum it was made of, except where somebody has changed it since."""
        parameter, before = kept.parameter, kept.grad
        exact = self._exact.get(id(parameter))
        if self._kind == "float32" and id(parameter) not in self._adopted:
            before = exact
        elif exact is not None and before is not None:
            before = _refined(exact, before)
        if before is not None and self.knows(parameter):
            self.of(parameter).add(before)
            self._resting.pop(id(parameter), None)
        elif before is not None and self._kind != "float32":
            parameter.grad = kept.grad  # it is frozen now

    def _set_grads(self) -> None:
        main = self._kind == "float32"
        for buffer in self._buffers if not main else ():
            same = buffer.dtype == buffer.given_as
            if same:
                buffer.divide()
            given = [sum_.place for sum_ in buffer.sums] if same else buffer.cast()
            for sum_, grad in zip(buffer.sums, given, strict=True):
                if sum_.value is sum_.place:
                    sum_.parameter.grad = grad
            if same:
                buffer.flat = None  # it is the user's now
        for sum_ in self._all():
            adopted = id(sum_.parameter) in self._adopted
            if sum_.value is not None and sum_.value is not sum_.place and (adopted or not main):
                sum_.parameter.grad = sum_.value.to(sum_.given_as)
            if sum_.dtype == sum_.given_as and not main:
                sum_.value = sum_.place = None

    def _end(self) -> None:
        self._open = False
        self._kept = []
        self._adopted.clear()
        self._exact = {}


def _hooks_of(kept: _Kept) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Where a parameter has its hooks, of both kinds, and those that it had before the step."""
    tensor = kept.parameter
    both = ((tensor._backward_hooks, kept.hooks), (tensor._post_accumulate_grad_hooks, kept.after))
    return [({} if hooks is None else hooks, before) for hooks, before in both]


def _run_hooks(sums: Sequence[Sum]) -> None:
    """Run the hooks on parameters by a backward of autograd's own, from their gradients; each may change its one."""
    if not sums:
        return
    grads = [sum_.value.to(sum_.given_as, copy=True) for sum_ in sums if sum_.value is not None]
    torch.autograd.backward([sum_.parameter for sum_ in sums], grads)
    for sum_ in sums:
        grad, sum_.parameter.grad = sum_.parameter.grad, None
        if grad is None:
            sum_.value = None
        elif sum_.value is not None and sum_.value is sum_.place and grad.layout is torch.strided:
            sum_.value.copy_(_refined(sum_.value, grad))
        else:
            sum_.value = grad.to(sum_.dtype)


def _refined(exact: Tensor, rounded: Tensor) -> Tensor:
    """What was rounded, as exact as it is known: where it is still the rounding of a sum, that sum."""
    if exact.layout is not torch.strided or rounded.layout is not torch.strided or exact.shape != rounded.shape:
        return rounded
    return torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.to(exact.dtype))


def _given_as(tensor: Tensor) -> torch.dtype:
    """The type of a tensor's `.grad`."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def shape_of(parameter: Tensor) -> Any:
    """Its shape and strides, None as long as it has none."""
    return None if isinstance(parameter, UninitializedParameter) else (parameter.shape, parameter.stride())


def _has_node_hooks(parameter: Tensor) -> bool:
    """Whether the node that accumulates a parameter's gradient has hooks: weight gradients do not come by there."""
    if isinstance(parameter, UninitializedParameter):
        return False
    node, found = get_gradient_edge(parameter).node, False
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        found = found or bool(hooks)
    return found
