"""Which worker keeps which elements up to date. Integers in, integers out.

Parameters lie one after the other in *segments*, each a flat piece of memory. A segment is cut
into *buckets*, which travel as a whole, and a bucket into N slices, one for each worker:

    segment   | bucket                        | bucket                        |
              | slice 0 | slice 1 | ... N - 1 | slice 0 | slice 1 | ... N - 1 |
    params    | a  | b        | c                             |  d    | padding

There are two layouts. *Even*: every slice of a bucket has the same size, wherever parameters
begin and end. *Whole*: a slice holds whole parameters; they are dealt out by size, the largest
first, and put in the order of their owners within the bucket, which then is the whole segment.

A parameter begins at a multiple of `ALIGN` elements, so that kernels find it where they like it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ALIGN = 16
BUCKET = 2**22  # elements of a bucket among few workers: 16 MiB of float32
SMALLEST = 2**16
SPARE = 1.125  # how far a bucket may be above its size before it is cut in two
MANY = 16  # workers, from which on buckets grow, so that slices stay worth a message


@dataclass(frozen=True)
class ParamRange:
    """Elements `start` to `stop` of a parameter, which lie at `offset` in a bucket."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """What travels together: slice r, from `cuts[r]` to `cuts[r + 1]`, is worker r's."""

    ranges: tuple[ParamRange, ...]
    cuts: tuple[int, ...]
    start: int = 0  # within its segment

    @property
    def size(self) -> int:
        return self.cuts[-1]

    @cached_property
    def even(self) -> bool:
        first = self.cuts[1] - self.cuts[0]
        return all(b - a == first for a, b in pairwise(self.cuts))

    def owned(self, rank: int) -> Iterator[ParamRange]:
        """The runs of elements that are worker `rank`'s; offsets count from its slice."""
        low, high = self.cuts[rank], self.cuts[rank + 1]
        for run in self.ranges:
            first, last = max(run.offset, low), min(run.offset + run.size, high)
            if first < last:
                at = run.start + first - run.offset
                yield ParamRange(run.param, at, at + last - first, first - low)


@dataclass(frozen=True)
class BufferLayout:
    """A stretch of memory in which some parameters lie; `places` says where each begins."""

    starts: dict[int, int]
    buckets: tuple[BucketLayout, ...]

    @property
    def size(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def bucket_size(workers: int, elements: int) -> int:
    """How many of a model's elements travel together.

    4 Mi, and eight times that among 1,024 workers; but a tenth of a smaller model, whose
    buckets would otherwise hold more than sharding saves.

    >>> bucket_size(4, 10**9), bucket_size(1024, 10**9) // 1024  # elements of a slice of so many
    (4194304, 32768)
    >>> bucket_size(4, 10**6)
    100000
    """
    return min(BUCKET * max(1, math.isqrt(workers // MANY)), max(elements // 10, SMALLEST))


def even_layout(sizes: Sequence[tuple[int, int]], workers: int, largest: int) -> list[BufferLayout]:
    """Cut parameters, given as (index, elements), into equal shares; with 0, each by itself."""
    segments = []
    for members in _stretches(sizes, largest):
        places, total = _placed(members)
        number = math.ceil(total / (SPARE * largest)) if largest else 1
        size = _rounded_up(-(-total // number), workers * ALIGN)
        cuts = tuple(range(0, size + 1, size // workers))
        buckets = tuple(
            BucketLayout(tuple(_runs_within(members, places, start, start + size)), cuts, start)
            for start in range(0, total, size)
        )
        segments.append(BufferLayout(places, buckets))
    return segments


def whole_layout(
    sizes: Sequence[tuple[int, int]], workers: int, largest: int, load: list[int]
) -> list[BufferLayout]:
    """Give each parameter to one worker. `load` counts the elements that each has so far."""
    owner: dict[int, int] = {}
    for index, size in sorted(sizes, key=lambda entry: (-entry[1], entry[0])):
        owner[index] = load.index(min(load))
        load[owner[index]] += size
    segments = []
    for members in _stretches(sizes, largest):
        members = sorted(members, key=lambda entry: owner[entry[0]])
        places, total = _placed(members)
        ends = [0] * workers
        for index, size in members:
            ends[owner[index]] = places[index] + _rounded_up(size, ALIGN)
        cuts = [0]
        for end in ends:
            cuts.append(max(cuts[-1], end))
        runs = tuple(_runs_within(members, places, 0, total))
        segments.append(BufferLayout(places, (BucketLayout(runs, tuple(cuts)),)))
    return segments


def _stretches(sizes: Sequence[tuple[int, int]], largest: int) -> Iterator[list[tuple[int, int]]]:
    """Consecutive parameters, about `largest` elements at a time."""
    stretch: list[tuple[int, int]] = []
    total = 0
    for index, size in sizes:
        if stretch and total + size > largest:
            yield stretch
            stretch, total = [], 0
        stretch.append((index, size))
        total += size
    if stretch:
        yield stretch


def _placed(members: Sequence[tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Where each parameter begins, and the end of the last."""
    places, end = {}, 0
    for index, size in members:
        places[index] = end
        end += _rounded_up(size, ALIGN)
    return places, max(end, ALIGN)


def _runs_within(
    members: Sequence[tuple[int, int]], places: dict[int, int], low: int, high: int
) -> Iterator[ParamRange]:
    for index, size in members:
        first, last = max(places[index], low), min(places[index] + size, high)
        if first < last:
            at = first - places[index]
            yield ParamRange(index, at, at + last - first, first - low)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
