"""Restores buffers that forwards change, such as running statistics, for a recomputation or after a dry run."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.pipeline.contents import Contents
from stretto.pipeline.pytree import version_of

_Place: TypeAlias = tuple[nn.Module, str]
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_MOST = 16


@dataclass(slots=True)
class Snapshot:
    """A module's buffers and tensor attributes before a run that may be repeated."""

    copies: dict[_Place, Tensor]
    """Copies of the buffers that forwards change."""
    others: dict[_Place, tuple[Tensor, int]]
    """Buffers that forwards do not change, with their versions."""
    attributes: list[tuple[nn.Module, dict[str, Any]]]
    """What else is set on each module, such as a weight that a hook computes, or a counter."""
    contents: Contents
    """What these attributes hold."""


class Marks(NamedTuple):
    """What a run could change and something else read."""

    values: dict[_Place, Any]
    """Buffers and attributes."""
    contents: Contents
    """What they hold."""


class ModuleBuffers:
    """The buffers of a module that is recomputed."""

    def __init__(self, name: str, *roots: nn.Module) -> None:
        self._name, self._roots = name, roots
        self._modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._including: dict[tuple[int, ...], ModuleBuffers] = {}
        self._unread = {(part, key) for part in self._modules for key in getattr(part, "unread_buffers", ())}
        self.is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in self._modules)
        self._changing: set[_Place] | None = None  # buffers that forwards change; unknown before the first run

    @property
    def modules(self) -> list[nn.Module]:
        return self._modules

    def including(self, others: Sequence[nn.Module]) -> "ModuleBuffers":
        """Return the buffers of this module and of others that it is given: the same object for the same ones."""
        key = tuple(map(id, others))
        if key not in self._including:
            if len(self._including) > _MOST:  # such as modules that are made anew for each run
                self._including.clear()
            self._including[key] = ModuleBuffers(self._name, *self._roots, *others)
        return self._including[key]

    @contextmanager
    def followed(self) -> Iterator[Snapshot]:
        """Take a snapshot around the first run. It is usable at once, and complete when the run has ended."""
        before = {
            (module, key): (buffer, buffer._version)
            for module in self._modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        attributes = [(module, attributes_of(module)) for module in self._modules]
        contents = Contents(entry for _, table in attributes for entry in table.items())
        first, known = self._changing is None, self._changing or set()
        copied = known | self._unread
        copies = {place: buffer.clone() for place, (buffer, _) in before.items() if first or place in copied}
        others = {place: entry for place, entry in before.items() if place not in copies}
        snapshot = Snapshot(copies, others, attributes, contents)
        yield snapshot
        for place, (buffer, version) in before.items():
            module, key = place
            now = module._buffers.get(key)
            changed = now is not buffer or now._version != version
            if first and not changed:  # some operations change a tensor without giving it a new version
                changed = not torch.equal(copies[place], buffer)
            if changed and place not in copies:
                raise PipelineError(
                    f"{self._name} changes its buffer {key!r} in some forwards only, so it cannot be recomputed exactly"
                )
            if changed:
                known.add(place)
            elif first and place not in self._unread:
                del copies[place]
                snapshot.others[place] = buffer, version
        self._changing = known

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        """Run again on the buffers of the snapshot, and discard the changes that this run makes to them."""
        for (module, key), (buffer, version) in snapshot.others.items():
            if module._buffers.get(key) is not buffer or buffer._version != version:
                raise PipelineError(f"the buffer {key!r} of {self._name} was changed before it could be recomputed")
        if (name := snapshot.contents.changed_tensor()) is not None:
            raise PipelineError(f"the attribute {name!r} of {self._name} was changed before it could be recomputed")
        buffers = {(module, key): module._buffers.get(key) for module, key in snapshot.copies}
        attributes = [(module, attributes_of(module)) for module, _ in snapshot.attributes]
        contents = snapshot.contents.now()
        for (module, key), buffer in snapshot.copies.items():
            module._buffers[key] = buffer.clone()
        for module, table in snapshot.attributes:
            _set_attributes(module, table)
        snapshot.contents.restore()
        try:
            yield
        finally:
            for (module, key), current in buffers.items():
                module._buffers[key] = current
            for module, table in attributes:
                _set_attributes(module, table)
            contents.restore()

    def marks(self, around: "ModuleBuffers") -> Marks:
        """Return what a run of this module within another could change and the other read."""
        values = self._values(around)
        return Marks(values, Contents((key, value) for (_, key), value in values.items()))

    def validate_marks(self, before: Marks, around: "ModuleBuffers") -> None:
        """Raise PipelineError if a run of this module within another has changed something since."""
        old, new = before.values, self._values(around)
        replaced = (
            place[1] for place in {**old, **new} if place not in old or place not in new or old[place] is not new[place]
        )
        key = next(replaced, None) or before.contents.changed()
        if key is not None:
            raise PipelineError(
                f"{self._name} changes {key!r} when it runs, which {around._name} may read when it is recomputed; "
                f"recompute {self._name} with it"
            )

    def _values(self, around: "ModuleBuffers") -> dict[_Place, Any]:
        """Return the buffers and attributes of this module and of another, besides those that nothing reads."""
        unread = self._unread | around._unread
        return {
            (module, key): value
            for module in dict.fromkeys((*self._modules, *around._modules))
            for key, value in (*module._buffers.items(), *attributes_of(module).items())
            if (module, key) not in unread
        }


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return what is set on a module, besides what every module has."""
    return {key: value for key, value in vars(module).items() if key not in _INTERNAL}


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    table = vars(module)
    for key in attributes_of(module).keys() - attributes.keys():
        del table[key]
    table.update(attributes)


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo all that happens within this context to the attributes, buffers and parameter tables of modules.

    Tensors keep their identity and get back their contents. Of parameters, only weights of embeddings with `max_norm`
    do, which forwards change; if another was changed, raise PipelineError.
    """
    every = list(modules)
    tables = [table for module in every for table in (vars(module), module._buffers, module._parameters)]
    before = [dict(table.items()) for table in tables]
    contents = Contents(entry for table in before for entry in table.items())
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
        contents.restore()
        with torch.no_grad():
            for tensor, copy in copies:
                if (
                    type(tensor) not in (Tensor, nn.Parameter)
                    or tensor.layout is not torch.strided
                    or not torch.equal(tensor, copy)
                ):
                    tensor.copy_(copy)
    for name, parameter, version in parameters:
        if version_of(parameter) != version:
            raise PipelineError(
                f"a forward changes the parameter {name!r} of shape {tuple(parameter.shape)} in place, which a dry run "
                "cannot undo: it stays changed; leave out the dry run, or change parameters outside of forwards"
            )


def _has_max_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
