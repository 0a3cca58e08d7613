"""Checksums of weights: every device finds the same, at the speed at which it reads its memory.

Bytes are cut into rows of 32 KiB, the last filled up with zeros, and each row is multiplied by a fixed random matrix of
16 columns: products of 8-bit integers, whose sums no 32-bit integer is too small for. Whatever is changed in a row, one
column misses that only if one of its numbers has one certain value of 256: all 16 miss it once in 2¹²⁸ times. The sums
are bytes again, 512 times fewer, and go the same way until one row is left, which is hashed, with the length. That is
for damage of any kind; who knows the matrix could make bytes that it does not tell apart.
"""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)
SUM_BYTES = 32
ROW = 1 << 15
COLUMNS = 16
_PART = 2048  # rows that are multiplied at a time on the host
_EXACT = 1024  # products of 8-bit integers whose sum a 32-bit floating point number holds
_FEWEST = 32  # rows that a GPU multiplies


def digest_of(data: Tensor, pool: ThreadPoolExecutor) -> bytes:
    """Of bytes in one piece, as they are now; on a GPU, after all that its current stream has been given before.

    >>> with ThreadPoolExecutor() as pool:
    ...     digest_of(torch.zeros(100_000, dtype=torch.uint8), pool).hex()[:16]
    'a6e472b453b7f8af'
    """
    found = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=SUM_BYTES)
    left = data.view(torch.int8)
    while len(left) > ROW:
        left = row_sums(left, pool).view(torch.int8).view(-1)
    found.update(left.to("cpu", copy=True).numpy().tobytes())  # numpy forbids memory that it sees to be resized
    return found.digest()


def row_sums(data: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """The products of each row of 8-bit integers with the matrix."""
    whole, product = len(data) // ROW, _product(data.device)
    rows = data[: whole * ROW].view(whole, ROW)
    parts = [it for it in ([rows] if data.is_cuda else torch.split(rows, _PART)) if len(it)]
    if rest := len(data) % ROW:
        parts.append(functional.pad(data[-rest:], (0, ROW - rest))[None])
    threaded = not data.is_cuda and torch.get_num_threads() == 1
    return torch.cat(list(pool.map(product, parts) if threaded else map(product, parts)))


@cache
def matrix(device: torch.device) -> Tensor:
    """The same everywhere and always: another one would be another protocol."""
    numbers = hashlib.shake_256(b"stretto weights").digest(ROW * COLUMNS)
    found = torch.from_numpy(np.frombuffer(numbers, np.int8).copy()).view(ROW, COLUMNS).to(device)
    return found.T.contiguous().T if found.is_cuda else found  # by columns a GPU multiplies 8 times as fast


@cache
def _product(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Of rows with the matrix: the fastest way that is exact on this device, for the largest numbers too."""
    largest = torch.where(matrix(device).T < 0, -128, 127).to(torch.int8)
    why = "this processor cannot"
    if device.type != "cpu" or _multiplies_integers():
        try:
            if torch.equal(by_integers(largest), by_floats(largest)):
                return by_integers
            why = "they were not exact"
        except (AttributeError, RuntimeError) as error:  # PyTorch does not promise that it is there
            why = str(error)
    log.info("sums are found without products of 8-bit integers, more slowly: %s", why)
    return by_floats


def by_integers(rows: Tensor) -> Tensor:
    few = max(0, _FEWEST - len(rows)) if rows.is_cuda else 0
    filled = functional.pad(rows, (0, 0, 0, few)) if few else rows
    return torch._int_mm(filled, matrix(rows.device))[: len(rows)]


def by_floats(rows: Tensor) -> Tensor:
    """The same numbers where integers cannot be multiplied: in sums so short that no bit of them is lost."""
    found = torch.zeros(len(rows), COLUMNS, dtype=torch.int32, device=rows.device)
    with torch.autocast(rows.device.type, enabled=False):  # which would round
        for at in range(0, ROW, _EXACT):
            part = rows[:, at : at + _EXACT].float() @ matrix(rows.device)[at : at + _EXACT].float()
            found += part.to(torch.int32)
    return found


def _multiplies_integers() -> bool:
    """Whether this processor sums products of 8-bit integers in 32 bits; older ones would cut them off at 16."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return bool({"avx512_vnni", "avx_vnni", "amx_int8"} & set(flags))
