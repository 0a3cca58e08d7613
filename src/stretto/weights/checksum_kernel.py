"""The products of rows with the matrix of checksums on a GPU, each row read where it lies. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from stretto.weights.checksums import COLUMNS, ROW

ROWS = 64  # that are multiplied together
_PART = 16384  # of a row's bytes, which are multiplied by others than the rest
_STEP = 256


@triton.jit(do_not_specialize=["count", "whole"])  # type: ignore[untyped-decorator]  # or it is compiled several times
def _multiply(  # type: ignore[no-untyped-def]
    places, lengths, matrix, found, count, whole,
    ROWS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_there = row < count
    start = tl.load(places + row, mask=is_there, other=0).to(tl.pointer_type(tl.int8))
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    begin = tl.program_id(1) * PART
    if (tl.program_id(0) + 1) * ROWS <= whole:
        start = tl.multiple_of(start, 16)
        for at in range(begin, begin + PART, STEP):
            byte = at + tl.arange(0, STEP)
            rows = tl.load(start[:, None] + byte[None, :])
            total += tl.dot(rows, tl.load(matrix + byte[:, None] * COLUMNS + column[None, :]), out_dtype=tl.int32)
    else:
        length = tl.load(lengths + row, mask=is_there, other=0)
        for at in range(begin, tl.minimum(begin + PART, tl.max(length)), STEP):
            byte = at + tl.arange(0, STEP)
            rows = tl.load(start[:, None] + byte[None, :], mask=byte[None, :] < length[:, None], other=0)
            total += tl.dot(rows, tl.load(matrix + byte[:, None] * COLUMNS + column[None, :]), out_dtype=tl.int32)
    tl.atomic_add(found + row[:, None] * COLUMNS + column[None, :], total, mask=is_there[:, None])


def multiply(places: Tensor, lengths: Tensor, whole: int, matrix: Tensor) -> Tensor:
    """The products of rows at these addresses, which have so many bytes; the first `whole` ones have all of them, and
    begin at a multiple of 16."""
    found = matrix.new_zeros((len(places), COLUMNS), dtype=lengths.dtype)
    grid = -(-len(places) // ROWS), ROW // _PART
    _multiply[grid](places, lengths, matrix, found, len(places), whole, ROWS, _PART, _STEP, COLUMNS, num_stages=4)
    return found
