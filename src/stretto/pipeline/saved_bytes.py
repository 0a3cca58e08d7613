"""Counts what a pass of a stage saves for its backward, each storage once."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import Tensor

from stretto.pipeline.memory_report import SiteMemory
from stretto.pipeline.recompute import Run
from stretto.pipeline.step_memory import PartMemory
from stretto.pipeline.storages import WeakStorage, storages_of


class _Saved(NamedTuple):
    """A storage of which something was saved."""

    reference: WeakStorage
    nbytes: int
    labels: dict[str, str]
    """By what becomes of it (keep, recompute, offload), the first site that said so."""
    runs: set[int]
    """The ids of the runs that bring it back."""
    part: int
    """The first part of the pass that saved it."""


class _Deferred(NamedTuple):
    """What the weight gradients of one part wait with."""

    inputs: dict[int, tuple[WeakStorage, int]]
    """Inputs of layers: storages and their bytes."""
    gradients: list[int]
    """The bytes of the gradients of their outputs."""


class SavedBytes:
    """What one pass of a stage saves, as `Saving.noted` and `Deferral.noted` tell it."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._saved: dict[int, _Saved] = {}
        self._labels: dict[str, None] = {}  # in the order in which sites run
        self._deferred: defaultdict[int, _Deferred] = defaultdict(lambda: _Deferred({}, []))  # by part
        self._handed: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by part, storages and their bytes
        self.part = 0
        """The part of the pass that runs now."""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Leave out the memory of these tensors, which others hold anyway."""
        self._held.update(storage._cdata for tensor in tensors for storage in storages_of(tensor))

    def note(self, what: str, label: str, tensor: Tensor, run: Run | None) -> None:
        """Count a tensor that a site saves. `what` is keep, recompute or offload."""
        self._labels.setdefault(label)
        for storage in storages_of(tensor):
            if storage._cdata in self._held:
                continue
            saved = self._saved.get(storage._cdata)
            if saved is None:
                saved = self._saved[storage._cdata] = _Saved(
                    WeakStorage(storage), storage.nbytes(), {}, set(), self.part
                )
            saved.labels.setdefault(what, label)
            if run is not None:
                saved.runs.add(id(run))

    def hand(self, tensors: Iterable[Tensor]) -> None:
        """Note what the part that runs now was given by the one before it."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                if storage._cdata not in self._held:
                    self._handed[self.part - 1][storage._cdata] = storage.nbytes()

    def note_deferred(self, given: Tensor | None, out: Tensor) -> None:
        """Count what a deferred weight gradient needs."""
        deferred = self._deferred[self.part]
        deferred.gradients.append(out.numel() * out.element_size())
        for storage in () if given is None else storages_of(given):
            if storage._cdata not in self._held:
                deferred.inputs[storage._cdata] = WeakStorage(storage), storage.nbytes()

    @property
    def pending(self) -> int:
        """The bytes that deferred weight gradients hold."""
        inputs = {key: nbytes for part in self._deferred.values() for key, (_, nbytes) in part.inputs.items()}
        return sum(inputs.values()) + sum(sum(part.gradients) for part in self._deferred.values())

    def sites(self, leaving: Collection[int]) -> tuple[SiteMemory, ...]:
        """Return the bytes of each site, while the pass is alive. `leaving` are the storages that would leave.

        What one site keeps and another drops, or lets leave, is kept.
        """
        sizes: dict[str, dict[str, int]] = {label: defaultdict(int) for label in self._labels}
        for key, saved in self._saved.items():
            if (what := self._becomes(key, saved, leaving)) is not None:
                kind, label = what
                sizes[label][kind] += saved.nbytes
        sites = [SiteMemory(at, each["keep"], each["recompute"], each["offload"]) for at, each in sizes.items()]
        return tuple(site for site in sites if site.kept or site.recomputed or site.offloaded)

    def brought_back(self) -> int:
        """Return the most bytes that one run brings back, while the pass is alive."""
        runs: dict[int, int] = defaultdict(int)
        for key, saved in self._saved.items():
            what = self._becomes(key, saved, ())
            for run in saved.runs if what is not None and what[0] == "recompute" else ():
                runs[run] += saved.nbytes
        return max(runs.values(), default=0)

    def part_memory(self, part: int, leaving: Collection[int], *, inputs: int, loss: int) -> PartMemory:
        """Return what a part takes, while the pass is alive; `inputs` and `loss` are as in `PartMemory`."""
        kept = left = 0
        runs: dict[int, int] = defaultdict(int)
        again: dict[int, set[int]] = {}  # the runs that bring back each storage
        for key, saved in self._saved.items():
            what = self._becomes(key, saved, leaving) if saved.part == part else None
            if what is None:
                continue
            if what[0] != "recompute":
                kept, left = kept + saved.nbytes, left + saved.nbytes * (what[0] == "offload")
                continue
            again[key] = saved.runs
            for run in saved.runs:
                runs[run] += saved.nbytes
        deferred = self._deferred[part]
        gradients = sum(deferred.gradients)
        # When a site is recomputed, the weight gradients of those after it already wait, some with what these brought
        # back.
        waiting = {key: nbytes for key, (_, nbytes) in deferred.inputs.items() if key in again}
        back = max(
            (
                size + sum(nbytes for key, nbytes in waiting.items() if run not in again[key])
                for run, size in runs.items()
            ),
            default=0,
        )
        return PartMemory(
            saved=kept,
            leaves=left,
            brought_back=back + gradients if back else 0,
            pending=gradients + sum(nbytes for _, nbytes in deferred.inputs.values()),
            inputs=inputs,
            handed=sum(nbytes for key, nbytes in self._handed[part].items() if not self._is_kept(key, part)),
            loss=loss,
        )

    def _is_kept(self, key: int, part: int) -> bool:
        """Return whether a part, or one before it, keeps a storage or lets it leave."""
        saved = self._saved.get(key)
        what = None if saved is None or saved.part > part else self._becomes(key, saved, ())
        return what is not None and what[0] != "recompute"

    def _becomes(self, key: int, saved: _Saved, leaving: Collection[int]) -> tuple[str, str] | None:
        """Return what becomes of a storage and at which site; None if nothing holds it any more."""
        labels = saved.labels
        if not saved.reference.is_gone:
            if "keep" in labels:
                return "keep", labels["keep"]
            if "offload" in labels:
                return "offload" if key in leaving else "keep", labels["offload"]
        return ("recompute", labels["recompute"]) if "recompute" in labels else None
