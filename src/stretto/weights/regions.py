"""Rectangular regions of a tensor: cut from runs of elements, intersected, and used as indices."""

from collections.abc import Iterator
from math import prod

Region = tuple[tuple[int, int], ...]
"""A (start, stop) pair for each dimension."""
Shape = tuple[int, ...]


def whole(shape: Shape) -> Region:
    """Return the region that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def runs(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Cut elements start…stop of a tensor, in row-major order, into contiguous regions.

    Yield each region with the index of its first element.

    >>> list(runs((4, 3), 2, 10))
    [(2, ((0, 1), (2, 3))), (3, ((1, 3), (0, 3))), (9, ((3, 4), (0, 1)))]
    """
    if start >= stop:
        return
    if not shape:
        yield 0, ()
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        yield from _within(shape, first, start, stop)
        return
    if start % row:
        yield from _within(shape, first, start, (first + 1) * row)
        first += 1
    full = stop // row
    if first < full:
        yield first * row, ((first, full), *whole(shape[1:]))
    if stop % row:
        yield from _within(shape, full, full * row, stop)


def _within(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Cut elements start…stop, which all lie in one row."""
    begin = row * prod(shape[1:])
    for first, region in runs(shape[1:], start - begin, stop - begin):
        yield begin + first, ((row, row + 1), *region)


def common(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions, or None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """Return the index that selects a region from a tensor holding the region around it."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, outer, strict=True))


def extent(region: Region) -> Shape:
    """Return the shape of a region."""
    return tuple(stop - start for start, stop in region)


def slices_box(shape: Shape, slices: tuple[slice, ...]) -> Region:
    """Return the region that slices select from a shape; trailing dimensions without a slice are whole."""
    padded = [*slices, *[slice(None)] * (len(shape) - len(slices))]
    return tuple(part.indices(size)[:2] for part, size in zip(padded, shape, strict=True))
