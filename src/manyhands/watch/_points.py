"""Any number of lines as a few hundred points, while they arrive, and what the points say.

A point stands for lines that follow each other. It holds the mean, the lowest and the highest of
each value, and the position of the last line. Once there are twice as many points as a figure
needs, each pair becomes one. So a long run has from `most` to twice as many points, in bounded
memory, and a line costs the same however long the run is.

A line that goes back to an earlier step drops the points from that step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypedDict

from manyhands.record._record import KINDS

MOST = 150
RATE_POINTS = 5  # over which the curve of the speed is measured


@dataclass
class Spread:
    """The values of one key in a point."""

    total: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Add a value of one line."""
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
        # The sum of huge values may overflow where their mean does not.
        mean = self.total / self.count
        return mean if math.isfinite(mean) else (self.low / 2 + self.high / 2)


@dataclass
class Point:
    """Lines that follow each other."""

    last_step: int
    lines: int = 0
    position: dict[str, float] = field(default_factory=dict)  # of the last line, by axis
    values: dict[str, Spread] = field(default_factory=dict)

    def add(self, step: int, position: Mapping[str, float], values: Mapping[str, float]) -> None:
        """Add a line to the point: its position replaces the last, its values are spread."""
        self.last_step = step
        self.lines += 1
        self.position.update(position)
        for key, value in values.items():
            if value - value != 0.0:  # not finite: faster than asking math.isfinite
                continue
            if (spread := self.values.get(key)) is None:
                spread = self.values[key] = Spread()
            spread.add(value)

    def join(self, later: Point) -> None:
        """Take in the point after this one, so that both are drawn as one."""
        self.last_step = later.last_step
        self.lines += later.lines
        self.position.update(later.position)
        for key, spread in later.values.items():
            if key in self.values:
                self.values[key].join(spread)
            else:
                self.values[key] = spread


class Curves(TypedDict):
    """A run's course in lists, with one value for each point; None is a point without it."""

    x: dict[str, list[float | None]]  # positions, by axis
    mean: dict[str, list[float | None]]  # by column, as all that follow
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]
    rate: list[float | None]  # samples (or steps) a second
    parts: list[dict[str, float]]  # seconds of a step, by what they are for


class Points:
    """The lines of a run, as `most` to twice as many points.

    >>> points = Points(most=2)
    >>> for step in range(1, 9):
    ...     points.add(step, {"step": step}, {"loss": 1.0 / step})
    >>> [(point.last_step, point.lines) for point in points.points]
    [(2, 2), (4, 2), (6, 2), (8, 2)]
    >>> points.go_back(5)
    >>> [point.last_step for point in points.points]
    [2, 4]
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lines_each = 1
        self.points: list[Point] = []

    def add(self, step: int, position: Mapping[str, float], values: Mapping[str, float]) -> None:
        """Add a line: its step, where it is on each axis, and its values."""
        # Values that are not finite are left out.
        points = self.points
        if not points or points[-1].lines >= self._lines_each:
            if len(points) >= 2 * self._most:
                self._halve()
            if not points or points[-1].lines >= self._lines_each:
                points.append(Point(step))
        points[-1].add(step, position, values)

    def go_back(self, step: int) -> None:
        """Drop the points from `step` on: the run went back to a checkpoint before it."""
        while self.points and self.points[-1].last_step >= step:
            self.points.pop()

    def _halve(self) -> None:
        """Join neighbouring points, as there are too many to draw."""
        pairs = zip(self.points[::2], self.points[1::2], strict=False)
        joined = []
        for first, second in pairs:
            first.join(second)
            joined.append(first)
        rest = self.points[2 * len(joined) :]
        self.points[:] = joined + rest
        self._lines_each *= 2

    def curves(self) -> Curves:
        """Return the run's course: positions by axis, and values by column, in lists."""
        points = self.points
        axes = dict.fromkeys(key for point in points for key in point.position)
        columns = dict.fromkeys(key for point in points for key in point.values)
        spreads = {key: [point.values.get(key) for point in points] for key in columns}

        def of(name: Literal["mean", "low", "high"]) -> dict[str, list[float | None]]:
            return {
                key: [None if spread is None else getattr(spread, name) for spread in found]
                for key, found in spreads.items()
            }

        return {
            "x": {axis: [point.position.get(axis) for point in points] for axis in axes},
            "mean": of("mean"),
            "low": of("low"),
            "high": of("high"),
            "rate": [
                _rate_between(points[max(0, end - RATE_POINTS)], points[end])
                for end in range(len(points))
            ],
            "parts": [{}, *(_parts_each_step(*pair) for pair in pairwise(points))],
        }

    def recent_parts(self) -> tuple[dict[str, float], float]:
        """Return what the last steps' seconds went into, by part, and how many steps these are."""
        # They are those of about the last tenth of the points.
        recent = self.points[-max(10, len(self.points) // 10) - 1 :]
        if len(recent) < 2:
            return {}, 0.0
        totals: dict[str, float] = {}
        for first, second in pairwise(recent):
            for part, seconds in _parts_between(first, second).items():
                totals[part] = totals.get(part, 0.0) + seconds
        return totals, recent[-1].position["step"] - recent[0].position["step"]


# -- two points -----------------------------------------------------------------------------------


def _rate_between(first: Point, second: Point) -> float | None:
    """Return samples (or steps, without them) a second between the ends of two points."""
    before, after = first.position, second.position
    seconds = after["time"] - before["time"]
    what = "samples" if "samples" in after and "samples" in before else "step"
    return (after[what] - before[what]) / seconds if seconds > 0 else None


def _parts_between(first: Point, second: Point) -> dict[str, float]:
    """Return what the seconds of the second point went into; the rest is "other"."""
    total = max(0.0, second.position["time"] - first.position["time"])
    parts = {}
    for kind in (*KINDS, "rounds"):
        if (spread := second.values.get(f"{kind}_seconds")) is not None:
            parts[kind] = spread.total
    # Blocks hold a sync round after the optimizer's step, or in it, depending on who times it.
    excess = sum(parts.values()) - total
    if "rounds" in parts and "update" in parts and excess > 0:
        parts["update"] = max(0.0, parts["update"] - excess)
    return {**parts, "other": max(0.0, total - sum(parts.values()))}


def _parts_each_step(first: Point, second: Point) -> dict[str, float]:
    """Return what a step's seconds went into, on average between two points."""
    steps = second.position["step"] - first.position["step"]
    if steps <= 0:
        return {}
    return {part: seconds / steps for part, seconds in _parts_between(first, second).items()}
