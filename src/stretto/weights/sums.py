"""A 64-bit sum of a buffer in which every word counts by its place, so that swapped words are seen too."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PART = 8 << 20  # bytes of the host's that are summed at a time
_WIDTH = 8192  # words in a row; a square of them is 512 MiB
_ODD = np.arange(_WIDTH) * 2 + 1
_odd: dict[torch.device, Tensor] = {}


def place_sum(buffer: Tensor) -> Tensor:
    """The sum of bytes, a multiple of 8 of them, as a scalar on the buffer's device; nobody waits for it.

    Word i counts 2i + 1 times, all modulo 2⁶⁴. An odd factor can be undone, so no changed word goes unseen. In a square
    that is 2c + 1 times by its column, and 2r times the width by its row: few operations, and no copy of the words.
    """
    words = buffer.view(torch.int64)
    odd = _odd.get(buffer.device)
    if odd is None:
        odd = _odd[buffer.device] = torch.arange(_WIDTH, device=buffer.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, len(words), _WIDTH**2):
        part = words[start : start + _WIDTH**2]
        rows = len(part) // _WIDTH
        square, rest = part[: rows * _WIDTH].view(rows, _WIDTH), part[rows * _WIDTH :]
        by_row = square.sum(1)
        total += _from(start, square.sum(0), odd) + _WIDTH * ((by_row * odd[:rows]).sum() - by_row.sum())
        if len(rest):
            total += _from(start + rows * _WIDTH, rest, odd)
    return total


def _from(start: int, words: Tensor, odd: Tensor) -> Tensor:
    """The sum of words of which the first is at this place."""
    return (words * odd[: len(words)]).sum() + 2 * start * words.sum()


def host_sum(parts: Iterable[tuple[Tensor, int]], pool: ThreadPoolExecutor) -> int:
    """The same sum of a buffer that is not there yet: of bytes on the host, each part with where it will begin, a
    multiple of 8; between them are zeros. PyTorch would use its own threads for each sum; numpy uses none."""
    pieces = (
        (data[at : at + _PART], start + at)
        for part, start in parts
        for data in (part.numpy(),)
        for at in range(0, len(data), _PART)
    )
    total = sum(pool.map(lambda piece: _bytes_from(*piece), pieces))
    return (total + 2**63) % 2**64 - 2**63  # as a signed word has it


def _bytes_from(data: NDArray[np.uint8], start: int) -> int:
    if len(data) % 8:
        data = np.concatenate((data, np.zeros(-len(data) % 8, np.uint8)))
    words: NDArray[Any] = data.view(np.int64)
    rows = len(words) // _WIDTH
    square, rest = words[: rows * _WIDTH].reshape(rows, _WIDTH), words[rows * _WIDTH :]
    by_column, by_row = square.sum(0), square.sum(1)
    total = int(by_column @ _ODD) + _WIDTH * 2 * int(by_row @ np.arange(rows)) + int(rest @ _ODD[: len(rest)])
    return total + 2 * (start // 8) * int(by_row.sum()) + 2 * (start // 8 + rows * _WIDTH) * int(rest.sum())
