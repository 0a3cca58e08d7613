"""The manifest of a version: the names, types and shapes of its tensors, in model order."""

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
"""The supported dtypes, by PyTorch's names, and the bytes of one element."""
_MAX_BYTES = 1 << 48  # of one tensor


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name, dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a version, in model order.

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
        """A digest of names, dtypes and shapes; versions that differ only in their values share it."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.entries), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise WeightsError if these tensors cannot be pushed."""
        if not self.entries:
            raise WeightsError(f"{self.version} has no tensors")
        for entry in self.entries:
            if entry.dtype not in ITEM_BYTES:
                raise WeightsError(f"{entry.name} has type {entry.dtype!r:.40}, which cannot be pushed")
            if not is_possible(entry.shape):
                raise WeightsError(f"{entry.name} has shape {entry.shape}, which no tensor can have")
        if max(self.sizes) > _MAX_BYTES:
            raise WeightsError(f"{self.entries[self.sizes.index(max(self.sizes))].name} is larger than any memory")
        if len({entry.name for entry in self.entries}) < len(self.entries):
            seen: set[str] = set()
            twice = next(entry.name for entry in self.entries if entry.name in seen or seen.add(entry.name))  # type: ignore[func-returns-value]
            raise WeightsError(f"{twice} is there twice")


def is_text(name: object) -> bool:
    """Return whether a name can be sent: it must be a non-empty string without lone surrogates, which UTF-8 lacks."""
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def is_possible(shape: Sequence[int]) -> bool:
    """Return whether a tensor can have this shape: PyTorch's strides are 64-bit, even for tensors without elements."""
    return all(size >= 0 for size in shape) and prod(max(1, size) for size in shape) < 1 << 63


def differences(expected: Iterable[TensorSpec], manifest: Manifest) -> list[str]:
    """Describe each expected tensor that a manifest lacks or has with another dtype or shape; it may have others."""
    by_name = {entry.name: entry for entry in manifest.entries}
    problems = []
    for entry in expected:
        pushed = by_name.get(entry.name)
        if pushed is None:
            problems.append(f"{entry.name} is not in what is pushed")
        elif (pushed.dtype, pushed.shape) != (entry.dtype, entry.shape):
            problems.append(f"{entry.name} is pushed as {_typed(pushed)}, and {_typed(entry)} is expected")
    return problems


def _typed(entry: TensorSpec) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
