"""Remembers the message shapes of earlier steps, so that a step that begins alike sends no descriptions."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import nn

from stretto.pipeline.agreement import Agreement
from stretto.pipeline.descriptions import Description, look_of
from stretto.pipeline.gradients import shape_of
from stretto.pipeline.pytree import Value

_CAPACITY = 64  # steps
_MOST_ROWS = 2**32 - 1

Messages = Mapping[int, Description]
"""The description of each message, by the number of the rank's transfer."""


class ShapeCache:
    """The message descriptions of one program's steps, by how each step began.

    Each rank numbers the ways in which its steps begin (shapes of inputs, which parameters are trained, and so on). At
    the start of a step all ranks exchange these numbers. If the same combination occurred before, every message is
    assumed to look as it did then, and each sender verifies that; otherwise every message carries its description.
    """

    def __init__(self, agreement: Agreement, ranks: int, pipeline: Iterable[int], *, remembers: bool = True) -> None:
        """`agreement` covers all ranks; `ranks` is their number, and `pipeline` are those that exchange messages.

        Unless it `remembers`, no step matches another, and ranks only make sure that all begin the same one.
        """
        self._agreement, self._ranks = agreement, tuple(range(ranks))
        self._pipeline, self._remembers = frozenset(pipeline), remembers
        self.rows: dict[int, int] = {}
        """The rows that other ranks, and this one (by −1), have sent with their numbers, if any."""
        self._numbers: dict[Hashable, int] = {}
        self._count = 0
        self._steps: dict[tuple[int, ...], Messages] = {}  # by the numbers of all ranks, this rank's first
        self._number = self._rows = 0
        self._now: tuple[int, ...] = ()

    def begin(self, begin: Hashable | None, rows: int = 0) -> None:
        """Send this step's number to the other ranks. With None, the step matches no other. All ranks call this."""
        begin = begin if self._remembers else None
        number = self._numbers.get(begin) if begin is not None else None
        if number is None:
            number, self._count = self._count, self._count + 1
            if begin is not None:
                self._numbers[begin] = number
            if len(self._numbers) > _CAPACITY:
                del self._numbers[next(iter(self._numbers))]
        self._number, self._rows = number, rows
        self._agreement.send({self._ranks: number << 32 | min(rows, _MOST_ROWS)})

    def find(self) -> Messages | None:
        """Return the messages of an earlier step that began like this one on all ranks, or None."""
        others = self._agreement.others(self._ranks)
        self._now = (self._number, *(sent >> 32 for peer, sent in others.items() if peer in self._pipeline))
        rows = {-1: self._rows, **{peer: sent & _MOST_ROWS for peer, sent in others.items()}}
        self.rows = {rank: count for rank, count in rows.items() if count}
        return self._steps.get(self._now) if self._remembers else None

    def learn(self, messages: Messages) -> None:
        """Store the descriptions of this step's messages."""
        if not self._remembers:
            return
        self._steps[self._now] = messages
        if len(self._steps) > _CAPACITY:  # evicts the same step on all ranks
            del self._steps[next(iter(self._steps))]


def begin_of(
    batch: tuple[Sequence[Value] | None, Sequence[Value] | None, int],
    module: nn.Module,
    loss: object,
    device: torch.device,
    layout: int | None = None,
) -> Hashable | None:
    """Return a key of everything visible on this rank that decides the shapes of a step's messages.

    Return None if inputs or targets cannot be described. `batch` holds the inputs, the targets and the number of rows.
    `layout` identifies the trained parameters; in evaluation it is None, and the key covers every parameter.
    """
    inputs, targets, rows = batch
    looks = look_of(inputs), look_of(targets)
    if None in looks:
        return None
    loss_modules = loss.modules() if isinstance(loss, nn.Module) else ()
    modes = tuple(part.training for part in (*module.modules(), *loss_modules))
    others = [parameter for parameter in module.parameters() if layout is None or not parameter.requires_grad]
    tensors = tuple((tensor.dtype, shape_of(tensor)) for tensor in (*others, *module.buffers()))
    kind = device.type
    types = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_default_dtype()
    return looks, rows, layout, modes, tensors, types
