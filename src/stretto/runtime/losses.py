"""The losses of a step: of each microbatch, and of all."""

from collections.abc import Callable
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.runtime.structure import Value


class Losses:
    """Those of a step's microbatches on this rank."""

    def __init__(self, function: Callable[[Value, Value], Any], targets: list[Value] | None, microbatches: int) -> None:
        self._function, self._targets, self._microbatches = function, targets, microbatches
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._seed: Tensor | None = None

    def __call__(self, output: Value, microbatch: int) -> Tensor:
        assert self._targets is not None
        loss = self._function(output, self._targets[microbatch])
        if isinstance(loss, tuple):
            loss, count = loss
            self._counts[microbatch] = torch.as_tensor(count, device=loss.device)
        self._losses[microbatch] = loss.detach()
        return loss  # type: ignore[no-any-return]

    @property
    def here(self) -> bool:
        """Whether any of them are this rank's."""
        return bool(self._losses)

    @property
    def counted(self) -> bool:
        """Whether the loss gives a sum and a count; gradients are then divided by the step's total."""
        return bool(self._counts)

    def seed(self, microbatch: int) -> Tensor:
        """The gradient that a microbatch's backward begins with."""
        if self._seed is None:
            loss = self._losses[microbatch]
            self._seed = torch.full_like(loss, 1.0 if self.counted else 1 / self._microbatches)
        return self._seed

    def table(self, device: torch.device) -> Tensor:
        """A row of losses and one of counts, by microbatch, and one that tells whether they were counted; zero for
        those of other ranks, so that all ranks' add up.
        """
        table = torch.zeros(3, self._microbatches, dtype=torch.float64, device=device)
        for microbatch, loss in self._losses.items():
            table[0, microbatch] = loss
            table[1, microbatch] = self._counts.get(microbatch, 1.0)
            table[2, microbatch] = float(self.counted)
        return table


class Total:
    """The losses of all ranks: the sum of their tables, once `wait` has returned."""

    def __init__(self, table: Tensor, wait: Callable[[], None]) -> None:
        self._table, self._wait, self._known = table, wait, False

    def wait(self) -> None:
        """Until it is known."""
        if not self._known:
            self._wait()
            self._known = True

    @property
    def counted(self) -> bool:
        self.wait()
        return bool(self._table[2].any())

    def count(self) -> Tensor:
        """All that was counted."""
        self.wait()
        return self._table[1].sum()

    @cached_property
    def mean(self) -> float:
        """Over the microbatches, or over all that was counted."""
        self.wait()
        losses, counts, _ = self._table.tolist()
        for microbatch, loss in enumerate(losses):
            if not isfinite(loss):
                raise PipelineError(f"the loss of microbatch {microbatch} is not finite")
        return float(sum(losses) / sum(counts))
