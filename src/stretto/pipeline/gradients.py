"""The gradients of a step: summed in flat buffers, then set as `.grad` at the end, or restored if the step fails."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import UninitializedParameter

from stretto.ir.errors import PipelineError
from stretto.pipeline.gradient_buffers import Block, Buffer, Sum, add_all

Kind = Literal["cast", "parameter", "float32"]
"""How gradients are summed: in float32 and cast to the parameter's dtype; in that dtype; or in float32, available as
`main_grads`.
"""
Message = tuple[tuple[int, ...], tuple[int, ...]]
"""One all-reduce: its ranks, and the stages whose gradients it sums."""

KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(slots=True)
class _Saved:
    """A parameter's gradient and hooks from before the step."""

    parameter: Tensor
    grad: Tensor | None
    hooks: dict[int, Callable[[Tensor], Any]]
    """Hooks on its gradient (`register_hook`)."""
    after: dict[int, Callable[[Tensor], None]]
    """Hooks that run after `.grad` is set (`register_post_accumulate_grad_hook`)."""
    adds: bool
    """Whether the step's gradient is added to the previous one instead of replacing it."""


class Gradients:
    """The gradients of a rank's parameters. Each accumulates in a `Sum`; `.grad` is set when the step ends."""

    def __init__(
        self,
        kind: Kind = "cast",
        *,
        is_loose: Callable[[Tensor], bool] = lambda _: False,
        shared_as: Callable[[Tensor, int], tuple[Message, str] | None] = lambda *_: None,
        validate: Callable[[Sequence[Tensor]], None] = lambda _: None,
        name_of: Callable[[Tensor], str] = lambda tensor: f"a parameter of shape {tuple(tensor.shape)}",
    ) -> None:
        """Create empty sums; `begin` lays out the buffers.

        `is_loose` tells whether a parameter's gradient may be sparse, so that it gets no slice of a buffer.
        `shared_as` returns the all-reduce that sums a stage's parameter over ranks, and the parameter's name there, or
        None. `validate` raises if parameters cannot be trained; it runs whenever the trained parameters change.
        """
        self._kind, self._is_loose, self._shared_as = kind, is_loose, shared_as
        self._validate, self._name_of = validate, name_of
        self._sums: dict[int, Sum] = {}
        self._adopted: dict[int, Sum] = {}
        self._buffers: list[Buffer] = []
        self._signature: list[Any] | None = None
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._saved: list[_Saved] = []
        self._exact: dict[int, Tensor] = {}  # unrounded sums of earlier steps, for accumulate
        self._frozen_sums: dict[int, tuple[Tensor, Tensor]] = {}  # frozen parameters and their earlier sums
        self._ignored: dict[int, Tensor] = {}
        self._open = self._accumulates = self._overwritten = False
        self._blocks: dict[tuple[Message, str, str], Block] = {}  # blocks to all-reduce
        self._loose: dict[tuple[Message, str], Sum] = {}
        self._names: list[tuple[Message, str]] = []
        self._digests: dict[tuple[int, ...], int] = {}
        self.several_streams = False
        """Whether gradients are added on more than one CUDA stream."""

    def begin(self, stages: Mapping[int, Sequence[nn.Parameter]], *, accumulate: bool = False) -> bool:
        """Begin a step: remove all gradients and hooks from parameters until it ends.

        Return whether the trained parameters differ from the previous step's.
        """
        every = {id(parameter): parameter for parameters in stages.values() for parameter in parameters}
        for parameter in every.values() if self._kind == "float32" else ():
            if parameter._post_accumulate_grad_hooks:
                raise PipelineError(
                    f'{self._name_of(parameter)} has a hook for when .grad is set, which gradients="float32" does not '
                    'do; use register_hook, or gradients="cast"'
                )
        if accumulate:
            self.validate_main_grads()
        self._open, self._accumulates = True, accumulate
        self._exact = self._exact_sums() if accumulate else {}
        if not accumulate:
            self._frozen_sums.clear()
        changed = self._lay_out(stages)
        if self._kind == "float32":
            frozen = self._exact.keys() - self._sums.keys() & every.keys()
            self._frozen_sums.update((key, (every[key], self._exact[key])) for key in frozen)
        self._saved = [self._detach_state(parameter, adds=accumulate) for parameter in every.values()]
        for buffer in self._buffers:
            if accumulate or buffer.flat is None:
                buffer.renew()
            buffer.divisor = None
        for sum_ in self._sums.values():
            sum_.value = sum_.stream = None
            sum_.is_summed = False
        return changed

    def of(self, parameter: Tensor) -> Sum:
        """Return the sum to which a parameter's gradient is added; adopt an unknown tensor."""
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
        """A number that identifies which parameters are trained, with their shapes and dtypes."""
        return self._layouts.setdefault(tuple(self._signature or ()), len(self._layouts))

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a trained parameter of this rank, adopted, or ignored."""
        return id(tensor) in self._sums or id(tensor) in self._adopted or id(tensor) in self._ignored

    def ignore(self, tensor: Tensor) -> None:
        """Leave alone a tensor that only the pipeline itself puts into graphs."""
        self._ignored[id(tensor)] = tensor

    def adopt(self, tensor: Tensor) -> Sum:
        """Track a tensor that is no layer's parameter, for this step. Its gradient is added to its current `.grad`."""
        self._saved.append(self._detach_state(tensor, adds=True))
        sum_ = self._adopted[id(tensor)] = Sum(tensor, self._summed_in(tensor), _grad_dtype(tensor))
        return sum_

    def collect(self, tensors: Iterable[Tensor], times: Tensor | None = None) -> None:
        """Move the gradients that autograd has put into `.grad` to the sums.

        Must run right after the backward: others may hold the same tensor, to send it or to compute weight gradients
        from it. `times` undoes a division that these gradients have had already, and the sums have not.
        """
        if self._adopted:
            tensors = [*tensors, *(sum_.parameter for sum_ in self._adopted.values())]
        gradients = []
        for tensor in tensors:
            if (grad := tensor.grad) is not None:
                tensor.grad, sum_ = None, self.of(tensor)
                gradients.append((sum_, grad.detach() if times is None else grad.detach().to(sum_.dtype) * times))
        add_all(gradients)

    def validate_hooks(self) -> None:
        """Raise PipelineError for hooks that deferred gradients would bypass: hooks on AccumulateGrad nodes, and hooks
        that a layer put on a parameter during the step.
        """
        for sum_ in self._sums.values():
            if _has_node_hooks(sum_.parameter):
                raise PipelineError(
                    f"the node that accumulates the gradient of {self._name_of(sum_.parameter)} has a hook; use "
                    "register_hook or register_post_accumulate_grad_hook on the parameter"
                )
        for saved in self._saved:
            if saved.parameter._backward_hooks or saved.parameter._post_accumulate_grad_hooks:
                name = self._name_of(saved.parameter)
                raise PipelineError(f"a hook was put on {name} while a step ran; do that before the step")

    @torch.no_grad()
    def give_out(self, count: Tensor | None = None) -> None:
        """Divide the sums by `count`, if given, run the parameters' hooks, and set `.grad`."""
        for sum_ in self._sums.values():
            sum_.is_summed = False
        for buffer in self._buffers:
            buffer.divisor = count
        for sum_ in self._all():
            if count is not None and sum_.value is not None and sum_.value is not sum_.place:
                sum_.value = sum_.value / count
        for saved in self._saved:
            if saved.hooks:
                _hooks_of(saved)[0][0].update(saved.hooks)
        used = {id(sum_.parameter): sum_ for sum_ in self._all() if sum_.value is not None}
        hooked = [used[id(saved.parameter)] for saved in self._saved if saved.hooks and id(saved.parameter) in used]
        if hooked or self._accumulates or self._kind == "float32":
            for buffer in self._buffers:
                buffer.divide()
        try:
            _run_hooks(hooked)
        except BaseException:
            self.restore()
            raise
        for saved in self._saved:
            if saved.after:
                _hooks_of(saved)[1][0].update(saved.after)
            if saved.adds:
                self._add_before(saved)
        self._set_grads()
        self._overwritten = False
        after = [(saved.parameter, hook) for saved in self._saved for hook in saved.after.values()]
        self._end()
        for parameter, hook in after:
            if id(parameter) in used:
                hook(parameter)

    def restore(self) -> None:
        """Undo the step: put back gradients and hooks. With "float32", sums that were overwritten stay lost."""
        if not self._open:
            return
        for saved in self._saved:
            _put_back(saved)
        if self._kind == "float32":
            self._overwritten = self._overwritten or not self._accumulates
            for sum_ in self._sums.values():
                sum_.value = self._exact.get(id(sum_.parameter))
        self._end()

    @contextmanager
    def set_aside(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Remove the gradients and hooks of parameters within this context, and put them back at its end."""
        saved = [self._detach_state(parameter, adds=False) for parameter in parameters]
        try:
            yield
        finally:
            for one in saved:
                _put_back(one)

    def bytes_for(self, stages: Mapping[int, Sequence[nn.Parameter]]) -> tuple[int, int]:
        """Return the bytes of the sums of gradients, and of `.grad` where it is a copy of another dtype, which is made
        at the end of a step.
        """
        planned = Gradients(self._kind, is_loose=self._is_loose, shared_as=self._shared_as)
        planned._lay_out(stages)
        in_buffers = {id(sum_) for buffer in planned._buffers for sum_ in buffer.sums}
        sizes = [(buffer.size, buffer.dtype, buffer.grad_dtype) for buffer in planned._buffers]
        sizes += [
            (sum_.parameter.numel(), sum_.dtype, sum_.grad_dtype)
            for sum_ in planned._sums.values()
            if id(sum_) not in in_buffers
        ]
        return sum(size * dtype.itemsize for size, dtype, _ in sizes), sum(
            size * grad_dtype.itemsize
            for size, dtype, grad_dtype in sizes
            if dtype != grad_dtype and self._kind == "cast"
        )

    def validate_main_grads(self) -> None:
        """Raise PipelineError if a failed step has overwritten the float32 sums."""
        if self._overwritten:
            raise PipelineError(
                'a step that failed has overwritten the gradients of gradients="float32"; run one without accumulate'
            )

    def main_grad(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's float32 sum, with `gradients="float32"`."""
        sum_, frozen_sum = self._sums.get(id(parameter)), self._frozen_sums.get(id(parameter))
        return sum_.value if sum_ is not None else None if frozen_sum is None else frozen_sum[1]

    def blocks(self, message: Message) -> list[Block]:
        """Return the blocks that this message all-reduces, in the same order on every rank."""
        return [self._blocks[key] for key in sorted(self._blocks) if key[0] == message]

    def loose(self, message: Message) -> list[Sum]:
        """Return the sums of this message that lie in no block, in the same order on every rank."""
        return [self._loose[key] for key in sorted(self._loose) if key[0] == message]

    def digest(self, ranks: tuple[int, ...]) -> int:
        """Return a 63-bit checksum of what is summed over these ranks; it must be equal on all of them."""
        if ranks not in self._digests:
            text = "".join(
                f"{key} {[(*sum_.parameter.shape, *sum_.parameter.stride()) for sum_ in block.sums]}"
                for key, block in sorted(self._blocks.items())
                if key[0][0] == ranks
            )
            names = [name for message, name in self._names if message[0] == ranks]
            text += "".join(
                f"{key} {sum_.dtype} {sum_.grad_dtype} {shape_of(sum_.parameter)}"
                for key, sum_ in sorted(self._loose.items())
                if key[0][0] == ranks
            )
            checksum = hashlib.blake2b(f"{text} {sorted(names)}".encode(), digest_size=8).digest()
            self._digests[ranks] = int.from_bytes(checksum) >> 1
        return self._digests[ranks]

    def _all(self) -> Iterable[Sum]:
        return (*self._sums.values(), *self._adopted.values())

    def _detach_state(self, tensor: Tensor, *, adds: bool) -> _Saved:
        """Remove a tensor's gradient and hooks for the duration of the step, and return them."""
        removed = []
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            removed.append(dict(hooks) if hooks else {})
            if hooks:
                hooks.clear()
        saved = _Saved(tensor, tensor.grad, removed[0], removed[1], adds)
        tensor.grad = None
        return saved

    def _lay_out(self, stages: Mapping[int, Sequence[nn.Parameter]]) -> bool:
        """Allot buffer slices to all trained parameters. Return False if these have not changed."""
        trained = [(stage, p) for stage, parameters in stages.items() for p in parameters if p.requires_grad]
        signature = [(stage, id(p), shape_of(p), p.device, p.dtype, _grad_dtype(p)) for stage, p in trained]
        if signature == self._signature:
            return False
        self._validate([p for parameters in stages.values() for p in parameters])
        self._signature, self._sums, self._blocks, self._loose = signature, {}, {}, {}
        self._names, self._digests = [], {}
        groups: dict[Any, dict[Message | None, dict[str, Sum]]] = defaultdict(lambda: defaultdict(dict))
        for stage, parameter in trained:
            if id(parameter) in self._sums:
                continue
            sum_ = self._sums[id(parameter)] = Sum(parameter, self._summed_in(parameter), _grad_dtype(parameter))
            message, name = self._shared_as(parameter, stage) or (None, f"{len(self._sums):08}")
            if message is not None:
                self._names.append((message, name))
            dense = type(parameter) is nn.Parameter and parameter.layout is torch.strided
            if dense and not self._is_loose(parameter):
                groups[stage, sum_.dtype, sum_.grad_dtype, parameter.device][message][name] = sum_
            elif message is not None:
                self._loose[message, name] = sum_
        self._buffers = []
        for (_, dtype, grad_dtype, _), messages in groups.items():
            blocks = {
                message: Block([sums[name] for name in sorted(sums)], shared=message is not None)
                for message, sums in messages.items()
            }
            self._buffers.append(Buffer(list(blocks.values())))
            for message, block in blocks.items():
                if message is not None:
                    self._blocks[message, str(dtype), str(grad_dtype)] = block
        return True

    def _summed_in(self, tensor: Tensor) -> torch.dtype:
        dtype = _grad_dtype(tensor)
        short = dtype.is_floating_point and dtype.itemsize < 4
        return torch.float32 if short and self._kind != "parameter" else dtype

    def _exact_sums(self) -> dict[int, Tensor]:
        """Return the sums from which the gradients were rounded, by parameter id, where the dtypes differ."""
        for buffer in self._buffers:
            buffer.divide()
        frozen_sums = {id(parameter): exact for parameter, exact in self._frozen_sums.values()}
        return frozen_sums | {
            id(sum_.parameter): sum_.value
            for sum_ in self._sums.values()
            if sum_.value is not None and (sum_.dtype != sum_.grad_dtype or self._kind == "float32")
        }

    def _add_before(self, saved: _Saved) -> None:
        """Add the gradient of earlier steps: its unrounded sum, except where the user has changed the gradient."""
        parameter, before = saved.parameter, saved.grad
        exact = self._exact.get(id(parameter))
        if self._kind == "float32" and id(parameter) not in self._adopted:
            before = exact
        elif exact is not None and before is not None:
            before = _refined(exact, before)
        if before is not None and self.knows(parameter):
            self.of(parameter).add(before)
            self._frozen_sums.pop(id(parameter), None)
        elif before is not None and self._kind != "float32":
            parameter.grad = saved.grad  # the parameter is frozen now

    def _set_grads(self) -> None:
        main = self._kind == "float32"
        for buffer in self._buffers if not main else ():
            same = buffer.dtype == buffer.grad_dtype
            if same:
                buffer.divide()
            grads = [sum_.place for sum_ in buffer.sums] if same else buffer.cast()
            for sum_, grad in zip(buffer.sums, grads, strict=True):
                if sum_.value is sum_.place:
                    sum_.parameter.grad = grad
            if same:
                buffer.flat = None  # the user owns this memory now
        for sum_ in self._all():
            adopted = id(sum_.parameter) in self._adopted
            if sum_.value is not None and sum_.value is not sum_.place and (adopted or not main):
                sum_.parameter.grad = sum_.value.to(sum_.grad_dtype)
            if sum_.dtype == sum_.grad_dtype and not main:
                sum_.value = sum_.place = None

    def _end(self) -> None:
        self._open = False
        self._saved = []
        self._adopted.clear()
        self._exact = {}


def _hooks_of(saved: _Saved) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return a parameter's current hooks of both kinds, each with the hooks it had before the step."""
    tensor = saved.parameter
    both = ((tensor._backward_hooks, saved.hooks), (tensor._post_accumulate_grad_hooks, saved.after))
    return [({} if hooks is None else hooks, before) for hooks, before in both]


def _put_back(saved: _Saved) -> None:
    """Give a parameter the gradient and hooks that it had before."""
    saved.parameter.grad = saved.grad
    for hooks, before in _hooks_of(saved):
        hooks.update(before)


def _run_hooks(sums: Sequence[Sum]) -> None:
    """Run parameters' hooks by an autograd backward from their gradients. A hook may change its gradient."""
    if not sums:
        return
    grads = [sum_.value.to(sum_.grad_dtype, copy=True) for sum_ in sums if sum_.value is not None]
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
    """Return `rounded` with the elements that are still the rounding of `exact` replaced by the exact ones."""
    if exact.layout is not torch.strided or rounded.layout is not torch.strided or exact.shape != rounded.shape:
        return rounded
    return torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.to(exact.dtype))


def _grad_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's `.grad`."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def shape_of(parameter: Tensor) -> Any:
    """Return a parameter's shape and strides, None if it is uninitialised."""
    if isinstance(parameter, UninitializedParameter):
        return None
    return parameter.shape, parameter.stride() if parameter.layout is torch.strided else parameter.layout


def _has_node_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter's AccumulateGrad node has hooks; deferred weight gradients bypass that node."""
    if isinstance(parameter, UninitializedParameter):
        return False
    node, hooked = get_gradient_edge(parameter).node, False
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        hooked = hooked or bool(hooks)
    return hooked
