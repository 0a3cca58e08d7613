"""Memory as bytes; and files in memory that processes share, of a size that none of them can change: to read memory
beyond the end of its file ends a process."""

import ctypes
import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_at(address: int, nbytes: int) -> memoryview:
    """So many bytes of this process, whoever they belong to; they must stay there as long as this is used."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def sealed_file(name: str, nbytes: int) -> int:
    """A file of so many bytes, for whoever it is handed to."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def demand_sealed(file: int, nbytes: int) -> None:
    """Raise if it is not such a file."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        raise ValueError("a file that does not lie in memory") from None
    if seals & _SEALS != _SEALS:
        raise ValueError("a file that can be cut while it is used")
    if (size := os.fstat(file).st_size) != nbytes:
        raise ValueError(f"a file of {size} bytes where {nbytes} are needed")
