"""What a version of a model consists of: tensors by name, in model order."""

import hashlib
from collections.abc import Iterable
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


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor: its name, type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a version, in model order. Its digest names the version to all who take part in a push.

    >>> manifest = Manifest("step-100", (Entry("a", "bfloat16", (2, 3)), Entry("b", "float32", ())))
    >>> manifest.nbytes, manifest.digest[:8]
    (16, '95f55fc8')
    """

    version: str
    entries: tuple[Entry, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise if this cannot be pushed."""
        seen: set[str] = set()
        for entry in self.entries:
            if entry.dtype not in ITEM_BYTES:
                raise WeightsError(f"{entry.name} has type {entry.dtype!r:.40}, which cannot be pushed")
            if any(size < 0 for size in entry.shape) or entry.nbytes > _LARGEST:
                raise WeightsError(f"{entry.name} has shape {entry.shape}")
            if entry.name in seen:
                raise WeightsError(f"{entry.name} is there twice")
            seen.add(entry.name)


def differences(wanted: Iterable[Entry], manifest: Manifest) -> list[str]:
    """What is wrong with a manifest for somebody who wants these, in words; other tensors in it do not matter."""
    given = {entry.name: entry for entry in manifest.entries}
    found = []
    for entry in wanted:
        there = given.get(entry.name)
        if there is None:
            found.append(f"{entry.name} is missing")
        elif (there.dtype, there.shape) != (entry.dtype, entry.shape):
            found.append(f"{entry.name} is {_typed(there)}, not {_typed(entry)}")
    return found


def _typed(entry: Entry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
