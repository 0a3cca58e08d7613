"""The gradients of a step: summed in their own type, given out at its end, or put back as they were."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class StepGradients:
    """Those of all parameters, from a step's beginning to its end."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begins the step: no parameter has a gradient, and bfloat16 ones are summed in float32."""
        self._before = [(parameter, parameter.grad, _dtype(parameter)) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
            if parameter.dtype == torch.bfloat16:
                _set_dtype(parameter, torch.float32)

    def give_out(self, count: Tensor | None, *, accumulate: bool) -> None:
        """Divide the sums by a count, if by anything, give them the parameters' type, and add what was there before."""
        for parameter, before, dtype in self._before:
            grad = parameter.grad
            if grad is not None and count is not None:
                grad /= count
            if dtype is not None and dtype != _dtype(parameter):
                parameter.grad = None
                _set_dtype(parameter, dtype)
                parameter.grad = None if grad is None else grad.to(parameter.dtype)
            if accumulate and before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad

    def restore(self) -> None:
        """As if there had been no step."""
        for parameter, before, dtype in self._before:
            parameter.grad = None
            _set_dtype(parameter, dtype)
            parameter.grad = before


def _dtype(parameter: nn.Parameter) -> torch.dtype | None:
    return getattr(parameter, "grad_dtype", None)


def _set_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    if hasattr(parameter, "grad_dtype") and parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
