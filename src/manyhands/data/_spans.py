"""Ranges of positions in an epoch: half-open pairs (start, stop), in the order they are taken."""

from __future__ import annotations

from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]


def count(spans: Spans) -> int:
    """Return how many positions the ranges have.

    >>> count(((0, 4), (10, 11)))
    5
    """
    return sum(stop - start for start, stop in spans)


def take(spans: Spans, number: int) -> tuple[Spans, Spans]:
    """Return the first so many positions, or all if there are fewer, and the rest.

    >>> take(((0, 4), (10, 12)), 5)
    (((0, 4), (10, 11)), ((11, 12),))
    """
    taken: list[tuple[int, int]] = []
    for index, (start, stop) in enumerate(spans):
        if stop - start > number:
            cut = start + number
            first = (*taken, (start, cut)) if number else tuple(taken)
            return first, ((cut, stop), *spans[index + 1 :])
        taken.append((start, stop))
        number -= stop - start
    return tuple(taken), ()


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return ranges that have no position in common as sorted ranges that do not touch.

    >>> union([(10, 12), (0, 4), (4, 6)])
    ((0, 6), (10, 12))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            assert not joined or joined[-1][1] < start, "a position is in two ranges"
            joined.append((start, stop))
    return tuple(joined)
