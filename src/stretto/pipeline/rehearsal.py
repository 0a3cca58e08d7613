"""A stage of a dry run: it runs a forward as in training, and counts what that saves."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from stretto.memory import memory_of
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.losses import OneLoss
from stretto.pipeline.memory_report import StageMemory
from stretto.pipeline.memory_sites import Decisions, find_sites
from stretto.pipeline.offload import Stored, packed_bytes
from stretto.pipeline.pytree import Tree, Value, storage_of, tensors_of
from stretto.pipeline.rng import RngKey
from stretto.pipeline.saved_bytes import SavedBytes
from stretto.pipeline.saving import Saving
from stretto.pipeline.stage import Stage


class _Unsummed(Gradients):
    """The gradients of a stage that has no backwards, and so need not know what is trained."""

    def knows(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True


class Rehearsal(Stage):
    """A stage with the layers and the memory policy of another, which runs one forward where others evaluate."""

    def __init__(self, stage: Stage, microbatch: int, *, leaves: bool, receives: bool) -> None:
        """`leaves` tells whether the program offloads passes of the stage, and `receives` whether others hold its
        input.
        """
        sites = stage._sites
        if sites is None:  # without a policy all stays, and what could leave is counted
            sites = find_sites(Decisions(memory_of("auto")), stage.layers, in_phases=stage._in_phases)
        super().__init__(
            stage.layers,
            stage._anatomy,
            stage.index,
            gradients=_Unsummed(),
            device=stage._device,
            sites=sites,
            memory=stage._memory,
            exchanges=stage._exchanges,
        )
        self.leaving = frozenset([microbatch])
        self._microbatch, self._leaves, self._receives = microbatch, leaves, receives
        self._bytes = SavedBytes()
        self.saving.noted = self._bytes.note
        self.deferral.noted = self._bytes.note_deferred
        self._inputs = self._input_gradients = 0
        self.memory: StageMemory | None = None
        """What the forward has saved, once it has run."""

    @property
    def saving(self) -> Saving:
        assert self._saving is not None
        return self._saving

    @contextmanager
    def running(self, key: RngKey, *, training: bool) -> Iterator[None]:  # noqa: ARG002
        """Run the forward within this context, as in training."""
        self._bytes.hold(self._own_tensors())
        with super().running(key, training=True):
            yield
            self.memory = self._counted()

    def evaluate(
        self, microbatch: int, part: int, inputs: Tree, measure: Callable[[Value], Value] | None = None
    ) -> Tree:
        """Run a part of the forward, with gradients. The last part of the last stage computes a loss if it gets one."""
        if part == 0:
            tensors = tensors_of(inputs.leaves)
            needing = [leaf for leaf, needs in zip(inputs.leaves, inputs.needs, strict=True) if needs]
            self._inputs, self._input_gradients = (
                sum(tensor.numel() * tensor.element_size() for tensor in every) for every in (tensors, needing)
            )
            self._bytes.hold(tensors if self._receives else ())
        loss = measure if isinstance(measure, OneLoss) else None
        return self.forward(microbatch, part, inputs, loss, held=part == 0 and self._receives)

    def _counted(self) -> StageMemory:
        away = self._passes[self._microbatch].saved.away
        assert away is not None
        chosen = self._chosen(away) if self._leaves else []
        every = self._bytes.sites(_storages(away.candidates()))
        return StageMemory(
            stage=self.index,
            sites=self._bytes.sites(_storages(chosen)),
            brought_back=self._bytes.brought_back(),
            pending=self._bytes.pending,
            host=packed_bytes(chosen),
            inputs=self._inputs,
            input_gradients=self._input_gradients,
            may_leave=sum(site.offloaded for site in every),
        )


def _storages(every: Iterable[Stored]) -> set[int]:
    return {storage_of(stored.device) for stored in every if stored.device is not None}
