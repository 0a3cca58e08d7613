"""Calls of the CUDA driver that PyTorch does not expose: stream memory operations, and memory of other processes."""

import ctypes
from functools import cache
from typing import Any

from stretto.ir.errors import StrettoError

_GEQ = 0  # wait until (value in memory − value), as a signed number, is at least 0
_LAZY_PEER_ACCESS = 1
_PORTABLE_AND_MAPPED = 1 | 2
_BUFFER_ID = 7
HANDLE_BYTES = 64


class DriverError(StrettoError):
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


_ADDRESS, _STREAM, _WORD, _SIZE = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuStreamCreateWithPriority": (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int),
    "cuStreamSynchronize": (_STREAM,),
    "cuStreamWriteValue32_v2": (_STREAM, _ADDRESS, _WORD, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_STREAM, _ADDRESS, _WORD, ctypes.c_uint),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _STREAM),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _ADDRESS),
    "cuMemGetAddressRange_v2": (ctypes.c_void_p, ctypes.c_void_p, _ADDRESS),
    "cuIpcGetMemHandle": (ctypes.c_void_p, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.c_void_p, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemGetInfo_v2": (ctypes.c_void_p, ctypes.c_void_p),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _SIZE, ctypes.c_uint),
    "cuMemHostGetDevicePointer_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
}


@cache
def _function(name: str) -> Any:
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except OSError as error:
        raise DriverError(f"no CUDA driver here: {error}") from None
    function.argtypes = _ARGUMENTS.get(name)
    return function


def _call(name: str, *arguments: Any) -> None:
    status = _function(name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _function("cuGetErrorString")(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def make_streams(device: int, count: int) -> list[int]:
    """Make a device's primary context current, and return new streams in it that do not wait for each other."""
    _call("cuInit", 0)
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    _call("cuCtxSetCurrent", context)
    streams = [ctypes.c_void_p() for _ in range(count)]
    for stream in streams:
        _call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, -5)
    return [stream.value or 0 for stream in streams]


def synchronize(stream: int) -> None:
    """Wait until a stream has run everything queued on it."""
    _call("cuStreamSynchronize", stream)


def write_value(stream: int, address: int, value: int) -> None:
    """Queue a write of a number to memory, after everything before it on the stream is done and visible to all."""
    _call("cuStreamWriteValue32_v2", stream, address, value, 0)


def wait_value(stream: int, address: int, value: int) -> None:
    """Make the stream wait until the number in memory is at least `value`."""
    _call("cuStreamWaitValue32_v2", stream, address, value, _GEQ)


def copy(stream: int, target: int, source: int, count: int) -> None:
    """Queue a copy of `count` bytes within the device."""
    _call("cuMemcpyDtoDAsync_v2", target, source, count, stream)


def buffer_id(address: int) -> int:
    """Return the ID of the allocation that contains an address; this process never gets the same ID twice."""
    number = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, address)
    return number.value


def extent(address: int) -> tuple[int, int]:
    """Return the start and the size in bytes of the allocation that contains an address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


def export(base: int) -> bytes:
    """Return a handle that other processes open an allocation with."""
    handle = _Handle()
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    except DriverError as error:
        raise DriverError(
            f"this memory cannot be shared with other processes ({error}); "
            "if PYTORCH_CUDA_ALLOC_CONF sets expandable_segments, unset it"
        ) from None
    return bytes(handle)


def share(address: int) -> tuple[bytes, int]:
    """Return a handle to the allocation that contains an address, and the address's offset in it."""
    base, _ = extent(address)
    return export(base), address - base


def open_shared(handle: bytes) -> int:
    """Map another process's allocation, and return its address in this process."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_shared(address: int) -> None:
    """Unmap another process's allocation."""
    _call("cuIpcCloseMemHandle", address)


def memory() -> tuple[int, int]:
    """Return how many bytes of the device are free, and how many it has."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def register_host(address: int, count: int) -> int:
    """Map host memory into the device, and return its device address."""
    _call("cuMemHostRegister_v2", address, count, _PORTABLE_AND_MAPPED)
    device = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), address, 0)
    return device.value
