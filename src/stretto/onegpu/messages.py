"""One side of a message between two ranks."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto import cuda

if TYPE_CHECKING:
    from stretto.onegpu.engine import Engine


@dataclass(eq=False, slots=True)
class Message:
    engine: "Engine"
    block: int
    peer: int
    number: int
    sends: bool
    tensor: Tensor | None
    """Kept alive until the message has ended, or until the stream that posted it waits for it: from then on, that
    stream may be given the memory for something else."""
    gpu: int | None = None
    """The index of the tensor's GPU; None on the host."""
    stream: int = 0
    """The driver's handle of the stream that posted the message."""
    deadline: float = math.inf
    """Set when the message is posted to the broker."""
    _ended: bool = False

    def end(self) -> None:
        """Mark a message on the host as ended."""
        self._ended = True

    @property
    def ended(self) -> bool:
        if not self._ended and self.gpu is not None:
            self._ended = self.engine.flags.arrived(self.block) > self.number
        return self._ended

    def wait_on_stream(self) -> None:
        """Make the current stream wait until the message has ended."""
        assert self.gpu is not None
        stream, flags = current_stream(self.gpu), self.engine.flags
        if not self.ended:
            cuda.wait_value(stream, flags.address(flags.done(self.block)), self.number + 1)
        if stream == self.stream:
            self.tensor = None


def current_stream(gpu: int) -> int:
    """Return the driver's handle of the current stream of a GPU; making a Stream object takes longer."""
    return int(torch._C._cuda_getCurrentRawStream(gpu))
