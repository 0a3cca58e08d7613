"""What a version of a model consists of: tensors by name, in model order."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod

import msgspec

from stretto.ir.errors import WeightsError

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""The types a tensor can have, under PyTorch's names, and the bytes of one element."""
_LARGEST = 1 << 48  # bytes of a tensor


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor: its name, type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a version, in model order. Its digest says to all who take part in a push what is to come.

    >>> manifest = Manifest("step-100", (TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", ())))
    >>> manifest.nbytes, manifest.sizes, manifest.digest[:8]
    (16, [12, 4], 'f3379c3e')
    """

    version: str
    entries: tuple[TensorSpec, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in self.entries]

    @cached_property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @cached_property
    def digest(self) -> str:
        """Of the tensors, so that versions which differ only in what is in them share it."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.entries), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise if this cannot be pushed."""
        if not self.entries:
            raise WeightsError(f"{self.version} has no tensors")
        for entry in self.entries:
            if entry.dtype not in ITEM_BYTES:
                raise WeightsError(f"{entry.name} has type {entry.dtype!r:.40}, which cannot be pushed")
            if not is_possible(entry.shape):
                raise WeightsError(f"{entry.name} has shape {entry.shape}, which no tensor can have")
        if max(self.sizes) > _LARGEST:
            raise WeightsError(f"{self.entries[self.sizes.index(max(self.sizes))].name} is larger than any memory")
        if len({entry.name for entry in self.entries}) < len(self.entries):
            seen: set[str] = set()
            twice = next(it.name for it in self.entries if it.name in seen or seen.add(it.name))  # type: ignore[func-returns-value]
            raise WeightsError(f"{twice} is there twice")


def is_text(name: object) -> bool:
    """Whether it can be sent: Python lets text have halves of characters, which nobody else knows."""
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def is_possible(shape: Sequence[int]) -> bool:
    """Whether a tensor can have it: PyTorch counts strides in 64 bits, also of one that has no elements."""
    return all(size >= 0 for size in shape) and prod(max(1, size) for size in shape) < 1 << 63


def differences(wanted: Iterable[TensorSpec], manifest: Manifest) -> list[str]:
    """What is wrong with a manifest for somebody who wants these, in words; other tensors in it do not matter."""
    given = {entry.name: entry for entry in manifest.entries}
    found = []
    for entry in wanted:
        there = given.get(entry.name)
        if there is None:
            found.append(f"{entry.name} is not in what is pushed")
        elif (there.dtype, there.shape) != (entry.dtype, entry.shape):
            found.append(f"{entry.name} is pushed as {_typed(there)}, and {_typed(entry)} is expected")
    return found


def _typed(entry: TensorSpec) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
