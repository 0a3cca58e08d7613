"""A Triton kernel that multiplies rows by the checksum matrix, reading each row in place."""

import triton
import triton.language as tl
from torch import Tensor

from stretto.weights.checksums import COLUMNS, ROW

ROWS = 64  # rows per program
_PART = 16384  # bytes of a row per program
_STEP = 256  # bytes of a row per `tl.dot`


@triton.jit(do_not_specialize=["count", "whole"])  # type: ignore[untyped-decorator]  # specialising would compile it several times
def _multiply(  # type: ignore[no-untyped-def]
    places, lengths, matrix, sums, count, whole,
    ROWS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_range = row < count
    start = tl.load(places + row, mask=in_range, other=0).to(tl.pointer_type(tl.int8))
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    begin = tl.program_id(1) * PART
    if (tl.program_id(0) + 1) * ROWS <= whole:
        start = tl.multiple_of(start, 16)
        for at in range(begin, begin + PART, STEP):
            byte = at + tl.arange(0, STEP)
            rows = tl.load(start[:, None] + byte[None, :])
            total += tl.dot(rows, tl.load(matrix + byte[:, None] * COLUMNS + column[None, :]), out_dtype=tl.int32)
    else:
        length = tl.load(lengths + row, mask=in_range, other=0)
        for at in range(begin, tl.minimum(begin + PART, tl.max(length)), STEP):
            byte = at + tl.arange(0, STEP)
            rows = tl.load(start[:, None] + byte[None, :], mask=byte[None, :] < length[:, None], other=0)
            total += tl.dot(rows, tl.load(matrix + byte[:, None] * COLUMNS + column[None, :]), out_dtype=tl.int32)
    tl.atomic_add(sums + row[:, None] * COLUMNS + column[None, :], total, mask=in_range[:, None])


def multiply(places: Tensor, lengths: Tensor, whole: int, matrix: Tensor) -> Tensor:
    """Multiply the rows at the addresses `places`, each of `lengths` bytes, by the matrix.

    The first `whole` rows are complete and start at a multiple of 16 bytes.
    """
    sums = matrix.new_zeros((len(places), COLUMNS), dtype=lengths.dtype)
    grid = -(-len(places) // ROWS), ROW // _PART
    _multiply[grid](places, lengths, matrix, sums, len(places), whole, ROWS, _PART, _STEP, COLUMNS, num_stages=4)
    return sums
