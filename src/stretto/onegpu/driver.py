"""Calls of the CUDA driver that PyTorch has no name for: stream memory operations, memory of other processes."""

import ctypes
from functools import cache
from typing import Any

from stretto.ir.errors import StrettoError

_GEQ = 0  # wait until (value in memory − value), as a signed number, is at least 0
_LAZY_PEER_ACCESS = 1
_PORTABLE_AND_MAPPED = 1 | 2
HANDLE_BYTES = 64


class DriverError(StrettoError):
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver here: {error}") from None


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


class Context:
    """A device, made this process's own."""

    def __init__(self, device: int) -> None:
        _call("cuInit", ctypes.c_uint(0))
        found, context = ctypes.c_int(), ctypes.c_void_p()
        _call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
        _call("cuCtxSetCurrent", context)

    def stream(self) -> int:
        """A stream that waits for no other."""
        made = ctypes.c_void_p()
        _call("cuStreamCreateWithPriority", ctypes.byref(made), ctypes.c_uint(1), ctypes.c_int(-5))
        return made.value or 0


def synchronize(stream: int) -> None:
    """Wait until a stream has nothing left to do."""
    _call("cuStreamSynchronize", _p(stream))


def write_value(stream: int, address: int, value: int) -> None:
    """Write a number once all before it on the stream is done, and seen by all."""
    _call("cuStreamWriteValue32_v2", _p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0))


def wait_value(stream: int, address: int, value: int) -> None:
    """Go no further on the stream until a number has come this far."""
    _call("cuStreamWaitValue32_v2", _p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(_GEQ))


def copy(stream: int, target: int, source: int, count: int) -> None:
    """Copy bytes within the device."""
    _call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(count), _p(stream))


def share(address: int) -> tuple[bytes, int]:
    """A handle by which other processes open the allocation that an address lies in, and how far into it that is."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    handle = _Handle()
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    except DriverError as error:
        raise DriverError(
            f"this memory cannot be shared with other processes ({error}); "
            "if PYTORCH_CUDA_ALLOC_CONF sets expandable_segments, unset it"
        ) from None
    return bytes(handle), address - base.value


def open_shared(handle: bytes) -> int:
    """Where another process's allocation lies in this one."""
    address = ctypes.c_uint64()
    made = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), made, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def register_host(address: int, count: int) -> int:
    """Make host memory known to the device; where it lies there."""
    _call("cuMemHostRegister_v2", _p(address), ctypes.c_size_t(count), ctypes.c_uint(_PORTABLE_AND_MAPPED))
    device = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), _p(address), ctypes.c_uint(0))
    return device.value


def _p(number: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(number)
