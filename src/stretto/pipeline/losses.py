"""The losses of a step: per microbatch on this rank, and their total over all ranks."""

from collections.abc import Callable
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError
from stretto.pipeline.pytree import Value, entering

_LOSS, _COUNT, _COUNTED = range(3)  # the rows of a table


class Losses:
    """The losses of a step's microbatches on this rank."""

    def __init__(
        self,
        function: Callable[[Value, Value], Any],
        targets: list[Value] | None,
        microbatches: int,
        device: torch.device,
        rows: int = 0,
    ) -> None:
        """`rows` is the batch size of targets passed as one batch, else 0."""
        self._function, self.targets, self._microbatches = function, targets, microbatches
        self._rows = rows
        self._device = device
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._depends = False
        self.cut: dict[int, tuple[Tensor, Tensor]] = {}
        """Targets that require gradients, each with the detached tensor that the loss gets instead."""

    def __call__(self, output: Value, microbatch: int, rows: int = 0) -> Tensor:
        """Compute the loss of a microbatch. `rows` is the number of rows of its input batch, 0 if unknown."""
        assert self.targets is not None
        if rows and self._rows and rows != self._rows:
            raise PipelineError(f"inputs have {rows} rows, but targets have {self._rows}; give as many of both")
        result = self._function(output, self._cut_off(self.targets[microbatch]))
        loss, count = (result, None) if not isinstance(result, tuple) else result if len(result) == 2 else (None, None)
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
            raise PipelineError(
                f"the loss of microbatch {microbatch} is {_in_words(result)}; it must be one real number as a tensor, "
                "or a tuple of a sum and a count"
            )
        self._depends = self._depends or loss.requires_grad
        if self._losses and self.counted != (count is not None):
            raise PipelineError(_MIXED)
        self._losses[microbatch] = loss.detach().clone()  # the loss function may reuse the memory of its result
        if count is not None:
            self._counts[microbatch] = _number(count, microbatch, loss.device)
        return loss

    def of(self, microbatch: int, rows: int = 0) -> "OneLoss":
        return OneLoss(self, microbatch, rows)

    def _cut_off(self, target: Value) -> Value:
        """Detach a target from its graph. The graph's backward runs once, at the end of the step."""
        tree, leaves = entering(target)
        for detached, leaf, needs in zip(tree.leaves, leaves or tree.leaves, tree.needs, strict=True):
            if needs:
                self.cut[id(detached)] = leaf, detached.requires_grad_()
        return tree.value()

    @property
    def has_any(self) -> bool:
        """Whether this rank has computed any losses."""
        return bool(self._losses)

    @property
    def counted(self) -> bool:
        """Whether the loss function returns a sum and a count; gradients are then divided by the step's total count."""
        return bool(self._counts)

    def validate_graph(self) -> None:
        """Raise PipelineError if the step trains nothing, as PyTorch's `backward` does."""
        if self.has_any and not self._depends:
            raise PipelineError("no loss of this step depends on a parameter that requires gradients")

    def seed(self, loss: Tensor) -> Tensor:
        """Return the gradient with which a microbatch's backward begins."""
        return torch.full_like(loss, 1.0 if self.counted else 1 / self._microbatches)

    def table(self) -> Tensor:
        """Return three rows by microbatch: losses, counts, and whether the loss was counted.

        Microbatches of other ranks are zero, so that the sum of all ranks' tables is complete.
        """
        if not self._losses:
            return torch.zeros((3, self._microbatches), dtype=torch.float64, device=self._device)
        ones = dict.fromkeys(self._losses, torch.ones((), device=self._device))
        rows = (self._losses, self._counts or ones, ones if self._counts else {})
        return torch.stack([self._row(row) for row in rows])

    def _row(self, numbers: dict[int, Tensor]) -> Tensor:
        """Return the numbers of all microbatches in float64, cast with one kernel if all share a dtype."""
        if len({(number.dtype, number.device) for number in numbers.values()}) != 1:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            numbers = {microbatch: number.to(zero) for microbatch, number in numbers.items()}
        else:
            zero = torch.zeros_like(next(iter(numbers.values())).reshape(()))
        row = [numbers.get(microbatch, zero).reshape(()) for microbatch in range(self._microbatches)]
        return torch.stack(row).to(self._device, torch.float64)


class OneLoss:
    """The loss of one microbatch, as a function of the output."""

    __slots__ = ("_losses", "_microbatch", "_rows")

    def __init__(self, losses: Losses, microbatch: int, rows: int) -> None:
        self._losses, self._microbatch, self._rows = losses, microbatch, rows

    def __call__(self, output: Value) -> Tensor:
        return self._losses(output, self._microbatch, self._rows)

    def is_target(self, leaf: Tensor) -> bool:
        """Return whether a leaf of the loss's graph is a target."""
        return id(leaf) in self._losses.cut


NOTHING_COUNTED = "the loss counted nothing in the whole step: all its counts are 0"
_MIXED = "the loss of some microbatches has a count, of others none; it must have one in all or none"


def _in_words(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of {result.dtype} and shape {tuple(result.shape)}"
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _number(count: Any, microbatch: int, device: torch.device) -> Tensor:
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().clone()
    if isinstance(count, int | float):
        return torch.tensor(float(count), dtype=torch.float64, device=device)
    raise PipelineError(f"the count of microbatch {microbatch} is {_in_words(count)}; it must be one number")


class Total:
    """The losses of all ranks: the sum of their tables, and of extra numbers (`more`), once `wait` has returned."""

    def __init__(self, table: Tensor, more: Tensor, wait: Callable[[], None]) -> None:
        self._table, self._more, self._wait, self._arrived = table, more, wait, False

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        if not self._arrived:
            self._wait()
            self._arrived = True

    def more(self) -> list[float]:
        """Return the sums of the extra numbers."""
        self.wait()
        return self._more.tolist()

    @property
    def counted(self) -> bool:
        self.wait()
        counted = self._table[_COUNTED]
        if bool(counted.any()) != bool(counted.all()):
            raise PipelineError(_MIXED)
        return bool(counted.any())

    def count(self) -> Tensor:
        """Return the total count of the step."""
        self.wait()
        return self._table[_COUNT].sum()

    @cached_property
    def mean(self) -> float:
        """The mean over the microbatches, or the sum divided by the total count."""
        self.wait()
        losses, counts, _ = self._table.tolist()
        for microbatch, loss in enumerate(losses):
            if not isfinite(loss):
                raise PipelineError(f"the loss of microbatch {microbatch} is not finite")
        if not (total := sum(counts)):
            raise PipelineError(NOTHING_COUNTED)
        return float(sum(losses) / total)
