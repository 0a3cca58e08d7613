"""Random numbers of layers that draw some: they depend on the layer, the microbatch and the step, never on the plan."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Draw:
    """What the random numbers of a layer depend on, besides the layer and the microbatch."""

    run: int = 0
    step: int = 0
    replica: int = 0

    @contextmanager
    def seeded(self, layer: int, microbatch: int) -> Iterator[None]:
        """Random numbers of this layer and microbatch within, and as if nothing had been drawn after."""
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            torch.manual_seed(self.seed(layer, microbatch))
            yield

    def seed(self, layer: int, microbatch: int) -> int:
        text = f"{self.run} {self.step} {layer} {microbatch} {self.replica}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def draws(layer: nn.Module) -> bool:
    """Whether a layer draws random numbers in its forward."""
    return any(
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
        or getattr(module, "draws", False)
        for module in layer.modules()
    )
