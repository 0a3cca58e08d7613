"""Shards: the parts of a version's tensors that one rank holds, each read when it is needed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stretto.weights.manifest import TensorSpec
from stretto.weights.regions import Region, whole
from stretto.wire.memory import memory_at


@dataclass(frozen=True, slots=True)
class Shard:
    """A region of a tensor that this rank holds, and the function that reads it."""

    entry: TensorSpec
    """Describes the whole tensor."""
    box: Region
    """The region of the whole tensor that is in this shard."""
    read: Callable[[], Tensor]
    """Returns the region as a tensor of the entry's dtype, on any device, contiguous or not."""
    stored: "Stored | None" = None
    """The contiguous bytes of the shard, if they can be read without making a tensor first."""

    @staticmethod
    def whole(name: str, tensor: Tensor, read: Callable[[], Tensor] | None = None) -> "Shard":
        """Return the shard of a tensor that this rank holds whole."""
        entry = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return Shard(entry, whole(entry.shape), read or (lambda: tensor))


class Stored(Protocol):
    """Bytes that can be read directly into their destination."""

    @property
    def nbytes(self) -> int: ...

    def split(self, nbytes: int) -> Iterable["Stored"]:
        """Split into parts of `nbytes` bytes; the last may be shorter."""

    def read_into(self, memory: Tensor) -> None:
        """Read all bytes into contiguous host memory."""


class Source(Protocol):
    """Where a version comes from.

    A source may have two more members. `check()` raises if the source has changed since `held()` was called. `identity`
    is a string for sources that every rank holds completely: ranks with equal identities read the same bytes; for other
    ranks, everything they read is compared.
    """

    everywhere: bool
    """Whether every rank holds everything, as with files that all ranks can read; then ranks exchange no data."""

    def held(self) -> Iterable[Shard]:
        """Return this rank's shards, in model order."""


def flat(tensor: Tensor) -> Tensor:
    """Return all elements as one dimension, without a copy if they are contiguous."""
    contiguous = tensor.contiguous()
    return contiguous.as_strided((contiguous.numel(),), (1,))  # `view` can fail for one element with an odd stride


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's values are in its own memory; fake tensors and some wrapper subclasses have none."""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == tensor.device.type and (not tensor.numel() or bool(storage.data_ptr()))
    except RuntimeError:
        return False


def view_of(memory: Tensor) -> memoryview:
    """Return contiguous host memory as bytes. Not through numpy: a tensor that was passed to numpy, perhaps the user's,
    can never be resized again."""
    return memory_at(memory.data_ptr(), memory.nbytes)


def confirm(source: Source) -> None:
    """Raise if a source can tell that it has changed."""
    if hasattr(source, "check"):
        source.check()


def identity_of(source: Source) -> str:
    """Return a source's identity, or an empty string if it has none."""
    identity = getattr(source, "identity", "")
    return identity if isinstance(identity, str) else ""
