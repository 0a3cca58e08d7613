"""Views of raw memory, and sealed memory files that processes share."""

import ctypes
import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a view of this process's memory. The memory must outlive the view."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def sealed_file(name: str, nbytes: int) -> int:
    """Create a memory file of fixed size; return its descriptor.

    Seals fix the size, because reading mapped memory beyond the end of its file kills a process.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def validate_sealed(file: int, nbytes: int) -> None:
    """Raise ValueError unless this is a sealed memory file of `nbytes` bytes."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        raise ValueError("a file that does not lie in memory") from None
    if seals & _SEALS != _SEALS:
        raise ValueError("a file that can be cut while it is used")
    if (size := os.fstat(file).st_size) != nbytes:
        raise ValueError(f"a file of {size} bytes where {nbytes} are needed")
