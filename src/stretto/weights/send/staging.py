"""The buffers on the device that a push goes through."""

from pathlib import Path

import torch
from torch import Tensor

from stretto.program.update import Mode
from stretto.weights.ipc_buffers import SharedBuffers
from stretto.weights.send.choose import buffers


class Staging:
    """Two buffers shared with receivers and, if there are several senders, one or two for copies from the host.

    They are kept from push to push.
    """

    def __init__(self, device: torch.device, senders: int) -> None:
        self._device, self._senders = device, senders
        self._shared: SharedBuffers | None = None
        self.h2d: list[Tensor] = []

    @property
    def shared(self) -> SharedBuffers:
        assert self._shared is not None, "fit() was not called"
        return self._shared

    @property
    def nbytes(self) -> int:
        return 0 if self._shared is None else (2 + len(self.h2d)) * self._shared.nbytes

    def fit(self, bucket_bytes: int, mode: Mode) -> None:
        """Allocate the buffers for this bucket size and mode, unless they exist already."""
        count = buffers(self._senders, mode) - 2
        if self._shared is not None and self._shared.nbytes != bucket_bytes:
            self.close()  # receivers open the new buffers with the next offer
        if self._shared is None:
            self._shared = SharedBuffers(bucket_bytes, self._device)
        del self.h2d[count:]
        while len(self.h2d) < count:
            self.h2d.append(torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device))
        if self._device.type == "cuda":
            # Earlier uses of this memory end on the current stream, and lanes use other streams.
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self.h2d.clear()
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of a device's memory are free."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return unused + torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 40
