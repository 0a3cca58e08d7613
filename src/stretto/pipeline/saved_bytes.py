"""Counts what a pass of a stage saves for its backward, each storage once."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import Tensor

from stretto.pipeline.memory_report import SiteMemory
from stretto.pipeline.recompute import Run
from stretto.pipeline.storages import WeakStorage, storages_of


class _Saved(NamedTuple):
    """A storage of which something was saved."""

    reference: WeakStorage
    nbytes: int
    labels: dict[str, str]
    """By what becomes of it (keep, recompute, offload), the first site that said so."""
    runs: set[int]
    """The ids of the runs that bring it back."""


class SavedBytes:
    """What one pass of a stage saves, as `Saving.noted` and `Deferral.noted` tell it."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._saved: dict[int, _Saved] = {}
        self._labels: dict[str, None] = {}  # in the order in which sites run
        self._pending: dict[int, tuple[WeakStorage, int]] = {}  # inputs of layers that defer their weight gradients
        self._output_gradients = 0

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
                saved = self._saved[storage._cdata] = _Saved(WeakStorage(storage), storage.nbytes(), {}, set())
            saved.labels.setdefault(what, label)
            if run is not None:
                saved.runs.add(id(run))

    def note_deferred(self, given: Tensor | None, out: Tensor) -> None:
        """Count what a deferred weight gradient needs."""
        self._output_gradients += out.numel() * out.element_size()
        for storage in () if given is None else storages_of(given):
            if storage._cdata not in self._held:
                self._pending[storage._cdata] = WeakStorage(storage), storage.nbytes()

    @property
    def pending(self) -> int:
        """The bytes that deferred weight gradients hold."""
        return self._output_gradients + sum(nbytes for _, nbytes in self._pending.values())

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

    def _becomes(self, key: int, saved: _Saved, leaving: Collection[int]) -> tuple[str, str] | None:
        """Return what becomes of a storage and at which site; None if nothing holds it any more."""
        labels = saved.labels
        if not saved.reference.is_gone:
            if "keep" in labels:
                return "keep", labels["keep"]
            if "offload" in labels:
                return "offload" if key in leaving else "keep", labels["offload"]
        return ("recompute", labels["recompute"]) if "recompute" in labels else None
