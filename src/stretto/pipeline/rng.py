"""Random numbers of layers: they depend on the seed, step, layer, phase and microbatch, never on the plan."""

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SIX = struct.Struct("<6q").pack


@dataclass(frozen=True, slots=True)
class RngKey:
    """The part of a random seed that does not depend on the layer, its phase or the microbatch."""

    seed: int = 0
    step: int = 0
    replica: int = 0

    def seed_of(self, layer: int, phase: int, microbatch: int) -> int:
        """Return the seed of the generators for a layer's phase; a layer without phases is phase 0.

        >>> RngKey(seed=1, step=2).seed_of(layer=3, phase=0, microbatch=4)
        20791468449800053
        """
        numbers = _SIX(self.seed, self.step, self.replica, layer, phase, microbatch)
        return int.from_bytes(hashlib.blake2b(numbers, digest_size=7).digest())


class Generators:
    """The default generators of a device: the CPU's, and on CUDA also the device's own."""

    def __init__(self, device: torch.device) -> None:
        self._all: list[torch.Generator] = [torch.default_generator]
        self._last: list[Tensor] | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._all.append(torch.cuda.default_generators[index])

    def seed(self, seed: int) -> None:
        for generator in self._all:
            generator.manual_seed(seed)

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._all]

    def set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state)

    def kept_states(self) -> list[Tensor]:
        """Return the states for long-term storage: the same tensors as last time if nothing has changed."""
        states = self.states()
        if self._last is None or any(not torch.equal(*both) for both in zip(states, self._last, strict=True)):
            self._last = states
        return self._last

    def kept(self) -> "_Kept":
        """Return a context that restores the generators' states at its end."""
        return _Kept(self)


class _Kept:
    """The context of `kept`. A class is cheaper than a generator, and every pass enters it."""

    __slots__ = ("_generators", "_states")

    def __init__(self, generators: Generators) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._states = self._generators.states()

    def __exit__(self, *error: Any) -> None:
        self._generators.set_states(self._states)


@contextmanager
def python_generators_kept() -> Iterator[None]:
    """Restore the states of Python's and NumPy's own generators at the end of this context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
