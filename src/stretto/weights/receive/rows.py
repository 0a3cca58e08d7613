"""Tensors read again where they lie: the sums of their rows, which tell to the bit whether anything changed."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from stretto.weights.checksums import ROW, matrix, row_sums
from stretto.weights.sources.shard import flat

log = logging.getLogger(__name__)
_ALIGNED = 16  # bytes that a GPU reads at a time


def is_readable(tensor: Tensor) -> bool:
    """Whether its rows can be read where they lie."""
    return reads_in_place(tensor.device) and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0


class Rows:
    """Of tensors of one type. If all are readable, each can be read where it lies; otherwise a copy of them is made
    first, so that a row may have the end of one and the beginning of the next. Sums of the same kind can be compared.
    """

    def __init__(self, tensors: Sequence[Tensor], *, in_place: bool) -> None:
        self._tensors, self.in_place = tensors, in_place
        self._sizes = np.array([it.nbytes for it in tensors])
        self._table: tuple[Tensor, Tensor, int] | None = None
        if in_place:
            counts = -(-self._sizes // ROW)
            self._owners = np.repeat(np.arange(len(tensors)), counts)
            starts = ROW * (np.arange(len(self._owners)) - np.repeat(np.cumsum(counts) - counts, counts))
            places = np.array([it.data_ptr() for it in tensors])[self._owners] + starts
            lengths = np.minimum(ROW, self._sizes[self._owners] - starts)
            order = np.argsort(lengths < ROW, kind="stable")  # whole ones first
            self._owners = self._owners[order]
            device = tensors[0].device
            there, long = (torch.from_numpy(it[order]).to(device) for it in (places, lengths.astype(np.int32)))
            self._table = there, long, int((lengths == ROW).sum())

    def sums(self, pool: ThreadPoolExecutor) -> Tensor:
        """As they are now; on a GPU, after all that its current stream has been given before."""
        if self._table is None:
            return row_sums(_joined(self._tensors), pool)
        from stretto.weights.checksum_kernel import multiply

        device = self._tensors[0].device
        with torch.cuda.device(device):
            return multiply(*self._table, _by_rows(device))

    def at(self, row: int) -> list[int]:
        """The tensors, by their places, of which a row has anything."""
        if self._table is not None:
            return [int(self._owners[row])]
        ends = np.cumsum(self._sizes)
        first = int(np.searchsorted(ends, row * ROW, "right"))
        last = int(np.searchsorted(ends, (row + 1) * ROW, "left"))
        return list(range(min(first, len(ends) - 1), min(last, len(ends) - 1) + 1))


def first_change(before: Tensor, after: Tensor) -> int | None:
    """The first row whose sums differ."""
    if torch.equal(before, after):
        return None
    return int((before != after).any(1).nonzero()[0])


@cache
def reads_in_place(device: torch.device) -> bool:
    """Whether rows can be read where they lie: on a GPU, if Triton is there and finds what it should."""
    if device.type != "cuda":
        return False
    try:
        from stretto.weights.checksum_kernel import ROWS, multiply

        count = 2 * ROWS + 1
        data = torch.arange(count * ROW, device=device).mul(2654435761).to(torch.int8)
        lengths = torch.full((count,), ROW, dtype=torch.int32, device=device)
        lengths[ROWS:] = torch.arange(ROWS + 1, device=device).mul(509).to(torch.int32)
        places = data.data_ptr() + ROW * torch.arange(count, device=device)
        with torch.cuda.device(device):
            found = multiply(places, lengths, ROWS, _by_rows(device))
        expected = torch.zeros(count, ROW, dtype=torch.int8, device=device)
        for row, length in enumerate(lengths.tolist()):
            expected[row, :length] = data[row * ROW :][:length]
        with ThreadPoolExecutor(1) as pool:
            if torch.equal(found, row_sums(expected.view(-1), pool)):
                return True
        why = "its sums were not exact"
    except Exception as error:  # a compiler may be missing, or anything else that is not ours
        why = str(error)
    log.info("live tensors are copied to be read again, since Triton cannot be used: %s", why)
    return False


@cache
def _by_rows(device: torch.device) -> Tensor:
    return matrix(device).contiguous()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All bytes, as they are now; one alone stays where it is. Not by the same function that wrote them."""
    found = flat(tensors[0]) if len(tensors) == 1 else torch.cat([it.reshape(-1) for it in tensors])
    return found.view(torch.int8)
