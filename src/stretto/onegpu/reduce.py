"""Reductions of all ranks' tensors, in the order of the ranks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATIONS: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
]


def validate_op(op: Any, tensors: list[Tensor]) -> Any:
    """Return the operation; raise if it is unknown, or PyTorch does not have it for these tensors."""
    number = next((number for number, (known, _) in enumerate(_OPERATIONS) if op == known), None)
    if number is None:
        raise ValueError(f"onegpu does not reduce by {getattr(op, 'op', op)}")
    for tensor in tensors:
        _try(number, tensor.dtype, tensor.device)
    return op


@cache
def _try(number: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise PyTorch's own error if it cannot reduce such tensors."""
    op, _ = _OPERATIONS[number]
    one = torch.ones(1, device=device).to(dtype)
    one.copy_(reduced([one, one], op))


def reduced(parts: list[Tensor], op: Any) -> Tensor:
    """Reduce one tensor of each rank, in the order of the ranks; the result is flat."""
    function = next(function for known, function in _OPERATIONS if op == known)
    total = parts[0].reshape(-1)
    for part in parts[1:]:
        total = function(total, part.reshape(-1))
    return total / len(parts) if op == dist.ReduceOp.AVG else total
