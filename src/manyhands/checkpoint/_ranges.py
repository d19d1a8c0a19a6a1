"""A run of a tensor's elements as boxes. Integers in, integers out.

The elements `start` to `stop` of a tensor, counted in the order of memory, are the end of a row,
some whole rows, and the beginning of another; and the pieces of rows are again such runs, with
one dimension less. So there are at most 2 * dimensions - 1 boxes, and each is one stretch of
memory, the next one's beginning being its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `start` to `stop`, in order.

    >>> list(boxes_of((4, 5), 3, 16))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rows, inner = shape[1:], math.prod(shape[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if first == last:
        yield from _within(first, rows, skipped, rest)
        return
    if skipped:
        yield from _within(first, rows, skipped, inner)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rows)), (last - first, *rows)
    if rest:
        yield from _within(last, rows, 0, rest)


def _within(row: int, rows: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(rows, start, stop):
        yield (row, *offsets), (1, *sizes)
