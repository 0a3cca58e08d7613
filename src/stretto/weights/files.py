"""Safetensors files as a source: headers checked by hand, tensors read where they lie."""

import contextlib
import mmap
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.boxes import whole
from stretto.weights.held import Held
from stretto.weights.manifest import ITEM_BYTES, Entry

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
"""The types of safetensors, and PyTorch's names for them."""
INDEX = "model.safetensors.index.json"
_LENGTH = 8  # bytes that say how long the header is
_LONGEST = 100_000_000  # bytes of a header, as in the safetensors library
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TICK = 20_000_000  # nanoseconds, within which a file may be written twice with one time
_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}


class _Stored(msgspec.Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Identity(NamedTuple):
    """By which a file is known to be the one whose header was checked."""

    device: int
    inode: int
    nbytes: int
    written: int
    changed: int

    @staticmethod
    def of(status: os.stat_result) -> "_Identity":
        return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _File:
    """One file, mapped into memory from the moment its header is checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise WeightsError(f"there is no file {path}")
        try:
            self.in_memory = _in_memory(path)
            # Memory can be pinned in place only if it is mapped as shared and writable; nobody writes to it.
            pinnable = self.in_memory and os.access(path, os.W_OK)
            self._file, self.identity = _opened(path, pinnable=pinnable)
            weakref.finalize(self, os.close, self._file)
            access = mmap.ACCESS_WRITE if pinnable else mmap.ACCESS_COPY  # a read-only buffer is no tensor
            self._map = mmap.mmap(self._file, self.identity.nbytes, access=access)
        except (OSError, ValueError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from None
        self.entries = list(_entries(path, self._map, self.identity.nbytes))
        self.whole = torch.frombuffer(self._map, dtype=torch.uint8)

    def read(self, entry: Entry, start: int) -> Tensor:
        """A tensor, where it lies."""
        self.check()
        dtype: torch.dtype = getattr(torch, entry.dtype)
        count = prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        if start % ITEM_BYTES[entry.dtype]:  # older files do not align their tensors, and a view must be aligned
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(entry.shape)
        return self.whole[start : start + entry.nbytes].view(dtype).view(entry.shape)

    def check(self) -> None:
        """Raise rather than die of a bus error, or mix two versions."""
        nbytes = self._map.size()
        if nbytes < self.identity.nbytes:
            raise WeightsError(f"{self.path} was cut from {self.identity.nbytes} to {nbytes} bytes since it was opened")
        now = os.fstat(self._file)
        changed = (now.st_size, now.st_mtime_ns) != (self.identity.nbytes, self.identity.written)
        with contextlib.suppress(FileNotFoundError):  # its bytes are still there for us
            changed = changed or _Identity.of(os.stat(self.path)) != self.identity
        if changed:
            raise WeightsError(f"{self.path} has changed since it was opened; register it again")


class Safetensors:
    """A safetensors file, several, or a folder of them: those that its index names, or else all.

    The headers of all files are checked at once, and the files mapped; tensors are read when they are needed, without a
    copy. Files in shared memory (`in_shared_memory`) are mapped so that they can be pinned where they are.
    """

    everywhere = True

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        given = [paths] if isinstance(paths, str | os.PathLike) else paths
        found, places = [], {}
        for path in map(Path, given):
            if path.is_dir():
                files, index = _folder(path)
                found += files
                places.update(index)
            else:
                found.append(path)
        if not found:
            raise WeightsError("no safetensors file was given")
        self._files = [_File(path) for path in found]
        self._check_names(places)
        self.in_shared_memory = all(file.in_memory for file in self._files)
        """Whether all files are on a file system in memory, such as /dev/shm."""

    def held(self) -> Iterator[Held]:
        for file in self._files:
            for entry, start in file.entries:
                yield Held(entry, whole(entry.shape), partial(file.read, entry, start))

    def check(self) -> None:
        """Raise if a file is not what it was."""
        for file in self._files:
            file.check()

    @property
    def identity(self) -> str:
        """Files of one machine with the same of this are the same."""
        return " ".join([_BOOT.read_text().strip(), *(str(tuple(file.identity)) for file in self._files)])

    def maps(self) -> list[Tensor]:
        """Each file's bytes, of which all tensors that are read are parts."""
        return [file.whole for file in self._files]

    def _check_names(self, places: dict[str, Path]) -> None:
        """Every tensor is in one file, and where an index says so."""
        seen: dict[str, Path] = {}
        for file in self._files:
            for entry, _ in file.entries:
                if entry.name in seen:
                    raise WeightsError(f"{entry.name} is in two files: {seen[entry.name]} and {file.path}")
                seen[entry.name] = file.path
        for name, path in places.items():
            if seen.get(name) != path:
                raise WeightsError(f"{path.parent / INDEX} says that {name} is in {path.name}, and it is not there")


def _folder(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of a folder, and where its index says that each tensor is."""
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"there is no safetensors file in {folder}")
        return files, {}
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{index} is no index of safetensors files: {error}") from None
    for name, file in names.items():
        if Path(file).name != file:
            raise WeightsError(f"{index} says that {name} is in {file!r:.80}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise WeightsError(f"{index} says that {name} is in {file}, which does not exist")
    return [folder / file for file in sorted(set(names.values()))], {
        name: folder / file for name, file in names.items()
    }


def _opened(path: Path, *, pinnable: bool) -> tuple[int, _Identity]:
    """A file that nobody writes to this very moment: what is written after this has another time."""
    file = os.open(path, (os.O_RDWR if pinnable else os.O_RDONLY) | os.O_CLOEXEC)
    while 0 <= time.time_ns() - os.fstat(file).st_ctime_ns < _TICK:
        time.sleep(_TICK / 1e9)
    return file, _Identity.of(os.fstat(file))


def _entries(path: Path, data: mmap.mmap, nbytes: int) -> Iterator[tuple[Entry, int]]:
    """The tensors of a file by their place in it, each with where it starts. Together they fill the file."""
    begin, stored = _header(path, data, nbytes)
    at = 0
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].data_offsets):
        first, last = tensor.data_offsets
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise WeightsError(f"{path}: {name} has type {tensor.dtype!r:.40}, which cannot be pushed")
        size = prod(tensor.shape) * ITEM_BYTES[dtype]
        if any(length < 0 for length in tensor.shape) or last - first != size:
            raise WeightsError(
                f"{path}: {name} is {dtype}{list(tensor.shape)}, {size} bytes, but has bytes {first} to {last}"
            )
        if first < 0 or begin + last > nbytes:
            raise WeightsError(f"{path}: {name} has bytes {first} to {last}, but the file has {nbytes - begin} of data")
        if first != at:
            wrong = "overlap" if first < at else "leave a gap after"
            raise WeightsError(f"{path}: {name} has bytes {first} to {last}, which {wrong} those before, up to {at}")
        at = last
        yield Entry(name, dtype, tensor.shape), begin + first
    if begin + at != nbytes:
        raise WeightsError(f"{path} ends with {nbytes - begin - at} bytes that are nobody's")


def _header(path: Path, data: mmap.mmap, nbytes: int) -> tuple[int, dict[str, _Stored]]:
    """Where the data begins, and the tensors in it."""
    if nbytes < _LENGTH:
        raise WeightsError(f"{path} is cut short: it has {nbytes} bytes, not even a header")
    length = int.from_bytes(data[:_LENGTH], "little")
    if length > _LONGEST:
        raise WeightsError(f"{path} is no safetensors file: its header would have {length:,} bytes")
    if _LENGTH + length > nbytes:
        raise WeightsError(f"{path} is cut short: its header has {length} bytes, and the file {nbytes}")
    try:
        raw = msgspec.json.decode(data[_LENGTH : _LENGTH + length], type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
    raw.pop("__metadata__", None)
    stored = {}
    for name, text in raw.items():
        try:
            stored[name] = msgspec.json.decode(text, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightsError(f"{path}: {name!r:.80} is described wrongly: {error}") from None
    return _LENGTH + length, stored


def _in_memory(path: Path) -> bool:
    """Whether a file is on a file system in memory."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = (line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == number)
    return next(kinds, "") in _MEMORY
