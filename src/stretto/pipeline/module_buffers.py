"""Restores buffers that forwards change, such as running statistics, for a recomputation or after a dry run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.pipeline.contents import Contents
from stretto.pipeline.module_attributes import (
    attributes_of,
    set_attributes,
    set_slots,
    slots_of,
    structure_of,
    tables_of,
)
from stretto.pipeline.pytree import storage_of, version_of

_Place: TypeAlias = tuple[nn.Module, str]
_MOST = 16


@dataclass(slots=True)
class Snapshot:
    """A module's buffers and tensor attributes before a run that may be repeated."""

    copies: dict[_Place, Tensor | None]
    """Copies of the buffers that forwards change; None for one that was None."""
    absent: list[_Place]
    """Buffers that the first run made."""
    others: dict[_Place, tuple[Tensor | None, int]]
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
    structure: list[Any]
    """Submodules, hooks and replaced forwards."""


class ModuleBuffers:
    """The buffers of a module that is recomputed."""

    def __init__(self, name: str, *roots: nn.Module) -> None:
        self._name, self._roots = name, roots
        self._modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._including: dict[tuple[int, ...], ModuleBuffers] = {}
        self._known = set(self._modules)
        self._unread = {(part, key) for part in self._modules for key in getattr(part, "unread_buffers", ())}
        self.is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in self._modules)
        # The buffers that forwards change, by the modes of the modules that have any; unknown before the first run.
        self._changing: dict[tuple[bool, ...], set[_Place]] = {}

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
        attributes = [(module, attributes_of(module)) for module in self._modules]
        contents = Contents(entry for _, table in attributes for entry in table.items())
        held = contents.others and [
            it for it in contents.others if issubclass(type(it), nn.Module) and it not in self._known
        ]
        if held:  # a module in a list of another, say
            with self.including(held).followed() as snapshot:
                yield snapshot
            return
        before = {
            (module, key): (buffer, 0 if buffer is None else buffer._version)
            for module in self._modules
            for key, buffer in _buffers_of(module).items()
        }
        modes = tuple(module.training for module in self._modules if module._buffers)
        first, known = modes not in self._changing, self._changing.get(modes, set())
        copied = known | self._unread
        copies = _copies({place: buffer for place, (buffer, _) in before.items() if first or place in copied})
        others = {place: entry for place, entry in before.items() if place not in copies}
        snapshot = Snapshot(copies, [], others, attributes, contents)
        structure = self._structure()
        yield snapshot
        if self._structure() != structure:
            raise PipelineError(
                f"{self._name} changes its submodules, hooks or forwards when it runs, so it cannot be recomputed"
            )
        for place, (buffer, version) in before.items():
            module, key = place
            now = _buffers_of(module).get(key)
            changed = now is not buffer or (now is not None and now._version != version)
            if first and not changed:  # some operations change a tensor without giving it a new version
                changed = not _are_equal(copies[place], buffer)
            if changed and place not in copies and now is not buffer and (buffer is None or buffer._version == version):
                continue  # it is another one, and the old one is as it was
            if changed and place not in copies:
                raise PipelineError(
                    f"{self._name} changes its buffer {key!r} in some forwards only, so it cannot be recomputed exactly"
                )
            if changed:
                known.add(place)
            elif first and place not in self._unread:
                del copies[place]
                snapshot.others[place] = buffer, version
        for module in self._modules:
            snapshot.absent += [(module, key) for key in _buffers_of(module) if (module, key) not in before]
        self._changing[modes] = known

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        """Run again on the buffers of the snapshot, and discard the changes that this run makes to them."""
        for (_, key), (buffer, version) in snapshot.others.items():
            if buffer is not None and buffer._version != version:
                raise PipelineError(f"the buffer {key!r} of {self._name} was changed before it could be recomputed")
        if (name := snapshot.contents.changed_tensor()) is not None:
            raise PipelineError(f"the attribute {name!r} of {self._name} was changed before it could be recomputed")
        places = (*snapshot.copies, *snapshot.others, *snapshot.absent)
        now = {module: dict(_buffers_of(module)) for module, _ in places}
        then = {module: dict(buffers) for module, buffers in now.items()}
        for (module, key), (buffer, _) in snapshot.others.items():
            then[module][key] = buffer
        for (module, key), copy in _copies(snapshot.copies).items():
            then[module][key] = copy
        for module, key in snapshot.absent:
            then[module].pop(key, None)
        attributes = [(module, attributes_of(module)) for module, _ in snapshot.attributes]
        contents = snapshot.contents.now()
        for module, buffers in then.items():
            _set_buffers(module, buffers)
        for module, table in snapshot.attributes:
            set_attributes(module, table)
        snapshot.contents.restore()
        try:
            yield
        finally:
            for module, buffers in now.items():
                _set_buffers(module, buffers)
            for module, table in attributes:
                set_attributes(module, table)
            contents.restore()

    def marks(self, around: "ModuleBuffers") -> Marks:
        """Return what a run of this module within another could change and the other read."""
        values = self._values(around)
        contents = Contents((key, value) for (_, key), value in values.items())
        return Marks(values, contents, [*self._structure(), *around._structure()])

    def validate_marks(self, before: Marks, around: "ModuleBuffers") -> None:
        """Raise PipelineError if a run of this module within another has changed something since."""
        old, new = before.values, self._values(around)
        replaced = (
            place[1] for place in {**old, **new} if place not in old or place not in new or old[place] is not new[place]
        )
        key = next(replaced, None) or before.contents.changed()
        if key is None and before.structure != [*self._structure(), *around._structure()]:
            raise PipelineError(
                f"{self._name} changes submodules, hooks or forwards when it runs, which {around._name} may run when "
                f"it is recomputed; recompute {self._name} with it"
            )
        if key is not None:
            raise PipelineError(
                f"{self._name} changes {key!r} when it runs, which {around._name} may read when it is recomputed; "
                f"recompute {self._name} with it"
            )

    def _structure(self) -> list[Any]:
        return [structure_of(module) for module in self._modules]

    def _values(self, around: "ModuleBuffers") -> dict[_Place, Any]:
        """Return the buffers and attributes of this module and of another, besides those that nothing reads."""
        unread = self._unread | around._unread
        return {
            (module, key): value
            for module in dict.fromkeys((*self._modules, *around._modules))
            for key, value in (*module._buffers.items(), *attributes_of(module).items())
            if (module, key) not in unread
        }


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's table of buffers, or for a scripted module, whose table is no dict, a copy of it."""
    table: Any = module._buffers
    return table if isinstance(table, dict) else dict(table.items())


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Give a module these buffers, and no others."""
    table: Any = module._buffers
    if isinstance(table, dict):
        table.clear()
        table.update(buffers)
        return
    for key, buffer in buffers.items():  # a scripted module's are always the same
        table[key] = buffer


def _copies(buffers: Mapping[_Place, Tensor | None]) -> dict[_Place, Tensor | None]:
    """Return copies of buffers. Those that share memory do so, too."""
    if not buffers:
        return {}
    plain = {place: buffer for place, buffer in buffers.items() if _is_plain(buffer)}
    sharing = Counter(storage_of(buffer) for buffer in {id(buffer): buffer for buffer in plain.values()}.values())
    copies: dict[int, Tensor] = {}  # by the addresses of buffers
    memories: dict[int, Tensor] = {}  # by the addresses of storages
    for place, buffer in buffers.items():
        if buffer is None or id(buffer) in copies:
            continue
        if place not in plain or sharing[storage_of(buffer)] == 1:
            copies[id(buffer)] = buffer.clone()
            continue
        storage = buffer.untyped_storage()
        if storage._cdata not in memories:
            memories[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage).clone()
        copy: Tensor = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        copy.set_(memories[storage._cdata].untyped_storage(), buffer.storage_offset(), buffer.size(), buffer.stride())
        copies[id(buffer)] = copy.requires_grad_(buffer.requires_grad)
    return {place: None if buffer is None else copies[id(buffer)] for place, buffer in buffers.items()}


def _is_plain(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_conj() and not buffer.is_neg()


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether buffers are equal, as far as that can be told."""
    if one is None or other is None or one.layout is not torch.strided:
        return True
    return torch.equal(one, other)


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo all that happens within this context to attributes, buffers, parameter tables, submodules and hooks of
    modules.

    Tensors keep their identity and get back their contents. Of parameters, only weights of embeddings with `max_norm`
    do, which forwards change; if another was changed, raise PipelineError.
    """
    every = list(modules)
    tables = [table for module in every for table in (vars(module), module._buffers, module._parameters)]
    tables += [table for module in every for table in tables_of(module) if isinstance(table, dict)]
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
                    tensor.copy_(copy)
    for name, parameter, version in parameters:
        if version_of(parameter) != version:
            raise PipelineError(
                f"a forward changes the parameter {name!r} of shape {tuple(parameter.shape)} in place, which a dry run "
                "cannot undo: it stays changed; leave out the dry run, or change parameters outside of forwards"
            )


def _has_max_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
