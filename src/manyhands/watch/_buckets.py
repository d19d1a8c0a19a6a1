"""Any number of lines as a few hundred points, while they arrive.

A bucket holds so many lines that follow each other: the mean, the lowest and the highest of each
value, and the position of the last line. Once there are twice as many buckets as a figure needs,
each pair becomes one. So there are always `most` to twice as many, in bounded memory, and a line
costs the same however long the run is.

A line that goes back to an earlier step drops the buckets from that step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MOST = 150


@dataclass
class Spread:
    """The values of one key in a bucket."""

    total: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value

    def join(self, other: Spread) -> None:
        self.total += other.total
        self.count += other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    @property
    def mean(self) -> float:
        # the sum of huge values may overflow where their mean does not
        mean = self.total / self.count
        return mean if math.isfinite(mean) else (self.low / 2 + self.high / 2)


@dataclass
class Bucket:
    """Lines that follow each other."""

    last_step: int
    lines: int = 0
    position: dict[str, float] = field(default_factory=dict)  # of the last line, by axis
    values: dict[str, Spread] = field(default_factory=dict)

    def add(self, step: int, position: Mapping[str, float], values: Mapping[str, float]) -> None:
        self.last_step = step
        self.lines += 1
        self.position.update(position)
        for key, value in values.items():
            if value - value != 0.0:  # not finite
                continue
            if (spread := self.values.get(key)) is None:
                spread = self.values[key] = Spread()
            spread.add(value)

    def join(self, later: Bucket) -> None:
        self.last_step = later.last_step
        self.lines += later.lines
        self.position.update(later.position)
        for key, spread in later.values.items():
            if key in self.values:
                self.values[key].join(spread)
            else:
                self.values[key] = spread


class Buckets:
    """The lines of a run, as `most` to twice as many buckets.

    >>> buckets = Buckets(most=2)
    >>> for step in range(1, 9):
    ...     buckets.add(step, {"step": step}, {"loss": 1.0 / step})
    >>> [(bucket.last_step, bucket.lines) for bucket in buckets.buckets]
    [(2, 2), (4, 2), (6, 2), (8, 2)]
    >>> buckets.go_back(5)
    >>> [bucket.last_step for bucket in buckets.buckets]
    [2, 4]
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lines_each = 1
        self.buckets: list[Bucket] = []

    def add(self, step: int, position: Mapping[str, float], values: Mapping[str, float]) -> None:
        """Add a line: its step, where it is on each axis, and its values.

        Values that are not finite are left out.
        """
        buckets = self.buckets
        if not buckets or buckets[-1].lines >= self._lines_each:
            if len(buckets) >= 2 * self._most:
                self._halve()
            if not buckets or buckets[-1].lines >= self._lines_each:
                buckets.append(Bucket(step))
        buckets[-1].add(step, position, values)

    def go_back(self, step: int) -> None:
        """Drop what was from `step` on: the run returned to a checkpoint before it."""
        while self.buckets and self.buckets[-1].last_step >= step:
            self.buckets.pop()

    def _halve(self) -> None:
        pairs = zip(self.buckets[::2], self.buckets[1::2], strict=False)
        joined = []
        for first, second in pairs:
            first.join(second)
            joined.append(first)
        rest = self.buckets[2 * len(joined) :]
        self.buckets[:] = joined + rest
        self._lines_each *= 2
