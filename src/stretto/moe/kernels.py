"""Where Triton kernels can be used, such as `row_kernels`, `fp8_kernels` and the pipeline's `sum_kernels`."""

import logging
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

OPTIONS = {"enable_fp_fusion": False}
"""Each product is rounded by itself, whatever version of Triton compiles it."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether kernels can run on these tensors, and give a result of this dtype.

    `torch.compile` gets the plain operations, which it fuses itself, and so do subclasses of tensors.
    """
    return (
        all(tensor.is_cuda and type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and all(kind in _DTYPES for kind in (dtype, *(tensor.dtype for tensor in tensors if _is_real(tensor))))
        and not torch.compiler.is_compiling()
        and _triton_works(tensors[0].device)
    )


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of a tensor; Triton launches them on the current one."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


@cache
def _triton_works(device: torch.device) -> bool:
    """Return whether a kernel can be compiled and launched."""
    try:
        from stretto.moe.row_kernels import gather_sum

        rows, target_R = torch.ones(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        gather_sum(rows, target_R, tokens=1, dtype=rows.dtype)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # Triton may be missing, or its compiler, or anything else outside our control
        log.warning("experts run slower than they could, since Triton cannot be used: %s", error)
        return False
    return True
