"""Recomputation: modules and layers that run again in the backward instead of keeping their activations."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.ir.errors import PipelineError
from stretto.pipeline.arguments import flattened
from stretto.pipeline.compressed import Compressed
from stretto.pipeline.contents import Contents
from stretto.pipeline.module_buffers import ModuleBuffers, Snapshot
from stretto.pipeline.offload import View
from stretto.pipeline.pytree import PLAIN, full_name, version_of
from stretto.pipeline.returned import Layout, Returned
from stretto.pipeline.rng import Generators
from stretto.pipeline.run_parameters import Accumulated, RunParameters
from stretto.pipeline.saved_attributes import attributes_of_tensor, warn_of_attributes
from stretto.pipeline.torch_modes import Modes


class Kept:
    """A saved tensor that is kept."""

    __slots__ = ("_site", "_tensor", "_version")

    def __init__(self, tensor: Tensor, site: str) -> None:
        self._tensor, self._version, self._site = tensor.detach(), version_of(tensor), site

    def tensor(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise PipelineError(f"a tensor that the backward needs was changed in place (saved by {self._site})")
        return self._tensor


class Handle:
    """A saved tensor that can be recomputed. It holds a value from the recomputation until the backward frees it.

    A backward that is itself differentiated frees nothing: then it holds the value until it is unpacked.
    """

    __slots__ = ("__weakref__", "_run", "_version", "value")

    def __init__(self, run: "Run") -> None:
        self._run, self._version = run, 0
        self.value: Tensor | None = None

    def fill(self, value: Tensor) -> None:
        self.value, self._version = value, version_of(value)

    def tensor(self) -> Tensor:
        if self.value is None:
            self._run.again()
        value = self.value
        if value is None:
            raise PipelineError(f"{self._run.name} {_OTHERS}")
        if version_of(value) != self._version:
            raise PipelineError(
                f"a tensor that the backward needs was changed in place by a backward (recomputed by {self._run.name})"
            )
        if torch.is_grad_enabled():
            self.value = None
        return value


class _Skipped(NamedTuple):
    """What a module returned that a recomputation does not run again, and the generators' states then."""

    leaves: list[Any]
    """Tensors as what stands for them."""
    needs: list[bool]
    attributes: dict[int, dict[str, Any]]
    """What is set on the tensors, by their numbers."""
    spec: pytree.TreeSpec
    states: list[Tensor]


class _EnoughError(BaseException):
    """Ends a recomputation that has made all that is needed. Forwards that catch every Exception do not catch it."""


Pack = Callable[[Tensor], Any]
_OTHERS = (
    "did not save the same tensors when it was recomputed; something around it may decide what it does, such as "
    "sdpa_kernel or parametrize.cached: recompute that with it"
)


