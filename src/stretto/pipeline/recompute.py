"""Recompute sites: modules that are run again in the backward instead of keeping their activations."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from stretto.ir.errors import PipelineError
from stretto.pipeline.module_buffers import ModuleBuffers, Snapshot
from stretto.pipeline.overrides import Forward, Overrides
from stretto.pipeline.rng import Generators

Table = dict[int, tuple[Any, tuple[Any, ...], "_Run", int]]
"""Maps the address of an output's storage to a weak reference to that storage, the output's version and dtype, the run
that made it, and the output's index. While the weak reference lives, no other storage can reuse the address.
"""


class Sites:
    """Makes modules discard the tensors that their backward needs.

    An operation that saves a tensor inside a site, or saves the site's output, saves a handle instead. The first handle
    that is unpacked runs the module again, once, and fills all handles; each tensor is freed with its handle. Gradients
    flow through the graph of the first run, as if nothing were recomputed, including gradients taken inside a forward.
    """

    def __init__(self, modules: Mapping[str, nn.Module], generators: Generators) -> None:
        self._table: Table | None = None
        self._generators = generators
        self.overrides = Overrides()
        for name, module in modules.items():
            self.overrides.add(module, self._override(name, module))

    @contextmanager
    def into(self, table: Table) -> Iterator[None]:
        """Make sites discard their tensors within this context, and record their runs in `table`."""
        before, self._table = self._table, table
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._table = before

    def _override(self, name: str, module: nn.Module) -> Callable[[Forward | None], Forward]:
        buffers = ModuleBuffers(name, module)

        def make(before: Forward | None) -> Forward:
            def forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
                original = before if before is not None and layer is module else type(layer).forward.__get__(layer)
                if layer is not module or self._table is None or not _can_hook():
                    return original(*arguments, **named)
                return self._discarding(_Run(name, original, buffers, self._generators), (arguments, named))

            return forward

        return make

    def _discarding(self, run: "_Run", inputs: tuple[Any, Any]) -> Any:
        """Run a site for the first time, and record its outputs, except those that share memory with an input."""
        assert self._table is not None
        out = run.first(inputs, self._pack)
        storages = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)}
        for number, leaf in enumerate(pytree.tree_leaves(out)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in storages:
                weak_reference: Any = StorageWeakRef
                storage = leaf.untyped_storage()
                self._table[storage._cdata] = weak_reference(storage), _kind(leaf), run, number
        return out

    def _pack(self, saved: Tensor) -> Any:
        entry = None if self._table is None else self._table.get(saved.untyped_storage()._cdata)
        if entry is None:
            return _Kept(saved)
        reference, kind, run, number = entry
        if reference.expired() or _kind(saved) != kind:  # another tensor, changed since, or viewed as another dtype
            return _Kept(saved)
        return run.handle_of_output(number, saved)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _can_hook() -> bool:
    """Return whether tensors saved now pass through saved-tensor hooks."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Kept:
    """A saved tensor that is kept, not recomputed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise PipelineError("a tensor that the backward needs was changed in place")
        return self._tensor


class _Handle:
    """A saved tensor that can be recomputed. It holds a value from the recomputation until it is unpacked."""

    __slots__ = ("__weakref__", "_run", "value")

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self.value: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.value is None:
            self._run.again()
        value, self.value = self.value, None
        if value is None:
            raise PipelineError(f"{self._run.name} did not save the same tensors when it was recomputed")
        return value


def _unpack(saved: Any) -> Any:
    return saved.tensor() if isinstance(saved, _Handle | _Kept) else saved


class _Run:
    """One run of a module: everything needed to run it again, and the handles to fill then."""

    def __init__(self, name: str, function: Callable[..., Any], buffers: ModuleBuffers, generators: Generators) -> None:
        self.name, self._function, self._buffers, self._generators = name, function, buffers, generators
        self._parameters = buffers.parameters()
        self._saved: list[tuple[weakref.ref[_Handle], tuple[Any, ...]]] = []
        self._outputs: list[tuple[weakref.ref[_Handle], int, tuple[Any, ...]]] = []
        self._snapshot: Snapshot | None = None

    def first(self, inputs: tuple[Any, Any], pack: Callable[[Tensor], Any]) -> Any:
        """Run the module for the first time, saving handles instead of tensors."""
        leaves, self._spec = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = next((leaf.device.type for leaf in tensors), "cpu")
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        packed = {id(leaf): pack(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves}
        self._inputs = [packed[id(leaf)] for leaf in leaves]  # a tensor passed twice is the same object twice
        versions = [leaf._version for leaf in tensors]
        arguments, named = inputs
        self._states = self._generators.kept_states()
        with self._buffers.followed() as self._snapshot, saved_tensors_hooks(self._handle, _unpack):
            out = self._function(*arguments, **named)
        if versions != [leaf._version for leaf in tensors]:
            raise PipelineError(f"{self.name} changes what it is given in place, so it cannot be recomputed")
        return out

    def _handle(self, saved: Tensor) -> _Handle:
        handle = _Handle(self)
        self._saved.append((weakref.ref(handle), (saved.shape, saved.dtype)))
        return handle

    def handle_of_output(self, number: int, saved: Tensor) -> _Handle:
        handle = _Handle(self)
        geometry = saved.size(), saved.stride(), saved.storage_offset()
        self._outputs.append((weakref.ref(handle), number, geometry))
        return handle

    def again(self) -> None:
        """Run the module again, and fill every handle."""
        self._buffers.validate_parameters(self._parameters)
        unpacked: dict[int, Any] = {}
        for packed, needs in zip(self._inputs, self._needs, strict=True):
            if id(packed) not in unpacked:
                leaf = _unpack(packed)
                unpacked[id(packed)] = leaf.detach().requires_grad_(needs) if isinstance(leaf, Tensor) else leaf
        leaves = [unpacked[id(packed)] for packed in self._inputs]
        assert self._snapshot is not None
        arguments, named = pytree.tree_unflatten(leaves, self._spec)
        captured: list[tuple[Tensor, int]] = []

        def capture(saved: Tensor) -> Tensor:
            captured.append((saved, saved._version))
            return saved

        device, dtype, enabled = self._autocast
        with (
            self._generators.kept(),
            self._buffers.restored(self._snapshot),
            torch.enable_grad(),
            torch.autocast(device, dtype, enabled=enabled),
            saved_tensors_hooks(capture, lambda saved: saved),
        ):
            self._generators.set_states(self._states)
            out = self._function(*arguments, **named)
        if any(saved._version != version for saved, version in captured):
            raise PipelineError(f"{self.name} changes in place a tensor that its backward needs")
        if [(saved.shape, saved.dtype) for saved, _ in captured][: len(self._saved)] != [
            kind for _, kind in self._saved
        ]:
            raise PipelineError(f"{self.name} did not save the same tensors when it was recomputed")
        for (reference, _), (saved, _) in zip(self._saved, captured, strict=False):  # the first run may still be going
            if (handle := reference()) is not None:
                handle.value = saved
        outputs = pytree.tree_leaves(out)
        for reference, number, geometry in self._outputs:
            if (handle := reference()) is not None:
                handle.value = outputs[number].detach().as_strided(*geometry)
