"""Safetensors files as a source: headers are validated at once, tensors are read when needed."""

import contextlib
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import ITEM_BYTES, TensorSpec, is_possible
from stretto.weights.regions import whole
from stretto.weights.sources.shard import Shard, view_of

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
"""The dtypes of safetensors, and PyTorch's names for them."""
INDEX = "model.safetensors.index.json"
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
_READ_BYTES = 1 << 30  # per call; the kernel reads at most 2 GiB in one
_LENGTH_BYTES = 8  # size of the field that holds the length of the header
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TICK = 20_000_000  # nanoseconds within which two writes to a file may get the same timestamp
_SETTLING = 5.0  # seconds to wait for writes to a file to stop


class _HeaderEntry(msgspec.Struct):
    """A tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Identity(NamedTuple):
    """Identifies the file whose header was validated; any write changes it."""

    device: int
    inode: int
    nbytes: int
    written: int
    changed: int

    @staticmethod
    def of(status: os.stat_result) -> "_Identity":
        return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _File:
    """One file, kept open from when its header is validated.

    It is read with `preadv`, never memory-mapped: reading a mapping of a file that was truncated kills the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise WeightsError(f"there is no file {path}")
        try:
            self._file, self.identity = _opened(path)
            weakref.finalize(self, os.close, self._file)
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error}") from None
        self.entries = list(self._entries())

    def held(self) -> Iterator[Shard]:
        for entry, start in self.entries:
            stretch = Stretch(self, start, entry.nbytes)
            yield Shard(entry, whole(entry.shape), partial(stretch.tensor, entry), stretch)

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with bytes from an offset in the file."""
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self._file, [into[done : done + _READ_BYTES]], start + done)
                if not count:
                    raise WeightsError(f"{self.path} was cut to {start + done} bytes while it was read")
                done += count
        except OSError as error:
            raise WeightsError(f"cannot read {self.path}: {error}") from None

    def check(self) -> None:
        """Raise WeightsError if the file has changed since it was opened: its tensors may be of two versions."""
        now = os.fstat(self._file)
        if now.st_size < (before := self.identity.nbytes):
            raise WeightsError(f"{self.path} was cut from {before} to {now.st_size} bytes since it was opened")
        changed = (now.st_size, now.st_mtime_ns) != (self.identity.nbytes, self.identity.written)
        with contextlib.suppress(FileNotFoundError):  # deleted, but still readable through our descriptor
            changed = changed or _Identity.of(os.stat(self.path)) != self.identity
        if changed:
            raise WeightsError(f"{self.path} has changed since it was opened; register it again")

    def _entries(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yield each tensor with its offset, in file order; raise WeightsError if they do not fill the file exactly."""
        path, nbytes = self.path, self.identity.nbytes
        begin, stored = self._header()
        at = 0
        for name, tensor in sorted(stored.items(), key=lambda item: item[1].data_offsets):
            first, last = tensor.data_offsets
            dtype = DTYPES.get(tensor.dtype)
            if dtype is None:
                raise WeightsError(f"{path}: {name} has type {tensor.dtype!r:.40}, which cannot be pushed")
            if not is_possible(tensor.shape):
                raise WeightsError(f"{path}: {name} is {dtype}{list(tensor.shape)}, which no tensor can be")
            size = prod(tensor.shape) * ITEM_BYTES[dtype]
            if last - first != size:
                raise WeightsError(
                    f"{path}: {name} is {dtype}{list(tensor.shape)}, {size} bytes, but has bytes {first} to {last}"
                )
            if first < 0 or begin + last > nbytes:
                raise WeightsError(
                    f"{path}: {name} has bytes {first} to {last}, but the file has {nbytes - begin} of data"
                )
            if first != at:
                wrong = "overlap" if first < at else "leave a gap after"
                raise WeightsError(
                    f"{path}: {name} has bytes {first} to {last}, which {wrong} those before, up to {at}"
                )
            at = last
            yield TensorSpec(name, dtype, tensor.shape), begin + first
        if begin + at != nbytes:
            raise WeightsError(f"{path} ends with {nbytes - begin - at} bytes that are nobody's")

    def _header(self) -> tuple[int, dict[str, _HeaderEntry]]:
        """Return the offset where the data begins, and the tensors by name."""
        path, nbytes = self.path, self.identity.nbytes
        if nbytes < _LENGTH_BYTES:
            raise WeightsError(f"{path} is no safetensors file, or cut short: it has {nbytes} bytes, not even a header")
        length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise WeightsError(f"{path} is no safetensors file: its header would have {length:,} bytes")
        if _LENGTH_BYTES + length > nbytes:
            raise WeightsError(f"{path} is cut short: its header has {length} bytes, and the file {nbytes}")
        text = self._bytes(_LENGTH_BYTES, length)
        try:
            raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            _validate_unique_keys(text)
        except _NOT_JSON as error:
            raise WeightsError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
        raw.pop("__metadata__", None)
        stored = {}
        for name, description in raw.items():
            try:
                stored[name] = msgspec.json.decode(description, type=_HeaderEntry)
            except _NOT_JSON as error:
                raise WeightsError(f"{path}: {name!r:.80} is described wrongly: {error}") from None
        return _LENGTH_BYTES + length, stored

    def _bytes(self, start: int, count: int) -> bytearray:
        data = bytearray(count)
        self.read(start, memoryview(data))
        return data


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of bytes in a file, read when needed."""

    file: _File
    start: int
    nbytes: int

    def split(self, nbytes: int) -> Iterator["Stretch"]:
        """Split into parts of `nbytes` bytes; the last may be shorter."""
        for at in range(0, self.nbytes, nbytes):
            yield Stretch(self.file, self.start + at, min(nbytes, self.nbytes - at))

    def read_into(self, memory: Tensor) -> None:
        self.file.read(self.start, view_of(memory))

    def tensor(self, entry: TensorSpec) -> Tensor:
        """Read all bytes as a tensor."""
        self.file.check()
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
        self.read_into(tensor)
        return tensor


class Safetensors:
    """One safetensors file, several, or a folder: the files that its index names, or all if it has no index.

    The headers of all files are validated at construction; tensors are read when needed. Files may be symbolic links to
    anywhere, as in Hugging Face's cache; an index that names files outside its folder is rejected.
    """

    everywhere = True

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        path_list = [paths] if isinstance(paths, str | os.PathLike) else paths
        files, indexed = [], {}
        for path in map(Path, path_list):
            if path.is_dir():
                folder_files, index = _folder(path)
                files += folder_files
                indexed.update(index)
            else:
                files.append(path)
        if not files:
            raise WeightsError("no safetensors file was given")
        self._files = [_File(path) for path in files]
        self._check_names(indexed)

    def held(self) -> Iterator[Shard]:
        for file in self._files:
            yield from file.held()

    def check(self) -> None:
        """Raise WeightsError if a file has changed since it was opened."""
        for file in self._files:
            file.check()

    @property
    def identity(self) -> str:
        """Equal for two ranks that opened the same, unchanged files on the same machine."""
        return " ".join([_BOOT.read_text().strip(), *(str(tuple(file.identity)) for file in self._files)])

    def _check_names(self, indexed: dict[str, Path]) -> None:
        """Raise WeightsError if a tensor is in two files, or not in the file that the index names."""
        seen: dict[str, Path] = {}
        for file in self._files:
            for entry, _ in file.entries:
                if entry.name in seen:
                    raise WeightsError(f"{entry.name} is in two files: {seen[entry.name]} and {file.path}")
                seen[entry.name] = file.path
        for name, path in indexed.items():
            if seen.get(name) != path:
                raise WeightsError(f"{path.parent / INDEX} says that {name} is in {path.name}, and it is not there")


def _folder(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files of a folder, and the file of each tensor according to its index."""
    index = folder / INDEX
    if not os.path.lexists(index):  # a dangling link is an index that cannot be read, not a missing one
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"there is no safetensors file in {folder}")
        return files, {}
    try:
        text = index.read_bytes()
        names = msgspec.json.decode(text, type=_Index).weight_map
        _validate_unique_keys(text)
    except (OSError, *_NOT_JSON) as error:
        raise WeightsError(f"{index} is no index of safetensors files: {error}") from None
    for name, file in names.items():
        if Path(file).name != file:
            raise WeightsError(f"{index} says that {name} is in {file!r:.80}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise WeightsError(f"{index} says that {name} is in {file}, which does not exist")
    return [folder / file for file in sorted(set(names.values()))], {
        name: folder / file for name, file in names.items()
    }


def _validate_unique_keys(text: bytes | bytearray) -> None:
    """Raise ValueError if any object in a JSON text has a duplicate key: parsers differ in which value they keep."""

    def validate(pairs: list[tuple[str, object]]) -> None:
        if len(dict(pairs)) < len(pairs):
            duplicate, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"{duplicate!r:.80} is there twice")

    json.loads(text, object_pairs_hook=validate)


def _opened(path: Path) -> tuple[int, _Identity]:
    """Open a file once its last write is older than a clock tick, so that any later write changes its timestamp."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    deadline = time.monotonic() + _SETTLING
    while 0 <= time.time_ns() - os.fstat(file).st_ctime_ns < _TICK:
        if time.monotonic() > deadline:
            os.close(file)
            raise WeightsError(f"{path} is being written to: it has changed for {_SETTLING:g} s")
        time.sleep(_TICK / 1e9)
    return file, _Identity.of(os.fstat(file))
