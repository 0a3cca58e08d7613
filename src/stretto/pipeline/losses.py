"""The losses of a step: of each microbatch, and of all."""

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
    """Those of a step's microbatches on this rank."""

    def __init__(
        self,
        function: Callable[[Value, Value], Any],
        targets: list[Value] | None,
        microbatches: int,
        device: torch.device,
        rows: int = 0,
    ) -> None:
        """`rows` are those of a batch of targets that was given whole, 0 if it was not."""
        self._function, self.targets, self._microbatches = function, targets, microbatches
        self._rows = rows
        self._device = device
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._depends = False
        self.cut: dict[int, tuple[Tensor, Tensor]] = {}
        """Targets that require gradients, and what the loss was given for them."""

    def __call__(self, output: Value, microbatch: int, rows: int = 0) -> Tensor:
        """The loss of a microbatch, whose inputs come from a batch of so many rows."""
        assert self.targets is not None
        if rows and self._rows and rows != self._rows:
            raise PipelineError(f"inputs have {rows} rows, but targets have {self._rows}; give as many of both")
        made = self._function(output, self._cut_off(self.targets[microbatch]))
        loss, count = (made, None) if not isinstance(made, tuple) else made if len(made) == 2 else (None, None)
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
            raise PipelineError(
                f"the loss of microbatch {microbatch} is {_said(made)}; it must be one real number as a tensor, or "
                "a tuple of a sum and a count"
            )
        self._depends = self._depends or loss.requires_grad
        if self._losses and self.counted != (count is not None):
            raise PipelineError(_MIXED)
        self._losses[microbatch] = loss.detach().clone()  # what the loss and its count lie in may be used again
        if count is not None:
            self._counts[microbatch] = _number(count, microbatch, loss.device)
        return loss

    def of(self, microbatch: int, rows: int = 0) -> "OneLoss":
        return OneLoss(self, microbatch, rows)

    def _cut_off(self, target: Value) -> Value:
        """A target without the graph behind what of it requires gradients, which is run once, when the step ends."""
        tree, leaves = entering(target)
        for given, leaf, needs in zip(tree.leaves, leaves or tree.leaves, tree.needs, strict=True):
            if needs:
                self.cut[id(given)] = leaf, given.requires_grad_()
        return tree.value()

    @property
    def here(self) -> bool:
        """Whether any of them are this rank's."""
        return bool(self._losses)

    @property
    def counted(self) -> bool:
        """Whether the loss gives a sum and a count; gradients are then divided by the step's total."""
        return bool(self._counts)

    def demand_graph(self) -> None:
        """Refuse a step that trains nothing, as `backward` does in PyTorch."""
        if self.here and not self._depends:
            raise PipelineError("no loss of this step depends on a parameter that requires gradients")

    def seed(self, loss: Tensor) -> Tensor:
        """The gradient that a microbatch's backward begins with."""
        return torch.full_like(loss, 1.0 if self.counted else 1 / self._microbatches)

    def table(self) -> Tensor:
        """A row of losses and one of counts, by microbatch, and one that tells whether they were counted; zero for
        those of other ranks, so that all ranks' add up.
        """
        if not self._losses:
            return torch.zeros((3, self._microbatches), dtype=torch.float64, device=self._device)
        here = dict.fromkeys(self._losses, torch.ones((), device=self._device))
        rows = (self._losses, self._counts or here, here if self._counts else {})
        return torch.stack([self._row(row) for row in rows])

    def _row(self, numbers: dict[int, Tensor]) -> Tensor:
        """Those of all microbatches, in double precision: cast at once where all have one type."""
        if len({(number.dtype, number.device) for number in numbers.values()}) != 1:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            numbers = {microbatch: number.to(zero) for microbatch, number in numbers.items()}
        else:
            zero = torch.zeros_like(next(iter(numbers.values())).reshape(()))
        found = [numbers.get(microbatch, zero).reshape(()) for microbatch in range(self._microbatches)]
        return torch.stack(found).to(self._device, torch.float64)


class OneLoss:
    """That of one microbatch, as a function of the output."""

    __slots__ = ("_losses", "_microbatch", "_rows")

    def __init__(self, losses: Losses, microbatch: int, rows: int) -> None:
        self._losses, self._microbatch, self._rows = losses, microbatch, rows

    def __call__(self, output: Value) -> Tensor:
        return self._losses(output, self._microbatch, self._rows)

    def gave(self, leaf: Tensor) -> bool:
        """Whether a leaf of its graph is a target."""
        return id(leaf) in self._losses.cut


NOTHING_COUNTED = "the loss counted nothing in the whole step: all its counts are 0"
_MIXED = "the loss of some microbatches has a count, of others none; it must have one in all or none"


def _said(made: Any) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of {made.dtype} and shape {tuple(made.shape)}"
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"


def _number(count: Any, microbatch: int, device: torch.device) -> Tensor:
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().clone()
    if isinstance(count, int | float):
        return torch.tensor(float(count), dtype=torch.float64, device=device)
    raise PipelineError(f"the count of microbatch {microbatch} is {_said(count)}; it must be one number")


class Total:
    """The losses of all ranks: the sum of their tables, once `wait` has returned, and of what else they told."""

    def __init__(self, table: Tensor, more: Tensor, wait: Callable[[], None]) -> None:
        self._table, self._more, self._wait, self._known = table, more, wait, False

    def wait(self) -> None:
        """Until it is known."""
        if not self._known:
            self._wait()
            self._known = True

    def more(self) -> list[float]:
        """The sums of what else ranks have told."""
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
        """All that was counted."""
        self.wait()
        return self._table[_COUNT].sum()

    @cached_property
    def mean(self) -> float:
        """Over the microbatches, or over all that was counted."""
        self.wait()
        losses, counts, _ = self._table.tolist()
        for microbatch, loss in enumerate(losses):
            if not isfinite(loss):
                raise PipelineError(f"the loss of microbatch {microbatch} is not finite")
        if not (total := sum(counts)):
            raise PipelineError(NOTHING_COUNTED)
        return float(sum(losses) / total)
