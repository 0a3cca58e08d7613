"""Gives a recomputed module the buffers and attributes that it had, such as running statistics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stretto.ir.errors import PipelineError
from stretto.pipeline.contents import Contents
from stretto.pipeline.module_attributes import Structure, attributes_of, set_attributes
from stretto.pipeline.pytree import storage_of, version_of

_Place: TypeAlias = tuple[nn.Module, str]
_MOST = 16
_ALIGNED = 16  # bytes of the largest number


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
    structure: Structure | None
    """Submodules, hooks and replaced forwards, if the first run has changed any."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that may run."""
        return [module for module, _ in self.attributes]


class Marks(NamedTuple):
    """What a run could change and something else read."""

    values: dict[_Place, Any]
    """Buffers and attributes."""
    contents: Contents
    """What they hold."""
    structure: Structure
    """Submodules, hooks and replaced forwards."""


class ModuleBuffers:
    """The buffers of a module that is recomputed."""

    def __init__(self, name: str, *roots: nn.Module) -> None:
        self._name, self._roots = name, roots
        self._modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._including: dict[tuple[int, ...], ModuleBuffers] = {}
        self._around: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary(dict.fromkeys(self._modules, True))
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

    def _may_run(self, other: nn.Module) -> bool:
        """Return whether a module that an attribute holds is neither one of these nor around them."""
        if other not in self._around:
            self._around[other] = any(root in self._roots for root in other.modules())
        return not self._around[other]

    @contextmanager
    def followed(self) -> Iterator[Snapshot]:
        """Take a snapshot around the first run. It is usable at once, and complete when the run has ended."""
        attributes = [(module, attributes_of(module)) for module in self._modules]
        contents = Contents(entry for _, table in attributes for entry in table.items())
        held = [it for it in contents.others if issubclass(type(it), nn.Module) and self._may_run(it)]
        if held:  # a module in a list of another, say
            with self.including(held).followed() as snapshot:
                yield snapshot
            return
        before = {
            (module, key): (buffer, 0 if buffer is None else version_of(buffer))
            for module in self._modules
            for key, buffer in _buffers_of(module).items()
        }
        modes = tuple(module.training for module in self._modules if module._buffers)
        first, known = modes not in self._changing, self._changing.get(modes, set())
        copied = known | self._unread
        copies = _copies({place: buffer for place, (buffer, _) in before.items() if first or place in copied})
        others = {place: entry for place, entry in before.items() if place not in copies}
        snapshot = Snapshot(copies, [], others, attributes, contents, None)
        structure = Structure(self._modules)
        yield snapshot
        snapshot.structure = structure if structure.has_changed() else None
        for place, (buffer, version) in before.items():
            module, key = place
            now = _buffers_of(module).get(key)
            changed = now is not buffer or (now is not None and version_of(now) != version)
            if first and not changed:  # some operations change a tensor without giving it a new version
                changed = not _are_equal(copies[place], buffer)
            is_as_before = buffer is None or version_of(buffer) == version
            if changed and place not in copies and now is not buffer and is_as_before:
                continue  # it is another one
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
            if buffer is not None and version_of(buffer) != version:
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
        contents, structure = snapshot.contents.now(), Structure(snapshot.modules)
        if snapshot.structure is not None:
            snapshot.structure.restore()
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
            structure.restore()
            contents.restore()

    def marks(self, around: "ModuleBuffers") -> Marks:
        """Return what a run of this module within another could change and the other read."""
        values = self._values(around)
        contents = Contents((key, value) for (_, key), value in values.items())
        return Marks(values, contents, Structure((*self._modules, *around._modules)))

    def validate_marks(self, before: Marks, around: "ModuleBuffers") -> None:
        """Raise PipelineError if a run of this module within another has changed something since."""
        old, new = before.values, self._values(around)
        replaced = (
            place[1] for place in {**old, **new} if place not in old or place not in new or old[place] is not new[place]
        )
        key = next(replaced, None) or before.contents.changed()
        if key is None and before.structure.has_changed():
            raise PipelineError(
                f"{self._name} changes submodules, hooks or forwards when it runs, which {around._name} may run when "
                f"it is recomputed; recompute {self._name} with it"
            )
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
    distinct = {id(buffer): buffer for buffer in buffers.values() if buffer is not None}
    copies = {key: buffer.clone() for key, buffer in distinct.items() if not _is_plain(buffer)}
    in_memory = sorted((_span(buffer), key) for key, buffer in distinct.items() if key not in copies)
    while in_memory:
        (address, start, end), key = in_memory.pop(0)
        sharing = [key]
        while in_memory and in_memory[0][0][0] == address and in_memory[0][0][1] < end:
            (_, _, other_end), key = in_memory.pop(0)
            sharing, end = [*sharing, key], max(end, other_end)
        if len(sharing) == 1:
            copies[key] = distinct[key].clone()
            continue
        storage = distinct[key].untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start:end].clone()
        for key in sharing:
            buffer = distinct[key]
            copy: Tensor = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
            offset = buffer.storage_offset() - start // buffer.element_size()
            copy.set_(memory.untyped_storage(), offset, buffer.size(), buffer.stride())
            copies[key] = copy.requires_grad_(buffer.requires_grad)
    return {place: None if buffer is None else copies[id(buffer)] for place, buffer in buffers.items()}


def _span(buffer: Tensor) -> tuple[int, int, int]:
    """Return the address of a buffer's storage, and where in it the buffer begins and ends, in bytes. It begins where
    numbers of every size may.
    """
    size, start = buffer.element_size(), int(buffer.storage_offset())
    last = sum((length - 1) * step for length, step in zip(buffer.size(), buffer.stride(), strict=True))
    end = start if buffer.numel() == 0 else start + last + 1
    return storage_of(buffer), start * size // _ALIGNED * _ALIGNED, end * size


def _is_plain(buffer: Tensor) -> bool:
    is_odd = buffer.is_quantized or buffer.is_conj() or buffer.is_neg()
    return type(buffer) is Tensor and buffer.layout is torch.strided and not is_odd


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether buffers are equal, as far as that can be told."""
    if one is None or other is None or one.layout is not torch.strided:
        return True
    try:
        return torch.equal(one, other)
    except RuntimeError:  # PyTorch cannot compare them; so they count as changed
        return False