class Run:
    """One run of a module or layer: everything needed to run it again, and the handles to fill then.

    An operation that saves a tensor in the first run saves a handle instead. The first handle that is unpacked runs the
    function again, and fills all handles; each tensor is freed with its handle. Gradients flow through the graph
    of the first run, as if nothing were recomputed, including gradients taken inside a forward.
    """

    def __init__(
        self,
        name: str,
        label: str,
        function: Callable[..., Any],
        buffers: ModuleBuffers,
        generators: Generators,
        repeating: "Callable[[Run], AbstractContextManager[None]]",
    ) -> None:
        """`label` is the site's name in reports. Within `repeating`, modules that are not recomputed with the rest ask
        `skipped` for what they returned.
        """
        self.name, self.label, self.is_over = name, label, False
        self._function, self._buffers, self._generators = function, buffers, generators
        self._repeating = repeating
        self._saved: list[tuple[weakref.ref[Handle], tuple[Any, ...]]] = []
        self._outputs: list[tuple[weakref.ref[Handle], Returned, Layout]] = []
        self._skipped: list[_Skipped] = []
        self._next_skipped: Iterator[_Skipped] = iter(())
        self._snapshot: Snapshot | None = None

    def first(
        self, arguments: Sequence[Any], named: dict[str, Any], pack: Pack, noted: Callable[[Tensor], None]
    ) -> Any:
        """Run for the first time, saving handles instead of tensors. `noted` is told which tensors are dropped."""
        leaves, self._spec, self._arguments = flattened(self.name, (tuple(arguments), named))
        if self._arguments.modules:
            self._buffers = self._buffers.including(self._arguments.modules)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._given = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, nn.Parameter)}
        self._attributes = _attributes_of(leaves)
        self._held = Contents(entry for attributes in self._attributes.values() for entry in attributes.items())
        self._modes = Modes()
        self._autocast = _autocast_of(tensors)
        self._default_dtype = torch.get_default_dtype()
        self._needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        packed = {id(leaf): pack(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves}
        self._inputs = [packed[id(leaf)] for leaf in leaves]  # a tensor passed twice is the same object twice
        versions = list(map(version_of, tensors))

        def drop(saved: Tensor) -> Handle:
            warn_of_attributes(saved, self.name)
            noted(saved)
            handle = Handle(self)
            self._saved.append((weakref.ref(handle), (saved.shape, saved.dtype)))
            return handle

        drop.is_ours = True  # type: ignore[attr-defined]
        self._states = self._generators.kept_states()
        with self._buffers.followed() as self._snapshot:
            self._parameters = RunParameters(self.name, self._snapshot.modules)
            self.accumulated = Accumulated(self.name, self._parameters, tensors)
            with saved_tensors_hooks(drop, unpack):
                out = self._function(*arguments, **named)
        self.accumulated.validate()
        del self.accumulated  # it holds tensors that may leave
        if versions != list(map(version_of, tensors)):
            raise PipelineError(f"{self.name} changes what it is given in place, so it cannot be recomputed")
        return out

    @property
    def buffers(self) -> ModuleBuffers:
        """The buffers of what runs."""
        return self._buffers

    def handle_of_output(self, returned: Returned, saved: Tensor) -> Handle:
        handle = Handle(self)
        self._outputs.append((weakref.ref(handle), returned, Layout.of(saved)))
        return handle

    def skip(self, out: Any, pack: Pack) -> None:
        """Remember what a module returned in the first run that is not to run again."""
        leaves, spec = pytree.tree_flatten(out)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
                raise PipelineError(
                    f"a module within {self.name} is not recomputed with it, and returns a {full_name(type(leaf))}, "
                    "which may have changed by then; recompute both"
                )
        packed = [pack(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self._skipped.append(_Skipped(packed, needs, _attributes_of(leaves), spec, self._generators.kept_states()))

    def skipped(self) -> Any:
        """Return what the module returned that would run now."""
        done = next(self._next_skipped, None)
        if done is None:
            raise PipelineError(f"{self.name} did not run the same modules when it was recomputed")
        self._generators.set_states(done.states)
        return pytree.tree_unflatten(_unpacked(done.leaves, done.needs, done.attributes), done.spec)

    def end(self) -> None:
        """Let go of everything: the backward is over, but a graph that a module has kept may still hold handles."""
        for reference in (*(saved[0] for saved in self._saved), *(output[0] for output in self._outputs)):
            if (handle := reference()) is not None:
                handle.value = None
        name = self.name
        vars(self).clear()
        self.name, self.is_over = name, True

    def again(self) -> None:
        """Run again, and fill every handle."""
        if self.is_over:
            raise PipelineError(f"{self.name} cannot be recomputed after its step; detach what it keeps beyond that")
        self._parameters.validate()
        self._arguments.validate()
        if (changed := self._held.changed()) is not None:
            raise PipelineError(f"{changed!r} of a tensor that {self.name} is given was changed before its backward")
        inputs = _unpacked(self._inputs, self._needs, self._attributes)
        for number, parameter in self._given.items():
            inputs[number] = parameter
        arguments, named = pytree.tree_unflatten(inputs, self._spec)
        outputs = [(handle, returned, saved) for ref, returned, saved in self._outputs if (handle := ref()) is not None]
        captured: list[tuple[Tensor, int]] = []
        wanted = len(self._saved)  # the first run may still be going

        def capture(saved: Tensor) -> Tensor:
            detached = saved.detach()  # its graph would lead back to this function, and neither would ever be freed
            captured.append((detached, saved._version))
            if len(captured) == wanted and not outputs and not self._buffers.is_scripted:
                raise _EnoughError
            return detached

        def differentiated(saved: Any) -> Any:
            if self._skipped:
                raise PipelineError(
                    f"{self.name} differentiates within its forward, and a module within it is not recomputed with it; "
                    "recompute both"
                )
            return saved

        capture.is_ours = True  # type: ignore[attr-defined]
        assert self._snapshot is not None
        self._next_skipped = iter(self._skipped)
        with (
            self._generators.kept(),
            self._buffers.restored(self._snapshot),
            self._parameters.restored(),
            _default_dtype(self._default_dtype),
            self._repeating(self),
            self._modes.entered(),
            torch.enable_grad(),
            _autocast(self._autocast),
            saved_tensors_hooks(capture, differentiated),
        ):
            self._generators.set_states(self._states)
            try:
                out = self._function(*arguments, **named)
            except _EnoughError:
                out = None
            except RuntimeError as error:
                if not self._skipped:
                    raise
                raise PipelineError(
                    f"{self.name} cannot be recomputed without a module within it ({error}); recompute both"
                ) from error
        if any(saved._version != version for saved, version in captured):
            raise PipelineError(f"{self.name} changes in place a tensor that its backward needs")
        if [(saved.shape, saved.dtype) for saved, _ in captured][:wanted] != [kind for _, kind in self._saved]:
            raise PipelineError(f"{self.name} {_OTHERS}")
        for (reference, _), (saved, _) in zip(self._saved, captured, strict=False):
            if (handle := reference()) is not None and handle.value is None:
                handle.fill(saved)
        leaves = pytree.tree_leaves(out)
        for handle, returned, saved_as in outputs:
            handle.fill(returned.again(self.name, leaves, saved_as))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of new tensors, and afterwards what it was before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def unpack(saved: Any) -> Any:
    """Return the tensor that something stands for; anything else as it is."""
    return saved.tensor() if isinstance(saved, Kept | Handle | View | Compressed) else saved


def _as_input(leaf: Tensor, *, needs: bool) -> Tensor:
    """Return a tensor from which to run again, in the same memory with the same strides. A plain one is no leaf:
    autocast's cache would hold the cast of a leaf, and so the tensor, for as long as the caller's autocast goes on.
    """
    own = leaf.detach().requires_grad_(needs)
    if not needs or type(leaf) is not Tensor or leaf.layout is not torch.strided:
        return own
    with torch.enable_grad():
        alias: Tensor = torch.ops.aten.alias(own)  # view_as would change the strides of dimensions of size 1
    return alias


def _autocast_of(tensors: Iterable[Tensor]) -> list[tuple[str, torch.dtype, bool, bool]]:
    """Return what autocast does now on the host, on a GPU that is in use, and on the devices of these tensors."""
    uses_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    kinds = {"cpu", *(tensor.device.type for tensor in tensors)} | ({"cuda"} if uses_cuda else set())
    return [_autocast_on(kind) for kind in sorted(kinds - {"meta"})]


def _autocast_on(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    """Return what autocast does now on this kind of device: its dtype, whether it is on, and whether casts are kept."""
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()


@contextmanager
def _autocast(every: Iterable[tuple[str, torch.dtype, bool, bool]]) -> Iterator[None]:
    """Do within this context what autocast did before."""
    with ExitStack() as contexts:
        for then in every:
            kind, dtype, enabled, cached = then
            if then != _autocast_on(kind):
                contexts.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached))
        yield


def _unpacked(packed: Sequence[Any], needs: Sequence[bool], attributes: Mapping[int, dict[str, Any]]) -> list[Any]:
    """Return the leaves that were packed, tensors with their attributes; the same object is the same tensor."""
    unpacked: dict[int, Any] = {}
    for number, (saved, need) in enumerate(zip(packed, needs, strict=True)):
        if id(saved) not in unpacked:
            leaf = unpack(saved)
            unpacked[id(saved)] = own = _as_input(leaf, needs=need) if isinstance(leaf, Tensor) else leaf
            if number in attributes:
                vars(own).update(attributes[number])
    return [unpacked[id(saved)] for saved in packed]


def _attributes_of(leaves: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Return what is set on tensors, by their numbers. Parameters are given as they are."""
    return {
        number: attributes
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
        and not isinstance(leaf, nn.Parameter)
        and (attributes := attributes_of_tensor(leaf))
    }
