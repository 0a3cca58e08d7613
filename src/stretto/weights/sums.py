"""A 64-bit sum of a buffer in which every word counts by its place, so that swapped words are seen too."""

import torch
from torch import Tensor

_WIDTH = 8192  # words in a row; a square of them is 512 MiB
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
