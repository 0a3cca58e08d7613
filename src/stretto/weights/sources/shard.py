"""What a rank holds of a version: parts of tensors, each read when it is needed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stretto.weights.manifest import TensorSpec
from stretto.weights.regions import Region, whole
from stretto.wire.memory import memory_at


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor: the whole tensor's entry, the box of it that is here, and how to get at it."""

    entry: TensorSpec
    box: Region
    read: Callable[[], Tensor]
    """Gives the box as a tensor of the entry's type, on any device, contiguous or not."""
    stored: "Stored | None" = None
    """Where its bytes lie one after the other, if they need not become a tensor first."""

    @staticmethod
    def whole(name: str, tensor: Tensor, read: Callable[[], Tensor] | None = None) -> "Shard":
        """A tensor that is here in full."""
        entry = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return Shard(entry, whole(entry.shape), read or (lambda: tensor))


class Stored(Protocol):
    """Bytes that are read to where they are needed."""

    @property
    def nbytes(self) -> int: ...

    def split(self, nbytes: int) -> Iterable["Stored"]:
        """In parts of this many bytes; the last may have fewer."""

    def read_into(self, memory: Tensor) -> None:
        """All of them into host memory in one piece."""


class Source(Protocol):
    """Where a version comes from.

    It may have `check()`, which raises if it is not what it was when it was asked for what it holds; and, if every rank
    holds all of it, `identity`, a string: two ranks that say the same read the same bytes. Of those that do not, all
    that they read is compared.
    """

    everywhere: bool
    """Whether every rank holds all of it, as with files that all can read; then nothing is exchanged."""

    def held(self) -> Iterable[Shard]:
        """This rank's parts, in model order."""


def flat(tensor: Tensor) -> Tensor:
    """All elements one after the other, where they lie if they lie so."""
    made = tensor.contiguous()
    return made.as_strided((made.numel(),), (1,))  # a view may not be had of one element with an odd stride


def has_memory(tensor: Tensor) -> bool:
    """Whether its values lie in memory; those of fake tensors, and of some wrappers around other tensors, do not."""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == tensor.device.type and (not tensor.numel() or bool(storage.data_ptr()))
    except RuntimeError:
        return False


def view_of(memory: Tensor) -> memoryview:
    """Host memory in one piece, as bytes. A tensor that gives itself to numpy can never be resized again, and it may be
    the user's."""
    return memory_at(memory.data_ptr(), memory.nbytes)


def confirm(source: Source) -> None:
    """Raise if a source is known not to be what it was."""
    if hasattr(source, "check"):
        source.check()


def identity_of(source: Source) -> str:
    """What a source says that it reads, if it can say so."""
    found = getattr(source, "identity", "")
    return found if isinstance(found, str) else ""
