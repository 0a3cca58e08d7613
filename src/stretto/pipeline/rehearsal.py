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
from stretto.pipeline.step_memory import PartMemory


class _Unsummed(Gradients):
    """The gradients of a stage that has no backwards, and so need not know what is trained."""

    def knows(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True


class Rehearsal(Stage):
    """A stage with the layers and the memory policy of another, which runs one forward where others evaluate."""

    def __init__(self, stage: Stage, microbatch: int, *, leaves: bool, receives: bool, hands_on: bool) -> None:
        """`leaves` tells whether the program offloads passes of the stage, `receives` whether others hold its input,
        and `hands_on` whether the next stage may be on this rank.
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
        self._microbatch, self._leaves, self._receives, self._hands_on = microbatch, leaves, receives, hands_on
        self._bytes = SavedBytes()
        self.saving.noted = self._bytes.note
        self.deferral.noted = self._bytes.note_deferred
        self._inputs, self._gradients_of_inputs, self._loss_gradient = 0, [0] * len(self._functions), 0
        self.memory: StageMemory | None = None
        """What the forward has saved, once it has run."""
        self.parts: list[PartMemory] = []
        """The same part by part."""

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
        needing = [leaf for leaf, needs in zip(inputs.leaves, inputs.needs, strict=True) if needs]
        self._bytes.part, self._gradients_of_inputs[part] = part, _bytes_of(needing)
        tensors = tensors_of(inputs.leaves)
        if part == 0:
            self._inputs = _bytes_of(tensors)
            self._bytes.hold(tensors if self._receives else ())
        loss = measure if isinstance(measure, OneLoss) else None
        out = self.forward(microbatch, part, inputs, loss, held=part == 0 and self._receives)
        if part < len(self._functions) - 1 or self._hands_on:
            self._bytes.hand(tensors, tensors_of(out.leaves))
        return out

    def enter_loss(self, output: Value) -> None:
        """Count what is saved from now on to the loss, which is a function of this output."""
        self.saving.enter("loss")
        self._loss_gradient = _bytes_of(tensor for tensor in tensors_of(output) if tensor.requires_grad)

    def _counted(self) -> StageMemory:
        away = self._passes[self._microbatch].saved.away
        assert away is not None
        chosen = self._chosen(away) if self._leaves else []
        every = self._bytes.sites(_storages(away.candidates()))
        last, leaving = len(self._functions) - 1, _storages(chosen)
        if self.saving.seen is not None:
            self.saving.seen.left = bool(chosen)
        self.parts = [
            self._bytes.part_memory(part, leaving, inputs=inputs, loss=self._loss_gradient if part == last else 0)
            for part, inputs in enumerate(self._gradients_of_inputs)
        ]
        return StageMemory(
            stage=self.index,
            sites=self._bytes.sites(leaving),
            brought_back=self._bytes.brought_back(),
            pending=self._bytes.pending,
            host=packed_bytes(chosen),
            inputs=self._inputs,
            input_gradients=self._gradients_of_inputs[0],
            may_leave=sum(site.offloaded for site in every),
        )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _storages(every: Iterable[Stored]) -> set[int]:
    return {storage_of(stored.device) for stored in every if stored.device is not None}
