"""Tensors as bytes: which of them a message can move, and how they are written to and read from a file."""

import os

import torch
from torch import Tensor

from stretto.wire.memory import memory_at


def validate_source(tensor: Tensor) -> None:
    """Raise ValueError if a tensor cannot be sent."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"only dense tensors of the CPU or a GPU can be moved (got {tensor.layout} on {tensor.device.type})"
        )


def validate_target(tensor: Tensor) -> None:
    """Raise ValueError if a tensor cannot be received into."""
    validate_source(tensor)
    if not tensor.is_contiguous():
        raise ValueError("a tensor to be received must be contiguous")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a tensor to be received must not be a lazy conjugate or negative; use resolve_conj() or resolve_neg()"
        )


def plain(tensor: Tensor) -> Tensor:
    """Return the same numbers as contiguous bytes, without lazy conjugate or negative."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def write(file: int, tensor: Tensor) -> None:
    rest = memory_at(tensor.data_ptr(), tensor.nbytes)
    while rest:
        rest = rest[os.write(file, rest) :]


def read(file: int, tensor: Tensor) -> None:
    """Read a file into a tensor. A memory mapping would crash this process if the file were truncated."""
    content, start = memory_at(tensor.data_ptr(), tensor.nbytes), 0
    while start < len(content):
        count = os.preadv(file, [content[start:]], start)
        if not count:
            raise OSError(f"its file ends after {start} of {len(content)} bytes")
        start += count
