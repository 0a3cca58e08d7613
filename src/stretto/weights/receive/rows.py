"""Row checksums of tensors, which reveal the change of a single bit; a GPU reads the rows in place."""

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
_ALIGNMENT = 16  # bytes that the GPU kernel reads at a time


def is_readable(tensor: Tensor) -> bool:
    """Return whether the rows of a tensor can be read in place."""
    return reads_in_place(tensor.device) and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


class Rows:
    """The rows of tensors of one dtype.

    With `in_place`, which requires all of them to be readable, every tensor is read in place and starts a new row.
    Otherwise the tensors are concatenated first, and a row may hold the end of one and the start of the next. Only sums
    of the same kind can be compared.
    """

    def __init__(self, tensors: Sequence[Tensor], *, in_place: bool) -> None:
        self._tensors, self.in_place = tensors, in_place
        self._sizes = np.array([tensor.nbytes for tensor in tensors])
        self._table: tuple[Tensor, Tensor, int] | None = None
        if in_place:
            counts = -(-self._sizes // ROW)
            self._owners = np.repeat(np.arange(len(tensors)), counts)
            starts = ROW * (np.arange(len(self._owners)) - np.repeat(np.cumsum(counts) - counts, counts))
            addresses = np.array([tensor.data_ptr() for tensor in tensors])[self._owners] + starts
            lengths = np.minimum(ROW, self._sizes[self._owners] - starts)
            order = np.argsort(lengths < ROW, kind="stable")  # complete rows first
            self._owners = self._owners[order]
            device = tensors[0].device
            columns = (addresses, lengths.astype(np.int32))
            device_addresses, device_lengths = (torch.from_numpy(column[order]).to(device) for column in columns)
            self._table = device_addresses, device_lengths, int((lengths == ROW).sum())

    def sums(self, pool: ThreadPoolExecutor) -> Tensor:
        """Compute the checksums of all rows; on a GPU, in order with the work on the current stream."""
        if self._table is None:
            return row_sums(_joined(self._tensors), pool)
        from stretto.weights.checksum_kernel import multiply

        device = self._tensors[0].device
        with torch.cuda.device(device):
            return multiply(*self._table, _by_rows(device))

    def at(self, row: int) -> list[int]:
        """Return the indices of the tensors that have bytes in a row."""
        if self._table is not None:
            return [int(self._owners[row])]
        ends = np.cumsum(self._sizes)
        first = int(np.searchsorted(ends, row * ROW, "right"))
        last = int(np.searchsorted(ends, (row + 1) * ROW, "left"))
        return list(range(min(first, len(ends) - 1), min(last, len(ends) - 1) + 1))


def first_change(before: Tensor, after: Tensor) -> int | None:
    """Return the first row whose checksums differ, or None."""
    if torch.equal(before, after):
        return None
    return int((before != after).any(1).nonzero()[0])


@cache
def reads_in_place(device: torch.device) -> bool:
    """Return whether rows can be read in place: on a GPU, if the Triton kernel works and its sums are exact."""
    if device.type != "cuda":
        return False
    try:
        from stretto.weights.checksum_kernel import ROWS, multiply

        count = 2 * ROWS + 1
        data = torch.arange(count * ROW, device=device).mul(2654435761).to(torch.int8)
        lengths = torch.full((count,), ROW, dtype=torch.int32, device=device)
        lengths[ROWS:] = torch.arange(ROWS + 1, device=device).mul(509).to(torch.int32)
        addresses = data.data_ptr() + ROW * torch.arange(count, device=device)
        with torch.cuda.device(device):
            sums = multiply(addresses, lengths, ROWS, _by_rows(device))
        expected = torch.zeros(count, ROW, dtype=torch.int8, device=device)
        for row, length in enumerate(lengths.tolist()):
            expected[row, :length] = data[row * ROW :][:length]
        with ThreadPoolExecutor(1) as pool:
            if torch.equal(sums, row_sums(expected.view(-1), pool)):
                return True
        why = "its sums were not exact"
    except Exception as error:  # Triton may be missing, or its compiler, or anything else outside our control
        why = str(error)
    log.info("live tensors are copied to be read again, since Triton cannot be used: %s", why)
    return False


@cache
def _by_rows(device: torch.device) -> Tensor:
    """Return the checksum matrix in row-major order."""
    return matrix(device).contiguous()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors; a single tensor is not copied if it is contiguous.

    To check a write independently, this uses another PyTorch function than the write did.
    """
    joined = flat(tensors[0]) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    return joined.view(torch.int8)
