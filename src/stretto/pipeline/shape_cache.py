"""What the messages of a step look like, known from an earlier step that began alike: then no message has to say it."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn

from stretto.pipeline.agreement import Agreement
from stretto.pipeline.descriptions import Description, look_of
from stretto.pipeline.gradients import shape_of
from stretto.pipeline.pytree import Value

_KEPT = 64  # steps that are remembered

Messages = Mapping[int, Description]
"""By the numbers of a rank's transfers."""


class ShapeCache:
    """Steps of one program that have begun differently, and what their messages looked like.

    How a step begins on a rank (what its inputs look like, which parameters are trained, and so on) has a number there.
    At a step's begin all ranks tell each other theirs. If they have been together before, all messages are taken to
    look as they did then, and each sender sees to it that they do; otherwise every message is described.
    """

    def __init__(self, agreement: Agreement, ranks: int) -> None:
        """The agreement is one of all ranks, of which there are so many."""
        self._agreement, self._ranks = agreement, tuple(range(ranks))
        self._numbers: dict[Hashable, int] = {}
        self._count = 0
        self._steps: dict[tuple[int, ...], Messages] = {}  # by all ranks' numbers, this one's first
        self._number = 0
        self._now: tuple[int, ...] = ()

    def begin(self, begin: Hashable | None) -> None:
        """A step begins, with None like no other. All ranks say so together."""
        number = self._numbers.get(begin) if begin is not None else None
        if number is None:
            number, self._count = self._count, self._count + 1
            if begin is not None:
                self._numbers[begin] = number
            if len(self._numbers) > _KEPT:
                del self._numbers[next(iter(self._numbers))]
        self._number = number
        self._agreement.send({self._ranks: number})

    def find(self) -> Messages | None:
        """The messages of a step that began like this one on all ranks, if there was one."""
        self._now = (self._number, *self._agreement.others(self._ranks).values())
        return self._steps.get(self._now)

    def learn(self, messages: Messages) -> None:
        """What the messages of this step looked like."""
        self._steps[self._now] = messages
        if len(self._steps) > _KEPT:  # on all ranks the same
            del self._steps[next(iter(self._steps))]


def begin_of(
    given: tuple[Sequence[Value] | None, Sequence[Value] | None, int],
    module: nn.Module,
    loss: object,
    device: torch.device,
    layout: int | None = None,
) -> Hashable | None:
    """All that decides on this rank, as far as can be seen, what a step's messages look like; None if too little can.

    `given` are inputs, targets and the rows of the batch. Parameters that are trained are known by their `layout`; in
    evaluation there is none, and all are looked at.
    """
    inputs, targets, rows = given
    looks = look_of(inputs), look_of(targets)
    if None in looks:
        return None
    own = loss.modules() if isinstance(loss, nn.Module) else ()
    modes = tuple(part.training for part in (*module.modules(), *own))
    others = [parameter for parameter in module.parameters() if layout is None or not parameter.requires_grad]
    tensors = tuple((tensor.dtype, shape_of(tensor)) for tensor in (*others, *module.buffers()))
    kind = device.type
    types = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_default_dtype()
    return looks, rows, layout, modes, tensors, types
