"""Boxes of a tensor: what a run of its elements covers, and what two boxes have in common."""

from collections.abc import Iterator
from math import prod

Region = tuple[tuple[int, int], ...]
"""For each dimension, from where to where."""
Shape = tuple[int, ...]


def whole(shape: Shape) -> Region:
    return tuple((0, size) for size in shape)


def runs(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Cut elements start…stop of a tensor, in row order, into boxes; each with its first element's number.

    Every box is contiguous.

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
    """The same within one row."""
    begin = row * prod(shape[1:])
    for first, box in runs(shape[1:], start - begin, stop - begin):
        yield begin + first, ((row, row + 1), *box)


def common(one: Region, other: Region) -> Region | None:
    """What two boxes share, None if nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def inside(box: Region, outer: Region) -> tuple[slice, ...]:
    """A box as an index into the one around it."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def extent(box: Region) -> Shape:
    return tuple(stop - start for start, stop in box)


def slices_box(shape: Shape, slices: tuple[slice, ...]) -> Region:
    """The box that slices cut out of a shape; dimensions that are not named are whole."""
    cut = [*slices, *[slice(None)] * (len(shape) - len(slices))]
    return tuple(part.indices(size)[:2] for part, size in zip(cut, shape, strict=True))
