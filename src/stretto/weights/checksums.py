"""Checksums of weights: the same on every device, computed at memory bandwidth."""

# The bytes are cut into rows of 32 KiB (the last is padded with zeros), and each row is multiplied by a fixed random
# matrix of 16 columns. These are products of 8-bit integers, and their sums always fit a 32-bit integer. However a row
# is damaged, one column misses the damage only if one of its numbers has one particular value of 256; all 16 columns
# miss it with probability 2⁻¹²⁸. The sums are again bytes, 512 times fewer, and are reduced in the same way until one
# row is left, which is hashed together with the length. This detects damage of any kind, but is no defence against an
# attacker: with knowledge of the matrix one can construct different bytes with the same checksum.

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
_PART = 2048  # rows multiplied at a time on the host
_EXACT = 1024  # products of 8-bit integers whose sum is exact in float32
_MIN_ROWS = 32  # a GPU is given at least this many rows


def digest_of(data: Tensor, pool: ThreadPoolExecutor) -> bytes:
    """Return the checksum of contiguous bytes; on a GPU, in order with the work on the current stream.

    >>> with ThreadPoolExecutor() as pool:
    ...     digest_of(torch.zeros(100_000, dtype=torch.uint8), pool).hex()[:16]
    'a6e472b453b7f8af'
    """
    hasher = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=SUM_BYTES)
    remaining = data.view(torch.int8)
    while len(remaining) > ROW:
        remaining = row_sums(remaining, pool).view(torch.int8).view(-1)
    # A copy, because a tensor whose memory numpy has seen can no longer be resized.
    hasher.update(remaining.to("cpu", copy=True).numpy().tobytes())
    return hasher.digest()


def row_sums(data: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """Multiply each row of 8-bit integers by the matrix."""
    whole, product = len(data) // ROW, _product(data.device)
    rows = data[: whole * ROW].view(whole, ROW)
    parts = [part for part in ([rows] if data.is_cuda else torch.split(rows, _PART)) if len(part)]
    if rest := len(data) % ROW:
        parts.append(functional.pad(data[-rest:], (0, ROW - rest))[None])
    threaded = not data.is_cuda and torch.get_num_threads() == 1
    return torch.cat(list(pool.map(product, parts) if threaded else map(product, parts)))


@cache
def matrix(device: torch.device) -> Tensor:
    """Return the fixed matrix. Changing it would change the protocol."""
    numbers = hashlib.shake_256(b"stretto weights").digest(ROW * COLUMNS)
    by_rows = torch.from_numpy(np.frombuffer(numbers, np.int8).copy()).view(ROW, COLUMNS).to(device)
    return by_rows.T.contiguous().T if by_rows.is_cuda else by_rows  # column-major is 8 times as fast on a GPU


@cache
def _product(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the fastest function that multiplies rows by the matrix exactly on this device.

    It is tested with the largest numbers that can occur.
    """
    largest = torch.where(matrix(device).T < 0, -128, 127).to(torch.int8)
    why = "this processor cannot"
    if device.type != "cpu" or _multiplies_integers():
        try:
            if torch.equal(by_integers(largest), by_floats(largest)):
                return by_integers
            why = "they were not exact"
        except (AttributeError, RuntimeError) as error:  # `_int_mm` is private to PyTorch and may be missing
            why = str(error)
    log.info("checksums are computed without products of 8-bit integers, more slowly: %s", why)
    return by_floats


def by_integers(rows: Tensor) -> Tensor:
    padding = max(0, _MIN_ROWS - len(rows)) if rows.is_cuda else 0
    padded = functional.pad(rows, (0, 0, 0, padding)) if padding else rows
    return torch._int_mm(padded, matrix(rows.device))[: len(rows)]


def by_floats(rows: Tensor) -> Tensor:
    """Compute the same numbers in float32, in partial sums short enough to be exact."""
    total = torch.zeros(len(rows), COLUMNS, dtype=torch.int32, device=rows.device)
    with torch.autocast(rows.device.type, enabled=False):  # autocast would round
        for at in range(0, ROW, _EXACT):
            part = rows[:, at : at + _EXACT].float() @ matrix(rows.device)[at : at + _EXACT].float()
            total += part.to(torch.int32)
    return total


def _multiplies_integers() -> bool:
    """Return whether this CPU sums products of 8-bit integers in 32 bits; older CPUs saturate at 16 bits."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return bool({"avx512_vnni", "avx_vnni", "amx_int8"} & set(flags))
