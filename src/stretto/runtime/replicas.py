"""Parameters that live on several devices: they start equal, and their gradients are summed."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.runtime.groups import Groups
from stretto.runtime.split_backward import gradient_dtype

Reduce = Callable[[Tensor, dist.ProcessGroup, Any], None]
"""Reduces a tensor over a group."""


class Replicas:
    """What this rank holds that others hold too, by the set of ranks that do."""

    def __init__(
        self,
        groups: Groups,
        holders: Mapping[str, tuple[int, ...]],
        mine: Mapping[str, nn.Parameter],
        sets: Iterable[tuple[int, ...]],
    ) -> None:
        """`holders` says which ranks hold each parameter of `mine`, by names that all ranks agree on, as they do on
        the sets of ranks that hold anything together.
        """
        self._shared: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        for ranks in sorted(sets):
            made = groups.make(ranks)
            if made is not None:
                self._shared.append((made, [mine[name] for name in sorted(holders) if holders[name] == ranks]))

    def start_equal(self) -> None:
        for group, parameters in self._shared:
            source = dist.get_global_rank(group, 0)
            for parameter in parameters:
                dist.broadcast(parameter.data, source, group=group)

    def sum_gradients(self, reduce: Reduce) -> None:
        for group, parameters in self._shared:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            for dtype in sorted({str(parameter.grad.dtype) for parameter in trained if parameter.grad is not None}):
                _sum([p.grad for p in trained if p.grad is not None and str(p.grad.dtype) == dtype], group, reduce)


def _sum(grads: list[Tensor], group: dist.ProcessGroup, reduce: Reduce) -> None:
    """All in one message."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    reduce(flat, group, dist.ReduceOp.SUM)
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
