"""What a rank holds of a version: parts of tensors, each read when it is needed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stretto.weights.boxes import Box, whole
from stretto.weights.manifest import Entry


@dataclass(frozen=True, slots=True)
class Held:
    """A part of a tensor: the whole tensor's entry, the box of it that is here, and how to get at it."""

    entry: Entry
    box: Box
    read: Callable[[], Tensor]
    """Gives the box as a tensor of the entry's type, on any device, contiguous or not."""

    @staticmethod
    def whole(name: str, tensor: Tensor, read: Callable[[], Tensor] | None = None) -> "Held":
        """A tensor that is here in full."""
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return Held(entry, whole(entry.shape), read or (lambda: tensor))


class Source(Protocol):
    """Where a version comes from.

    It may have `check()`, which raises if it is not what it was when it was asked for what it holds; and, if every rank
    holds all of it, `identity`, a string: two ranks that say the same read the same bytes. Of those that do not, all
    that they read is compared.
    """

    everywhere: bool
    """Whether every rank holds all of it, as with files that all can read; then nothing is exchanged."""

    def held(self) -> Iterable[Held]:
        """This rank's parts, in model order."""


def flat(tensor: Tensor) -> Tensor:
    """All elements one after the other, where they lie if they lie so."""
    made = tensor.contiguous()
    return made.as_strided((made.numel(),), (1,))  # a view may not be had of one element with an odd stride


def confirm(source: Source) -> None:
    """Raise if a source is known not to be what it was."""
    if hasattr(source, "check"):
        source.check()


def identity_of(source: Source) -> str:
    """What a source says that it reads, if it can say so."""
    found = getattr(source, "identity", "")
    return found if isinstance(found, str) else ""
