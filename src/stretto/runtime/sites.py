"""Recompute sites: modules whose output is thrown away after the forward, and computed again for the backward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from stretto.ir.errors import PipelineError
from stretto.runtime.draws import draws
from stretto.runtime.structure import leaves_of, rebuilt, tensors_of

Table = dict[int, tuple[Any, int, "_Site"]]
"""Sites by the storage of their output, each with a weak reference to the storage and the output's version. While that
reference is kept, no other storage can take the place in memory that it is found by.
"""


class Sites:
    """Makes modules discard their output, by an override of their own `forward`.

    Whoever saves the output for a backward saves a handle to its site instead. The first handle that is asked computes
    the output again, with its graph; the site's own backward then runs that graph. So each site is computed twice in
    all, and its output lives only from the first backward that needs it to its own.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._anchor = torch.zeros((), requires_grad=True)
        self._table: Table | None = None
        self.keeps = False
        """Whether what a site's backward has used is let go of only with its graph."""
        for name, module in modules.items():
            if draws(module):
                raise PipelineError(f"{name} draws random numbers and cannot be recomputed")
            module.forward = self._discarding(name, module.forward)

    @contextmanager
    def into(self, table: Table) -> Iterator[None]:
        """Sites discard what they return within, and are remembered in this table."""
        before, self._table = self._table, table
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._table = before

    def _discarding(self, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            if self._table is None or not torch.is_grad_enabled():
                return usual(*arguments, **named)
            given = (arguments, named)
            site = _Site(name, usual, given, [self._pack(leaf) for leaf in leaves_of(given)], self.keeps)
            out = _run(self._anchor, site, *tensors_of(given))
            storage = out.untyped_storage()
            if all(storage._cdata != leaf.untyped_storage()._cdata for leaf in tensors_of(given)):
                alive: Any = StorageWeakRef
                self._table[storage._cdata] = alive(storage), out._version, site
            return out

        return forward

    def _pack(self, saved: Any) -> Any:
        if self._table is None or not isinstance(saved, Tensor):
            return saved
        found = self._table.get(saved.untyped_storage()._cdata)
        if found is None:
            return _Kept(saved)
        alive, version, site = found
        if alive.expired() or saved._version != version or saved.dtype != site.dtype:  # another, or written to since
            return _Kept(saved)
        return _Handle(site, saved.size(), saved.stride(), int(saved.storage_offset()))


class _Kept:
    """A tensor that is saved itself."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise PipelineError("a tensor that the backward needs was changed in place")
        return self._tensor


class _Handle:
    """A tensor that can be had again: how it lay in its site's output."""

    __slots__ = ("_offset", "_site", "_size", "_stride")

    def __init__(self, site: "_Site", size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._site, self._size, self._stride, self._offset = site, size, stride, offset

    def tensor(self) -> Tensor:
        _, out = self._site.again()
        return out.detach().as_strided(self._size, self._stride, self._offset)


def _unpack(saved: Any) -> Any:
    return saved.tensor() if isinstance(saved, _Handle | _Kept) else saved


class _Site:
    """One run of a module: all that it takes to run it again."""

    def __init__(self, name: str, function: Callable[..., Any], given: Any, packed: list[Any], keeps: bool) -> None:
        self.name, self._function = name, function
        self._shape = rebuilt(given, [None] * len(packed))  # the tensors themselves must not be kept
        self._packed: list[Any] | None = packed
        self._keeps = keeps
        self._needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(given)]
        self._again: tuple[list[Any], Tensor] | None = None
        self._device = next((leaf.device for leaf in tensors_of(given)), torch.device("cpu"))
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.dtype: torch.dtype | None = None

    def run(self, leaves: list[Any]) -> Tensor:
        arguments, named = rebuilt(self._shape, leaves)
        out = self._function(*arguments, **named)
        if not isinstance(out, Tensor):
            raise PipelineError(f"{self.name} returns a {type(out).__name__}; what is recomputed returns one tensor")
        self.dtype = out.dtype
        return out

    def first(self, tensors: list[Tensor]) -> Tensor:
        assert self._packed is not None
        found = iter(tensors)
        return self.run([next(found) if isinstance(it, _Kept | _Handle) else it for it in self._packed])

    def again(self) -> tuple[list[Any], Tensor]:
        """The inputs, cut off from what made them, and the output with its graph up to them."""
        if self._again is None:
            if self._packed is None:
                raise PipelineError(f"the output of {self.name} is needed after its own backward; do not recompute it")
            leaves = [_unpack(it) for it in self._packed]
            leaves = [
                leaf.detach().requires_grad_(needs) if isinstance(leaf, Tensor) else leaf
                for leaf, needs in zip(leaves, self._needs, strict=True)
            ]
            enabled, dtype = self._autocast
            with torch.enable_grad(), torch.autocast(self._device.type, dtype, enabled=enabled):
                self._again = leaves, self.run(leaves)
        return self._again

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """The gradients of the tensors given; parameters get theirs."""
        leaves, out = self.again()
        if not self._keeps:
            self._again = self._packed = None
        if out.requires_grad:
            torch.autograd.backward(out, grad, retain_graph=self._keeps)
        return [leaf.grad for leaf in leaves if isinstance(leaf, Tensor)]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, site: _Site, *tensors: Tensor) -> Tensor:  # noqa: ARG004
        ctx.site = site
        return site.first(list(tensors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *ctx.site.backward(grad)


_run: Callable[..., Tensor] = _Run.apply
