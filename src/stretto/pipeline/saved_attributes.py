"""Warns of functions that may read attributes of the tensors that they have saved: those that come back have none."""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def attributes_of_tensor(tensor: Tensor) -> dict[str, Any]:
    """Return what is set on a tensor, besides names that begin with an underscore."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_")} if vars(tensor) else {}


def warn_of_attributes(saved: Tensor, site: str) -> None:
    """Warn if a function of the user's own saves a tensor with attributes. To be called by a saved-tensor hook."""
    named = attributes_of_tensor(saved)
    if not named:
        return
    caller = sys._getframe(2)
    if caller.f_code is not _APPLY:
        return  # an operation, which reads no attributes
    function = caller.f_locals.get("cls")
    if getattr(function, "__module__", "").partition(".")[0] in ("stretto", "torch"):
        return
    warnings.warn(
        f"{getattr(function, '__qualname__', 'a function')} saves a tensor with attributes ({', '.join(named):.60}) in "
        f"{site or 'a layer'}; with a memory policy, as with every saved-tensor hook of PyTorch, its backward gets a "
        "tensor without them: if it reads them, keep the tensor as an attribute of ctx instead",
        stacklevel=3,
    )
