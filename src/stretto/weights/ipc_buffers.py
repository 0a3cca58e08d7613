"""Buffers that a sender fills and a receiver reads: device memory or anonymous files."""

import mmap
import os
import re
import weakref
from itertools import count
from typing import Any

import torch
from torch import Tensor

from stretto import cuda
from stretto.ir.errors import WeightsError
from stretto.weights.messages import Buffers
from stretto.wire.memory import sealed_file, validate_sealed

_numbers = count()
_ONE_MACHINE = "sender and receiver must be on one machine"


class SharedBuffers:
    """The sender's end: one allocation, split into equal buffers. No part of it outlives the processes that use it."""

    def __init__(self, nbytes: int, device: torch.device, *, buffers: int = 2) -> None:
        self.nbytes = nbytes
        self._number = next(_numbers)
        self._file = -1
        if device.type == "cuda":
            self.whole = torch.empty(buffers * nbytes, dtype=torch.uint8, device=device)
            self._handle, self._offset = cuda.share(self.whole.data_ptr())  # in this thread, which has a CUDA context
        else:
            self._file = sealed_file("stretto weights", buffers * nbytes)
            try:
                self.whole = torch.frombuffer(mmap.mmap(self._file, buffers * nbytes), dtype=torch.uint8)
            except BaseException:
                os.close(self._file)
                raise
            self._closing = weakref.finalize(self, os.close, self._file)
        self.tensors = torch.split(self.whole, nbytes)

    def described(self, *, local: bool) -> tuple[Buffers, tuple[int, ...]]:
        """Return the message a receiver opens the buffers from, and the file to attach to it.

        `local` says that the receiver is connected by a Unix socket, which can carry a file.
        """
        message = Buffers(self._number, self.nbytes)
        if self._file < 0:
            message.handle, message.offset = self._handle, self._offset
        elif local:
            return message, (self._file,)
        else:
            message.path = f"/proc/{os.getpid()}/fd/{self._file}"
        return message, ()

    def close(self) -> None:
        self.tensors = ()
        del self.whole
        if self._file >= 0:
            self._closing()
            self._file = -1


class OpenedBuffers:
    """The receiver's end of a sender's buffers."""

    def __init__(self, buffers: Buffers, files: list[int], device: torch.device) -> None:
        self.number, self._address, self.tensors = buffers.number, 0, tuple[Tensor, ...]()
        if bool(buffers.handle) != (device.type == "cuda"):
            raise WeightsError(
                f"the sender's buffers are {'on a GPU' if buffers.handle else 'in host memory'}, "
                f"and this receiver is on {device}"
            )
        self._device = device
        if buffers.handle:
            with torch.cuda.device(device):
                torch.zeros((), device=device)  # creates the device's CUDA context in this thread
                try:
                    self._address = cuda.open_shared(buffers.handle)
                except (cuda.DriverError, ValueError) as error:
                    raise WeightsError(f"cannot open the sender's buffers ({error}); {_ONE_MACHINE}") from None
                whole = self._within(buffers, device)
        else:
            whole = self._mapped(buffers, files)
        self.tensors = torch.split(whole, buffers.nbytes)

    def _within(self, buffers: Buffers, device: torch.device) -> Tensor:
        """Return the buffers as a part of the sender's allocation; raise WeightsError if they do not lie inside it."""
        size, needed = cuda.extent(self._address)[1], 2 * buffers.nbytes
        if not 0 <= buffers.offset <= size - needed or needed < 0:
            self.close()
            raise WeightsError(
                f"the sender's buffers are said to be bytes {buffers.offset} to {buffers.offset + needed} of {size}"
            )
        return _tensor_at(self._address + buffers.offset, needed, device)

    def _mapped(self, buffers: Buffers, files: list[int]) -> Tensor:
        file = -1
        try:
            if buffers.path and not re.fullmatch(r"/proc/\d+/fd/\d+", buffers.path):
                raise ValueError(buffers.path)
            file = os.open(buffers.path, os.O_RDWR | os.O_CLOEXEC) if buffers.path else os.dup(files[0])
            validate_sealed(file, 2 * buffers.nbytes)
            return torch.frombuffer(mmap.mmap(file, 2 * buffers.nbytes), dtype=torch.uint8)
        except (OSError, ValueError, IndexError) as error:
            raise WeightsError(f"cannot open the sender's buffers ({error}); {_ONE_MACHINE}") from None
        finally:
            if file >= 0:
                os.close(file)

    def close(self) -> None:
        self.tensors = ()
        if self._address:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream().synchronize()  # a failed update may still be reading
                cuda.close_shared(self._address)
            self._address = 0


def _tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """Return device memory as a tensor."""

    class Memory:
        __cuda_array_interface__: Any = {  # noqa: RUF012
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)


def device_name(device: torch.device) -> str:
    """Return the name by which a sender and a receiver know that they share a device."""
    if device.type != "cuda":
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def resolved(device: torch.device | str | None) -> torch.device:
    """Return a device with its index; by default the current GPU, or the CPU if there is none."""
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")  # not a device; rejected below
    if chosen.type not in ("cpu", "cuda"):
        raise WeightsError(f"weights are pushed on cpu or cuda (got {device!s:.40})")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise WeightsError(f"no GPU is found for {chosen}")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
