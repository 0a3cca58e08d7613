"""Undoes what a dry run does to modules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.pipeline.contents import Contents
from stretto.pipeline.module_attributes import Structure, attributes_of, set_slots, slots_of
from stretto.pipeline.pytree import version_of


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo all that happens within this context to attributes, buffers, parameter tables, submodules and hooks of
    modules.

    Tensors keep their identity and get back their contents. Of parameters, only weights of embeddings with `max_norm`
    do, which forwards change; if another was changed, raise PipelineError.
    """
    every = _with_held(modules)
    structure = Structure(every)
    tables = [table for module in every for table in (vars(module), module._buffers, module._parameters)]
    before = [dict(table.items()) for table in tables]
    slots = [(module, slots_of(module)) for module in every]
    contents = Contents(entry for table in (*before, *(held for _, held in slots)) for entry in table.items())
    normed = {id(module.weight) for module in every if _has_max_norm(module)}
    copies, parameters = [], []
    for name, tensor, version in contents.tensors:
        if isinstance(tensor, nn.Parameter) and id(tensor) not in normed:
            parameters.append((name, tensor, version))
        else:
            copies.append((tensor, tensor.detach().clone()))
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            now = dict(table.items())
            for name in now.keys() - entries.keys():
                del table[name]
            for name, value in entries.items():
                if name not in now or now[name] is not value:
                    table[name] = value
        structure.restore()
        for module, held in slots:
            set_slots(module, held)
        contents.restore()
        with torch.no_grad():
            for tensor, copy in copies:
                if (
                    type(tensor) not in (Tensor, nn.Parameter)
                    or tensor.layout is not torch.strided
                    or not torch.equal(tensor, copy)
                ):
                    _refill(tensor, copy)
    for name, parameter, version in parameters:
        if version_of(parameter) != version:
            raise PipelineError(
                f"a forward changes the parameter {name!r} of shape {tuple(parameter.shape)} in place, which a dry run "
                "cannot undo: it stays changed; leave out the dry run, or change parameters outside of forwards"
            )


def _refill(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor its values again, each place in memory once."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or 0 not in tensor.stride():
        tensor.copy_(values)
        return
    once = tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())
    tensor[once].copy_(values[once])


def _with_held(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules with those that their attributes hold, in lists, say."""
    every: dict[nn.Module, None] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in every:
            continue
        every[module] = None
        waiting += module.children()
        waiting += (it for it in Contents(attributes_of(module).items()).others if issubclass(type(it), nn.Module))
    return list(every)


def _has_max_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
