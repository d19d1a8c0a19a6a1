"""Assign each element to a rank that updates it. Integers in, integers out.

Parameters lie in flat *buffers*. A buffer consists of *buckets*, the units of communication, and a
bucket consists of a slice per rank:

    buffer    | bucket                        | bucket                        |
              | slice 0 | slice 1 | ... N - 1 | slice 0 | slice 1 | ... N - 1 |
    params    | a  | b        | c                             |  d    | padding

Two layouts:

    even    all slices of a bucket have equal sizes, independent of parameter boundaries
    whole   a slice consists of uncut parameters. Ranks receive parameters by size, the largest
            first. Parameters lie in the order of their owners, and a buffer is a single bucket

Parameters start at multiples of `ALIGN` elements, where vectorised kernels are fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from manyhands._tensors.flat import deal_out, in_groups

ALIGN = 16
BUCKET = 2**22  # elements per bucket on few ranks: 16 MiB of float32
SMALLEST = 2**16  # elements: below, starting a collective costs more than sending
SPARE = 1.125  # a buffer may exceed the bucket size by this factor before it is cut
MANY = 16  # ranks, above which buckets grow


@dataclass(frozen=True)
class ParamRange:
    """Elements `start` to `stop` of a parameter, at `offset` in a bucket or slice."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, low: int, high: int) -> Iterator[ParamRange]:
        """Yield the part between two places; offsets count from `low`."""
        first = max(self.offset, low)
        last = min(self.offset + self.size, high)
        if first < last:
            at = self.start + first - self.offset
            yield ParamRange(self.param, at, at + last - first, first - low)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket: rank r owns the slice from `cuts[r]` to `cuts[r + 1]`.

    The cuts of an even layout are a range, to save memory.
    """

    ranges: tuple[ParamRange, ...]
    cuts: Sequence[int]
    start: int = 0  # in the buffer

    @property
    def size(self) -> int:
        return self.cuts[-1]

    def owned(self, rank: int) -> Iterator[ParamRange]:
        """Yield the ranges of rank `rank`, with offsets in the slice."""
        for each in self.ranges:
            yield from each.within(self.cuts[rank], self.cuts[rank + 1])


@dataclass(frozen=True)
class BufferLayout:
    """Layout of a buffer; `starts` has the first element of each parameter."""

    starts: dict[int, int]
    buckets: tuple[BucketLayout, ...]

    @property
    def size(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def bucket_size(workers: int, elements: int) -> int:
    """Return the number of elements in a bucket, for a model of `elements`.

    At most a tenth of a small model, because buckets must not take more memory than sharding saves.

    >>> bucket_size(4, 10**9), bucket_size(1024, 10**9) // 1024  # elements of each slice
    (4194304, 32768)
    >>> bucket_size(4, 10**6)
    100000
    """
    return min(BUCKET * max(1, math.isqrt(workers // MANY)), max(elements // 10, SMALLEST))


def even_layout(sizes: Sequence[tuple[int, int]], workers: int, largest: int) -> list[BufferLayout]:
    """Cut parameters, given as (index, elements), into equal slices."""
    # `largest` is the number of elements in a bucket.
    buffers = []
    for members in in_groups(sizes, itemgetter(1), largest):
        starts, total = _assign_starts(members)
        number = math.ceil(total / (SPARE * largest))
        # Rounding up gives equal, aligned slices.
        size = _round_up(-(-total // number), workers * ALIGN)
        cuts = range(0, size + 1, size // workers)
        buckets = []
        for start in range(0, total, size):
            ranges = _ranges_within(members, starts, start, start + size)
            buckets.append(BucketLayout(ranges, cuts, start))
        buffers.append(BufferLayout(starts, tuple(buckets)))
    return buffers


def whole_layout(
    sizes: Sequence[tuple[int, int]], workers: int, largest: int, load: list[int]
) -> list[BufferLayout]:
    """Assign uncut parameters, given as (index, elements), to ranks.

    `load` counts the elements of each rank, and is updated.
    """
    owner = deal_out(sizes, load)
    buffers = []
    for members in in_groups(sizes, itemgetter(1), largest):
        members = sorted(members, key=lambda entry: owner[entry[0]])
        starts, total = _assign_starts(members)
        ends = [0] * workers
        for index, size in members:
            ends[owner[index]] = starts[index] + _round_up(size, ALIGN)
        cuts = [0]
        for end in ends:
            cuts.append(max(cuts[-1], end))
        ranges = _ranges_within(members, starts, 0, total)
        buffers.append(BufferLayout(starts, (BucketLayout(ranges, tuple(cuts)),)))
    return buffers


def _assign_starts(members: Sequence[tuple[int, int]]) -> tuple[dict[int, int], int]:
    starts = {}
    end = 0
    for index, size in members:
        starts[index] = end
        end += _round_up(size, ALIGN)
    return starts, max(end, ALIGN)  # never zero, even if all parameters are empty


def _ranges_within(
    members: Sequence[tuple[int, int]], starts: dict[int, int], low: int, high: int
) -> tuple[ParamRange, ...]:
    ranges: list[ParamRange] = []
    for index, size in members:
        ranges += ParamRange(index, 0, size, starts[index]).within(low, high)
    return tuple(ranges)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
