"""What an evaluation takes from the outputs of the last layer: the loss, metrics, and the outputs themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.losses import Losses
from stretto.pipeline.microbatches import Microbatches
from stretto.pipeline.pytree import Tree, Value
from stretto.pipeline.recv_buffers import RecvBuffer


class Measures:
    """The loss, metrics and outputs of an evaluation's microbatches on this rank."""

    def __init__(
        self,
        losses: Sequence[Losses],
        microbatches: Microbatches,
        device: torch.device,
        *,
        keeps_outputs: bool,
        is_uneven: bool = False,
    ) -> None:
        """`losses` are the loss and the metrics, none if there are no targets.

        `is_uneven` tells whether pipelines have batches of different sizes.
        """
        self.is_uneven = is_uneven
        self._losses, self._device, self._keeps = losses, device, keeps_outputs
        self._outputs: list[tuple[Tree, list[int]] | None] = [None] * microbatches.count
        self._first = microbatches.first

    @property
    def has_targets(self) -> bool:
        """Whether there are targets, and so a loss, on the ranks that run the last stage."""
        return bool(self._losses)

    def of(self, microbatch: int, rows: int = 0) -> Callable[[Value], Value]:
        """Return a function that measures the output of a microbatch, and returns it if it is to be kept.

        `rows` is the number of rows of its input batch, 0 if unknown.
        """

        def measure(output: Value) -> Value:
            for losses in self._losses:
                losses(output, microbatch, rows)
            return output if self._keeps else None

        return measure

    def keep(self, microbatch: int, output: Tree, buffer: RecvBuffer | None) -> None:
        """Keep what `measure` returned, with copies of tensors that lie in the receive buffer."""
        if not self._keeps:
            return
        kept = output.copied(lambda tensor: not _is_plain(tensor) or (buffer is not None and buffer.holds(tensor)))
        self._outputs[microbatch - self._first] = kept, kept.versions()

    def tables(self) -> list[tuple[str, Tensor]]:
        """Return the table of the loss and of each metric, with its name. Without targets, it is one empty table."""
        if not self._losses:
            return [("", torch.zeros((3, 0), dtype=torch.float64, device=self._device))]
        return [(losses.name, losses.table()) for losses in self._losses]

    def outputs(self) -> list[Value] | None:
        """Return the outputs of this replica's microbatches, if kept; None for those that this rank has not run."""
        if not self._keeps:
            return None
        for microbatch, kept in enumerate(self._outputs, self._first):
            if kept is not None and kept[0].versions() != kept[1]:
                raise PipelineError(
                    f"the output of microbatch {microbatch} was changed in place after the last layer had returned it; "
                    "let the layer return a copy"
                )
        return [None if kept is None else _handed_out(kept[0]) for kept in self._outputs]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be inspected, which a DTensor's or a sparse tensor's cannot."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _handed_out(output: Tree) -> Value:
    """Return an output with its tensors detached, for use on the caller's stream, whichever stream computed them."""
    leaves: list[Any] = []
    for leaf in output.leaves:
        if isinstance(leaf, Tensor) and leaf.is_cuda and _is_plain(leaf):
            leaf.record_stream(torch.cuda.current_stream())
        leaves.append(leaf.detach() if isinstance(leaf, Tensor) else leaf)
    return Tree(leaves, output.spec, output.needs).value()
