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
    first: int
    """When it was first saved, in events of the pass. The backward frees it there."""


class _Deferred(NamedTuple):
    """What the weight gradients of one part wait with."""

    inputs: dict[int, tuple[WeakStorage, int]]
    """Inputs of layers: storages and their bytes."""
    gradients: dict[int, int]
    """The bytes of the gradients of their outputs, by the event at which the layer ran."""


class SavedBytes:
    """What one pass of a stage saves, as `Saving.noted` and `Deferral.noted` tell it."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._saved: dict[int, _Saved] = {}
        self._events = 0  # how often something was saved or deferred
        self._last: dict[int, int] = {}  # by the ids of runs, the last event that saves what the run brings back
        self._labels: dict[str, None] = {}  # in the order in which sites run
        self._deferred: defaultdict[int, _Deferred] = defaultdict(lambda: _Deferred({}, {}))  # by part
        # By part, storages, their bytes, and whether the part before it has handed them on, too.
        self._handed: defaultdict[int, dict[int, tuple[int, bool]]] = defaultdict(dict)
        self.part = 0
        """The part of the pass that runs now."""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Leave out the memory of these tensors, which others hold anyway."""
        self._held.update(storage._cdata for tensor in tensors for storage in storages_of(tensor))

    def note(self, what: str, label: str, tensor: Tensor, run: Run | None) -> None:
        """Count a tensor that a site saves. `what` is keep, recompute or offload."""
        self._labels.setdefault(label)
        self._events += 1
        if run is not None:
            self._last[id(run)] = self._events
        for storage in storages_of(tensor):
            if storage._cdata in self._held:
                continue
            saved = self._saved.get(storage._cdata)
            if saved is None:
                saved = self._saved[storage._cdata] = _Saved(
                    WeakStorage(storage), storage.nbytes(), {}, set(), self.part, self._events
                )
            saved.labels.setdefault(what, label)
            if run is not None:
                saved.runs.add(id(run))

    def hand(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note what the part that ran last was given, and what it hands to the next."""
        given = {storage._cdata for tensor in inputs for storage in storages_of(tensor)}
        for tensor in outputs:
            for storage in storages_of(tensor):
                if storage._cdata not in self._held:
                    self._handed[self.part][storage._cdata] = storage.nbytes(), storage._cdata in given

    def note_deferred(self, given: Tensor | None, out: Tensor) -> None:
        """Count what a deferred weight gradient needs."""
        deferred = self._deferred[self.part]
        self._events += 1
        deferred.gradients[self._events] = out.numel() * out.element_size()
        for storage in () if given is None else storages_of(given):
            if storage._cdata not in self._held:
                deferred.inputs[storage._cdata] = WeakStorage(storage), storage.nbytes()

    @property
    def pending(self) -> int:
        """The bytes that deferred weight gradients hold."""
        inputs = {key: nbytes for part in self._deferred.values() for key, (_, nbytes) in part.inputs.items()}
        return sum(inputs.values()) + sum(sum(part.gradients.values()) for part in self._deferred.values())

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
        saved = {key: one for key, one in self._saved.items() if one.part == part}
        becomes = {key: what for key, one in saved.items() if (what := self._becomes(key, one, leaving)) is not None}
        kept = {key: saved[key].nbytes for key, (what, _) in becomes.items() if what != "recompute"}
        deferred = self._deferred[part]
        handed = [entry for key, entry in self._handed[part].items() if not self._is_kept(key, part)]
        return PartMemory(
            saved=sum(kept.values()),
            leaves=sum(nbytes for key, nbytes in kept.items() if becomes[key][0] == "offload"),
            backward=self._most_in_backward(part, {key: saved[key] for key in becomes}, kept) - sum(kept.values()),
            pending=sum(deferred.gradients.values()) + sum(nbytes for _, nbytes in deferred.inputs.values()),
            inputs=inputs,
            handed=sum(nbytes for nbytes, _ in handed),
            passed=sum(nbytes for nbytes, was_given in handed if was_given),
            loss=loss,
        )

    def _most_in_backward(self, part: int, saved: dict[int, _Saved], kept: Collection[int]) -> int:
        """Return the most bytes that the backward of a part holds of what it saved, and for weight gradients.

        It goes through the events in the opposite order. The last one to save what a run brings back has it run. A
        layer that comes after all else waits with the gradient that the backward is given, which counts elsewhere.
        """
        deferred = self._deferred[part]
        again: defaultdict[int, list[int]] = defaultdict(list)  # what is brought back at each event
        freed: defaultdict[int, int] = defaultdict(int)  # how many bytes are freed after each event
        for key, one in saved.items():
            if key not in kept:
                again[max(self._last[run] for run in one.runs)].append(one.nbytes)
            if key not in deferred.inputs:
                freed[one.first] += one.nbytes
        now = most = sum(saved[key].nbytes for key in kept)
        events = sorted({*again, *freed, *deferred.gradients}, reverse=True)
        for event in events:
            now += sum(again[event]) + (deferred.gradients.get(event, 0) if event != events[0] else 0)
            most = max(most, now)
            now -= freed[event]
        return most

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
