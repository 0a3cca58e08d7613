"""What the messages of a step look like, known from an earlier step that began alike: then no message has to say it."""

from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from stretto.runtime.agreement import Agreement
from stretto.runtime.descriptions import Description
from stretto.runtime.structure import PLAIN, Value

_KEPT = 64  # steps that are remembered

Messages = Mapping[int, Description]
"""By the numbers of a rank's transfers."""


class Precedents:
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
        self._agreement.tell({self._ranks: number})

    def find(self) -> Messages | None:
        """The messages of a step that began like this one on all ranks, if there was one."""
        self._now = (self._number, *self._agreement.others(self._ranks).values())
        return self._steps.get(self._now)

    def learn(self, messages: Messages) -> None:
        """What the messages of this step looked like."""
        self._steps[self._now] = messages
        if len(self._steps) > _KEPT:  # on all ranks the same
            del self._steps[next(iter(self._steps))]


def look_of(values: Sequence[Value] | None) -> Hashable | None:
    """All of some values that a layer can see without looking at a tensor's numbers; None if that cannot be told."""
    found: list[Hashable] = []
    for value in values or ():
        leaves, spec = ([value], "") if isinstance(value, Tensor) else _flattened(value)
        found.append(spec)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                found.append(_look_of(leaf))
            elif type(leaf) in PLAIN:
                found.append((type(leaf), leaf))
            else:
                return None
    return tuple(found)


def _flattened(value: Value) -> tuple[list[Value], str]:
    leaves, spec = pytree.tree_flatten(value)
    return leaves, str(spec)


def _look_of(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
