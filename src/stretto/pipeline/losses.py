"""The losses of a step, or the values of a metric: one per microbatch on this rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.ir.errors import PipelineError, named
from stretto.pipeline.microbatches import Microbatches, row_counts, validate_cuts
from stretto.pipeline.pytree import Value, entering
from stretto.pipeline.totals import mixed

Loss = Callable[[Value, Value], Tensor | tuple[Tensor, Tensor | int]]
"""A function of output and target that returns the mean of its microbatch, or a sum and a count."""


class Losses:
    """The losses of a step's microbatches on this rank, or the values of a metric.

    If the targets are one batch that microbatches cannot share equally, a mean weighs by its microbatch's rows.
    """

    def __init__(
        self,
        function: Callable[[Value, Value], Any],
        targets: list[Value] | None,
        microbatches: Microbatches,
        device: torch.device,
        rows: int = 0,
        *,
        metric: str = "",
    ) -> None:
        """`targets` are those of this replica's microbatches, and `rows` is their batch size if they were passed as one
        batch, else 0. `metric` is the name of a metric.
        """
        self._function, self.targets, self._microbatches = function, targets, microbatches
        self.name = f"the metric {metric!r:.60}" if metric else "the loss"
        """What errors call it."""
        self._is_metric = bool(metric)
        self.rows = rows
        """The batch size of targets passed as one batch, else 0."""
        self._row_counts = row_counts(rows, microbatches.count) if rows % microbatches.count else None
        self._device = device
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._depends = False
        self.cut: dict[int, tuple[Tensor, Tensor]] = {}
        """Targets that require gradients, each with the detached tensor that the loss gets instead."""

    def __call__(self, output: Value, microbatch: int, rows: int = 0) -> Tensor:
        """Compute the loss of a microbatch. `rows` is the number of rows of its input batch, 0 if unknown."""
        assert self.targets is not None
        validate_cuts(rows, self.rows, self._microbatches.count)
        result = self._call(output, self._cut_off(self.targets[microbatch - self._microbatches.first]))
        loss, count = (result, None) if not isinstance(result, tuple) else result if len(result) == 2 else (None, None)
        if self._is_metric and isinstance(loss, int | float):
            loss = torch.tensor(float(loss), dtype=torch.float64, device=self._device)
        if not isinstance(loss, Tensor) or not self._is_real(loss) or loss.numel() != 1:
            raise PipelineError(
                f"{self.name} of microbatch {microbatch} is {_in_words(result)}; it must be one real number as a "
                "tensor, or a tuple of a sum and a count"
            )
        self._depends = self._depends or loss.requires_grad
        if self._losses and self.counted != (count is not None):
            raise PipelineError(mixed(self.name))
        self._losses[microbatch] = loss.detach().clone()  # the loss function may reuse the memory of its result
        if count is not None:
            self._counts[microbatch] = self._number(count, microbatch, loss.device)
        return loss

    def _is_real(self, value: Tensor) -> bool:
        """Return whether a value has a dtype that a loss may have; metrics may count in whole numbers too."""
        return value.is_floating_point() or (self._is_metric and not value.is_complex())

    def _number(self, count: Any, microbatch: int, device: torch.device) -> Tensor:
        if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
            return count.detach().clone()
        if isinstance(count, int | float):
            return torch.tensor(float(count), dtype=torch.float64, device=device)
        what = "the count" if not self._is_metric else f"the count of {self.name}"
        raise PipelineError(f"{what} of microbatch {microbatch} is {_in_words(count)}; it must be one number")

    def _call(self, output: Value, target: Value) -> Any:
        try:
            return self._function(output, target)
        except Exception as error:
            if self._is_metric:
                raise PipelineError(f"{self.name} failed: {named(error)}") from error
            raise

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

    @property
    def trains(self) -> bool:
        """Whether any loss of this rank depends on a parameter that requires gradients."""
        return self._depends

    @property
    def is_weighted(self) -> bool:
        """Whether means weigh by their microbatches' rows, which differ."""
        return self._row_counts is not None and not self.counted

    def seed(self, loss: Tensor, microbatch: int) -> Tensor:
        """Return the gradient with which a microbatch's backward begins."""
        if self.counted:
            return torch.ones_like(loss)
        if self._row_counts is None:
            return torch.full_like(loss, 1 / self._microbatches.total)
        share = self._rows_in(microbatch) / self.rows
        return torch.full_like(loss, share / self._microbatches.replicas)

    def _rows_in(self, microbatch: int) -> int:
        assert self._row_counts is not None
        return self._row_counts[microbatch - self._microbatches.first]

    def table(self) -> Tensor:
        """Return the rows of a table (see `totals`) for all microbatches.

        Microbatches of other ranks are zero, so that the sum of all ranks' tables is complete.
        """
        if not self._losses:
            return torch.zeros((3, self._microbatches.total), dtype=torch.float64, device=self._device)
        ones = dict.fromkeys(self._losses, torch.ones((), device=self._device))
        rows = (self._losses, self._counts or ones, ones if self._counts else {})
        if self._row_counts is not None and not self._counts:
            sizes = {microbatch: self._full(self._rows_in(microbatch)) for microbatch in self._losses}
            sums = {
                microbatch: loss.to(sizes[microbatch]) * sizes[microbatch] for microbatch, loss in self._losses.items()
            }
            rows = sums, sizes, dict.fromkeys(self._losses, self._full(-self.rows))
        return torch.stack([self._row(row) for row in rows])

    def _full(self, number: int) -> Tensor:
        return torch.full((), number, dtype=torch.float64, device=self._device)

    def _row(self, numbers: dict[int, Tensor]) -> Tensor:
        """Return the numbers of all microbatches in float64, cast with one kernel if all share a dtype."""
        if len({(number.dtype, number.device) for number in numbers.values()}) != 1:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            numbers = {microbatch: number.to(zero) for microbatch, number in numbers.items()}
        else:
            zero = torch.zeros_like(next(iter(numbers.values())).reshape(()))
        row = [numbers.get(microbatch, zero).reshape(()) for microbatch in range(self._microbatches.total)]
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


def _in_words(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of {result.dtype} and shape {tuple(result.shape)}"
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
