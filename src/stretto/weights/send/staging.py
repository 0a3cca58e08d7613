"""A device's buffers in a push."""

from pathlib import Path

import torch
from torch import Tensor

from stretto.program.update import Mode
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.send.choose import buffers


class Staging:
    """One or two buffers that host memory is copied into, and two that receivers see; kept from push to push."""

    def __init__(self, device: torch.device, senders: int) -> None:
        self._device, self._senders = device, senders
        self._shared: SharedBuffers | None = None
        self.h2d: list[Tensor] = []

    @property
    def shared(self) -> SharedBuffers:
        assert self._shared is not None, "no push has fitted it"
        return self._shared

    @property
    def nbytes(self) -> int:
        return 0 if self._shared is None else (2 + len(self.h2d)) * self._shared.nbytes

    def fit(self, bucket_bytes: int, mode: Mode) -> None:
        """Make buffers of this size, unless they are there."""
        count = buffers(self._senders, mode) - 2
        if self._shared is not None and self._shared.nbytes != bucket_bytes:
            self.close()  # receivers open the new ones when they are offered them
        if self._shared is None:
            self._shared = SharedBuffers(bucket_bytes, self._device)
        del self.h2d[count:]
        while len(self.h2d) < count:
            self.h2d.append(torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device))
        if (
            self._device.type == "cuda"
        ):  # what the memory was used for before ends on this stream, and lanes have others
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self.h2d.clear()
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def free_bytes(device: torch.device) -> int:
    """What a device's memory has left."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return unused + torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 40
