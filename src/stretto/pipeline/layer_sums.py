"""Sums of numbers that belong to layers, over all ranks that hold a copy of the layer."""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.turns import Turns


class LayerSums:
    """Sums tensors by layer. All ranks call it together."""

    def __init__(
        self, team: Team, turns: Turns, agreement: Agreement, layers: Collection[int], layer_count: int
    ) -> None:
        """`agreement` covers all ranks; `layers` are the numbers of this rank's."""
        self._team, self._turns, self._agreement = team, turns, agreement
        self._layers, self._layer_count = sorted(layers), layer_count
        self._count = 0

    def sum(self, values: Mapping[int, Tensor], what: str) -> dict[int, Tensor]:
        """Return for each of these layers the sum of all ranks' tensors, in float64; all have equally many numbers.

        `what` says what layers have these numbers, in case that none has.
        """
        self._count += 1
        try:
            with self._turns.guarding(f"sum {self._count}"):
                sizes = {value.numel() for value in values.values()}
                if len(sizes) > 1 or not all(number in self._layers for number in values):
                    counts = {number: value.numel() for number, value in values.items()}
                    raise PipelineError(
                        f"sums take as many numbers for each of this rank's layers, {self._layers} (got {counts})"
                    )
                size = max(self._agreement.exchange(tuple(range(self._team.size)), max(sizes, default=0)))
                if sizes - {size}:
                    raise PipelineError(f"sums by layer take equally many numbers (got {sizes.pop()} and {size})")
                table = torch.zeros(self._layer_count, size, dtype=torch.float64, device=self._team.device)
                for number, value in values.items():
                    table[number] = value.flatten()
                assert self._team.everybody is not None
                self._team.all_reduce(table, self._team.everybody, dist.ReduceOp.SUM)
        finally:
            self._team.supervisor.answer()
        if not size:
            raise PipelineError(f"no layer of this pipeline has {what}")
        return {number: table[number].view(value.shape) for number, value in values.items()}
