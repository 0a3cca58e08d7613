"""Where the Triton kernels can be used: `row_kernels` and `fp8_kernels`, which import Triton."""

import logging
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

OPTIONS = {"enable_fp_fusion": False}
"""Each product is rounded by itself, whatever version of Triton compiles it."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether kernels can run on a tensor and its like, if numbers are of these dtypes.

    `torch.compile` gets the plain operations, which it fuses itself, and so do subclasses of tensors.
    """
    return (
        tensor.is_cuda
        and all(dtype in _DTYPES for dtype in dtypes)
        and type(tensor) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and _triton_works(tensor.device)
    )


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of a tensor; Triton launches them on the current one."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


@cache
def _triton_works(device: torch.device) -> bool:
    """Return whether a kernel can be compiled and launched."""
    try:
        from stretto.moe.row_kernels import gather_sum

        gather_sum(torch.ones(1, 1, device=device), None, torch.zeros(1, dtype=torch.int64, device=device), tokens=1)
    except Exception as error:  # Triton may be missing, or its compiler, or anything else outside our control
        log.info("rows of experts are moved by several kernels each, since Triton cannot be used: %s", error)
        return False
    return True
