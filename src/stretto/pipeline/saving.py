"""What becomes of the tensors that a stage's forwards save for its backwards: they stay, are recomputed, or leave."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.ir.errors import PipelineError
from stretto.memory import Action, recomputes, stored_as
from stretto.pipeline.compressed import Compressed, Compression, compressed_bytes, compressible
from stretto.pipeline.contents import Contents
from stretto.pipeline.memory_sites import ModuleSite, Part, PartSites
from stretto.pipeline.module_buffers import ModuleBuffers
from stretto.pipeline.offload import Away, View
from stretto.pipeline.overrides import Forward, Overrides, usual_forward
from stretto.pipeline.pytree import Value, flatten_once, full_name, storage_of, version_of
from stretto.pipeline.recompute import Kept, Run, unpack
from stretto.pipeline.returned import Returned
from stretto.pipeline.rng import Generators
from stretto.pipeline.saved_attributes import warn_of_attributes
from stretto.pipeline.sites_seen import SitesSeen
from stretto.pipeline.storages import WeakStorage

Table = dict[int, tuple[WeakStorage, tuple[Any, ...], Run, Returned, str]]
"""Maps the address of a storage of outputs to a weak reference to that storage, the outputs' version and dtype, the run
that made them, where they are, and the lane. While the weak reference lives, no other storage can reuse the address.
"""


class SavedPass:
    """What is known of the tensors that one pass of a stage has saved."""

    __slots__ = ("_compression", "_device", "_exact", "_held", "_min_bytes", "_references", "_runs", "away", "outputs")

    def __init__(self, device: torch.device, min_bytes: int, held: Collection[int], *, leaves: bool) -> None:
        """Only tensors on this device leave, or are compressed. Those of fewer bytes stay as they are, and so do these
        storages, which others hold. Only with `leaves` does anything leave.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device, self._min_bytes, self._held = device, min_bytes, set(held)
        self._exact: set[int] = set()
        self.outputs: Table = {}
        """Outputs of recomputed modules in the current forward."""
        self.away = Away() if leaves else None
        """What may leave; None if all of the pass stays."""
        self._compression = Compression()
        self._references: list[WeakStorage] = []
        self._runs: list[weakref.ref[Run]] = []

    def add(self, run: Run) -> None:
        """Note a run that the backward may repeat."""
        self._runs.append(weakref.ref(run))

    def end(self) -> None:
        """Let go of all that runs hold: the pass is over, though a graph of it may be kept somewhere."""
        for reference in self._runs:
            if (run := reference()) is not None:
                run.end()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Leave the memory of more tensors as it is."""
        self._held.update(self._addresses(tensors))

    def hold_exact(self, tensors: Iterable[Tensor]) -> None:
        """Store the memory of these tensors as it is, wherever."""
        self._exact.update(self._addresses(tensors))

    def _addresses(self, tensors: Iterable[Tensor]) -> Iterator[int]:
        for tensor in tensors:
            if _has_storage(tensor):
                self._references.append(WeakStorage(tensor.untyped_storage()))  # no other storage gets its address
                yield storage_of(tensor)

    def end_forward(self) -> None:
        """Forget what is needed only while the forward runs."""
        self.outputs.clear()
        self._compression.clear()

    def may_change(self, saved: Tensor) -> bool:
        """Return whether a saved tensor may leave, or be compressed."""
        if type(saved) is not Tensor or saved.is_conj() or saved.is_neg() or saved.is_quantized:
            return False
        if saved.device.type != self._device.type or self._device.index not in (None, saved.device.index):
            return False
        nbytes = saved.untyped_storage().nbytes()
        if nbytes == 0 or nbytes < self._min_bytes or storage_of(saved) in self._held:
            return False
        return not self._is_a_cast(saved)

    def _is_a_cast(self, saved: Tensor) -> bool:
        """Return whether a tensor is a parameter or a part of one, copied or in another dtype, as under autocast."""
        node = saved.grad_fn
        while node is not None and node.name() in _CASTS:
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        return isinstance(variable, nn.Parameter) and storage_of(variable) in self._held

    def compressed(self, saved: Tensor, store: Callable[[Tensor], Any], lane: str) -> Compressed | None:
        """Return what stands for a tensor in float8, or None if it is not stored so. `store` stores its bytes. What
        comes back is memory of the lane that it comes back on, so lanes share none.
        """
        features = 0 if storage_of(saved) in self._exact else compressible(saved)
        if not features:
            return None
        made = self._compression.known(saved, lane)
        if made is None:
            made = Compressed(store(compressed_bytes(saved, features)), saved, features)
            self._compression.remember(saved, lane, made)
        return made


class Saving:
    """Replaces saved tensors by what a memory policy says about the site that saves them.

    While `overrides` is entered, modules tell when they run, and within `into`, tensors are replaced.
    """

    def __init__(self, sites: Mapping[Part, PartSites], generators: Generators) -> None:
        self._sites, self._generators = sites, generators
        self._pass: SavedPass | None = None
        self._part: PartSites | None = None
        self._action: Action = "keep"  # how to store what is saved now
        self._label = ""
        self._pattern = -1  # the number of the pattern that decides about what runs now
        self._first: Run | None = None  # the run that goes on now, for the first time
        self._again: Run | None = None  # the same for a second time
        self.around_second_runs: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes a context for what runs again within a backward."""
        self.noted: Callable[[str, str, Tensor, Run | None], None] | None = None
        """If set, it is told of each tensor that is saved: what becomes of it, the site, the tensor, and which run
        brings it back if it is recomputed."""
        self.seen: SitesSeen | None = SitesSeen()
        """If set, it is told of each site that runs where a policy can act."""
        self.overrides = Overrides()
        modules = {key: site for part in sites.values() for key, site in part.modules.items()}
        for site in modules.values():
            self.overrides.add(site.module, self._override(site))

    @contextmanager
    def into(self, saved: SavedPass) -> Iterator[None]:
        """Replace the tensors that are saved within this context."""
        before = self._pass, self._part
        # The part is known once a layer runs. Modules that run in a backward (a reentrant checkpoint) belong to none.
        self._pass, self._part, self._action = saved, None, "keep"
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._pass, self._part = before

    def run(
        self, part: Part, name: str, function: Callable[[Value], Value], value: Value, buffers: ModuleBuffers
    ) -> Value:
        """Run a layer, or one of its phases."""
        self._part = sites = self._sites[part]
        self._action, self._label, self._pattern = sites.action, sites.label, sites.pattern
        runs = self._pass is not None and _can_hook()
        if self.seen is not None and runs:
            self.seen.patterns.add(sites.pattern)
        if not recomputes(sites.action) or not runs:
            return function(value)
        flatten_once(value, name)
        self._action = stored_as(sites.action)
        return self._dropping(self._run_of(name, function, buffers), (value,), {})

    def enter(self, label: str) -> None:
        """Count what is saved from now on to this site, until a layer runs."""
        self._label = label

    def _override(self, site: ModuleSite) -> Callable[[Forward | None], Forward]:
        buffers = ModuleBuffers(site.name, site.module)

        def make(before: Forward | None) -> Forward:
            def forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
                own = before is not None and layer is site.module
                original = before if own and before is not None else usual_forward(layer)
                if torch.compiler.is_compiling() or layer is not site.module or self._part is None:
                    return original(*arguments, **named)
                here = self._part.modules.get(id(layer))
                runs = (self._again is not None or self._pass is not None) and _can_hook() and _sees_what_is_saved()
                if self.seen is not None and runs:
                    self.seen.note(layer, here, self._part)
                if here is None or not runs:
                    return original(*arguments, **named)
                return self._at(here, original, buffers, arguments, named)

            return forward

        return make

    def _at(
        self, site: ModuleSite, original: Forward, buffers: ModuleBuffers, arguments: tuple[Any, ...], named: Any
    ) -> Any:
        """Run a module as its site says."""
        if self._again is not None:
            return original(*arguments, **named) if recomputes(site.action) else self._again.skipped()
        if site.pattern == self._pattern:
            return original(*arguments, **named)  # it is within a module that runs as the same pattern says
        before = self._action, self._label, self._first, self._pattern
        self._pattern = site.pattern
        try:
            if not recomputes(site.action):
                self._action, self._label, self._first = site.action, site.label, None
                if before[2] is None:
                    return original(*arguments, **named)
                return self._skipping(before[2], site, original, buffers, arguments, named)
            if before[2] is not None:
                return original(*arguments, **named)  # it is recomputed with what is around it
            self._label = site.label
            self._action = self._action if site.action == "recompute" else stored_as(site.action)
            run = self._run_of(site.name, original, buffers)
            out = self._dropping(run, arguments, named)
            self._record_outputs(run, (arguments, named), out)
            return out
        finally:
            self._action, self._label, self._first, self._pattern = before

    def _skipping(
        self, run: Run, site: ModuleSite, original: Forward, buffers: ModuleBuffers, arguments: Any, named: Any
    ) -> Any:
        """Run a module that is not recomputed with what is around it: the second run only gets what it returns."""
        leaves = pytree.tree_leaves((arguments, named))
        given, marks = Contents(("", value) for value in (arguments, named, *leaves)), buffers.marks(run.buffers)
        for other in given.others:
            if not isinstance(other, nn.Module) and not callable(other):
                raise PipelineError(
                    f"{site.name} is given a {full_name(type(other))}, which it may change, so {run.name} cannot be "
                    "recomputed without it; recompute both"
                )
        run.accumulated.validate()
        with saved_tensors_hooks(self._pack, unpack):
            out = original(*arguments, **named)
        run.accumulated.start()  # what it has added is added once
        if given.changed() is not None:
            raise PipelineError(
                f"{site.name} changes what it is given in place, so {run.name} cannot be recomputed without it"
            )
        buffers.validate_marks(marks, run.buffers)
        run.skip(out, self._pack)
        return out

    def _dropping(self, run: Run, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run something for the first time that is recomputed in the backward."""
        before, self._first = self._first, run
        try:
            return run.first(arguments, named, self._pack, lambda saved: self._note("recompute", saved, run))
        finally:
            self._first = before

    def _run_of(self, name: str, function: Callable[..., Any], buffers: ModuleBuffers) -> Run:
        assert self._pass is not None
        run = Run(name, self._label, function, buffers, self._generators, partial(self._repeating, self._part))
        self._pass.add(run)
        return run

    @contextmanager
    def _repeating(self, part: PartSites | None, run: Run) -> Iterator[None]:
        before = self._again, self._part
        self._again, self._part = run, part
        try:
            with self.around_second_runs():
                yield
        finally:
            self._again, self._part = before

    def _record_outputs(self, run: Run, inputs: Any, out: Any) -> None:
        """Let what saves an output of a recomputed module save a handle, unless it shares memory with an input."""
        assert self._pass is not None
        storages = {storage_of(leaf) for leaf in pytree.tree_leaves(inputs) if _has_storage(leaf)}
        leaves = pytree.tree_leaves(out)
        sharing: dict[tuple[int, tuple[Any, ...]], list[int]] = {}
        for number, leaf in enumerate(leaves):
            if _has_storage(leaf) and storage_of(leaf) not in storages:
                sharing.setdefault((storage_of(leaf), _kind(leaf)), []).append(number)
        for (address, kind), numbers in sharing.items():
            storage, returned = leaves[numbers[0]].untyped_storage(), Returned.of(leaves, tuple(numbers))
            self._pass.outputs[address] = WeakStorage(storage), kind, run, returned, self._lane

    @property
    def _lane(self) -> str:
        return "" if self._part is None else self._part.lane

    def _pack(self, saved: Tensor) -> Any:
        warn_of_attributes(saved, self._label)
        if self._pass is None or not _has_storage(saved):
            self._note("keep", saved)
            return Kept(saved, self._label)
        entry = self._pass.outputs.get(storage_of(saved)) if self._pass.outputs else None
        if entry is not None:
            reference, kind, run, returned, lane = entry
            # It may be another tensor, changed since, or viewed as another dtype. What another lane has made is kept,
            # or that lane's work would be repeated on this one.
            if not reference.is_gone and _kind(saved) == kind and lane == self._lane:
                self._note("recompute", saved, run)
                return run.handle_of_output(returned, saved)
        if self._action != "keep" and self._pass.may_change(saved):
            small = self._action.startswith("fp8")
            compressed = self._pass.compressed(saved, self._store, self._lane) if small else None
            if self.seen is not None:
                self.seen.compressed |= compressed is not None
            return self._store(saved) if compressed is None else compressed
        self._note("keep", saved)
        return Kept(saved, self._label)

    _pack.is_ours = True  # type: ignore[attr-defined]

    def _store(self, tensor: Tensor) -> Kept | View:
        """Let a tensor leave or stay, as it is; it may leave, or stands for one that may."""
        assert self._pass is not None
        if self._action.endswith("offload") and self._pass.away is not None:
            self._note("offload", tensor)
            return self._pass.away.view(tensor, self._label)
        self._note("keep", tensor)
        return Kept(tensor, self._label)

    def _note(self, what: str, saved: Tensor, run: Run | None = None) -> None:
        if self.noted is not None:
            self.noted(what, self._label if run is None else run.label, saved, run)


_CASTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("ToCopy", "Clone", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided"),
        *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Expand", "Unsqueeze", "Squeeze", "Diagonal"),
    )
) | {"SqueezeBackward1", "SqueezeBackward2"}
"""Operations of autograd that copy a tensor, cast it, or view it or a part of it."""


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return version_of(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _has_storage(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _sees_what_is_saved() -> bool:
    """Return whether tensors saved now pass through hooks of ours, and not those of a checkpoint within the layer."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "is_ours", False)


def _can_hook() -> bool:
    """Return whether tensors saved now pass through saved-tensor hooks."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )
