"""Convert columns of a run to curves: thin, smooth, and choose a scale.

    thin           Keep the lowest and the highest value of equal intervals, so that a single spike
                   in a million steps stays visible.
    running_mean   Smooth a noisy curve with a centred mean.
    choose_scale   Prevent a diverging run from flattening all other curves of a figure.

A value is None where the record's line has no such value. Records may come from untrusted sources:
`numbers` removes text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median_low
from typing import TypeAlias

from manyhands.tools.record import Run
from manyhands.tools.record._run import count_small_batches, to_positive

Values: TypeAlias = list[float | None]  # a value per line of a record

THROUGHPUT = "throughput"  # a computed column
# Columns drawn as dotted curves in the figure of another column, and the labels there.
DOTTED = {"scale": ("target_scale", "target"), "step_seconds": ("predicted_seconds", "predicted")}
WINDOWS = {"0.5 %": 0.005, "2 %": 0.02, "10 %": 0.1}  # of running means, as fractions of the run
WINDOW = 0.02  # initial choice
_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
_LONG = 200  # a curve with more values is also drawn as a running mean
_POINTS = 2000  # approximate points of a curve
_FEWER = 4  # a running mean has this many times fewer points
_INTERVALS = 200  # intervals of the run for measuring the throughput


@dataclass(frozen=True)
class Curve:
    """A line in a figure; `x` has a list per axis that the reader can choose.

    `window` is the window of a running mean, 0 for the values behind a running mean, and None for
    curves without smoothing.
    """

    run: int
    label: str
    dash: str
    x: dict[str, Values]
    y: list[float]
    window: float | None = None


def batch_size(run: Run) -> float | None:
    return to_positive(run.header.get("batch_size"))


def samples(run: Run) -> Values:
    """Return the samples seen up to each line, or None without a batch size."""
    size = batch_size(run)
    if size is None:
        return [None] * len(run.lines)
    seen = 0.0
    before = 0
    found: Values = []
    for line in run.lines:
        seen += (line["step"] - before) * size * count_small_batches(run.header, line)
        before = line["step"]
        found.append(seen)
    return found


def throughput(run: Run) -> Values:
    """Return samples or steps per second in equal intervals, at the last line of each interval."""
    done = samples(run)
    if batch_size(run) is None:
        done = numbers(run, "step")
    times = numbers(run, "time")
    rates: Values = [None] * len(run.lines)
    last = len(run.lines) - 1
    edges = sorted({last * edge // _INTERVALS for edge in range(_INTERVALS + 1)})
    for start, end in pairwise(edges):
        seconds = times[end] - times[start]  # type: ignore[operator]
        if seconds > 0:
            rates[end] = (done[end] - done[start]) / seconds  # type: ignore[operator]
    return rates


def numbers(run: Run, column: str) -> Values:
    """Return a column in which every value that is missing or not a number is None."""
    # Text of an untrusted record must not pass this function.
    if column not in run.columns:
        return [None] * len(run.lines)
    return [_to_number(value) for value in run.column(column)]


def _to_number(value: object) -> float | None:
    """Return a number within the range of floats, infinity, or None for other values."""
    if not isinstance(value, int | float):
        return None
    if value > sys.float_info.max:  # includes integers outside the range of floats
        return math.inf
    if value < -sys.float_info.max:
        return -math.inf
    return value


def progress_values(run: Run) -> Values | None:
    """Return the progress of each line, or None if no line has progress."""
    values = numbers(run, "progress")
    if not any(value is not None for value in values):
        return None
    return values


def curves_of(key: str, index: int, run: Run, label: str) -> list[Curve]:
    """Return all curves of a run in the figure of `key`, thinned."""
    curves: list[Curve] = []
    positions = _positions(run)

    def draw(groups: list[Values], label: str, dash: str = "", window: float | None = None) -> None:
        """Add a curve per parameter group."""
        distinct: list[Values] = []
        for group in groups:
            if group not in distinct:  # equal curves would hide each other
                distinct.append(group)
        points = _POINTS
        if window:
            points = _POINTS // _FEWER
        for number, values in enumerate(distinct):
            kept = thin(values, points)
            if not kept:
                continue
            name = label
            if len(distinct) > 1:
                name = f"{label}, group {number}"
            x: dict[str, Values] = {}
            for axis, position in positions.items():
                x[axis] = [position[at] for at in kept]
            y: list[float] = [values[at] for at in kept]  # type: ignore[misc]
            style = dash or _DASHES[number % len(_DASHES)]
            curves.append(Curve(run=index, label=name, dash=style, x=x, y=y, window=window))

    groups = _groups_of(run, key)
    factors: list[Values] = []
    if key == "lr":
        factors = _groups_of(run, "factor")
    if factors:
        # The applied rate is the small-batch rate of the schedule, multiplied by the rule's factor.
        applied: list[Values] = []
        for rate, factor in zip(groups, factors, strict=False):
            applied.append(_product(rate, factor))
        draw(applied, label)
        draw(groups, f"{label}, small batch", dash="dot")
    elif key in run.own and any(len(group) - group.count(None) > _LONG for group in groups):
        draw(groups, label, window=0.0)
        for window in WINDOWS.values():
            draw([running_mean(group, window) for group in groups], label, window=window)
    elif key == THROUGHPUT and not groups:
        draw([throughput(run)], label)
    else:
        draw(groups, label)
        if key in DOTTED:
            column, name = DOTTED[key]
            draw([numbers(run, column)], f"{label}, {name}", dash="dot")
    return curves


def _groups_of(run: Run, key: str) -> list[Values]:
    """Return the values of `key` for each parameter group."""
    columns = set(run.columns)  # a list would be searched for each group
    groups = []
    if key in columns:
        groups.append(numbers(run, key))
    for index in count():
        column = f"{key}/{index}"
        if column not in columns:
            break
        groups.append(numbers(run, column))
    return groups


def _positions(run: Run) -> dict[str, Values]:
    steps = numbers(run, "step")
    return {
        "progress": progress_values(run) or steps,
        "step": steps,
        "time": numbers(run, "time"),
        "samples": samples(run),
    }


def _product(first: Values, second: Values) -> Values:
    products: Values = []
    for one, two in zip(first, second, strict=True):
        if one is None or two is None:
            products.append(None)
        else:
            products.append(one * two)
    return products


# -- a curve in plain numbers ----------------------------------------------------------------------

_TRIMMED = 0.02  # fraction of values at each end that the range of a curve ignores
_FEWEST = 20  # a curve with fewer values is not trimmed
_FLATTENED = 4.0  # values are cut off if the full range exceeds the trimmed range by this factor
_FLAT = 0.1  # fraction of the figure's height; flatter typical curves require a log scale
_SPREAD = 10.0  # ratio of highest to lowest value from which a log scale separates the curves


def thin(values: Sequence[float | None], most: int = _POINTS) -> list[int]:
    """Return the indices of about `most` values to draw, without None.

    The first infinity or NaN of an interval stays, and is drawn as a gap.

    >>> thin([3.0, None, 1.0])
    [0, 2]
    >>> thin([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], most=4)
    [0, 1, 4, 6, 7]
    """
    present = [index for index, value in enumerate(values) if value is not None]
    if len(present) <= most:
        return present
    keep = {present[0], present[-1]}
    intervals = max(1, most // 2)  # two values per interval stay
    edges = [len(present) * edge // intervals for edge in range(intervals + 1)]
    for start, end in pairwise(edges):
        finite = []
        gap = None
        for index in present[start:end]:
            if math.isfinite(values[index]):  # type: ignore[arg-type]
                finite.append(index)
            elif gap is None:
                gap = index
                keep.add(gap)
        if finite:
            keep.add(min(finite, key=values.__getitem__))  # type: ignore[arg-type]
            keep.add(max(finite, key=values.__getitem__))  # type: ignore[arg-type]
    return sorted(keep)


def running_mean(values: Sequence[float | None], window: float) -> Values:
    """Return the mean around each value; None stays None.

    `window` is a fraction of the curve. Infinities and NaN are excluded. At both ends the window
    shrinks and stays centred.

    >>> running_mean([1.0, 2.0, None, 6.0, 7.0], window=0.75)
    [1.0, 3.0, None, 5.0, 7.0]
    """
    present: list[int] = []
    sums = [0.0]  # of the first n values, so that each window is a difference of two sums
    for index, value in enumerate(values):
        if value is not None and math.isfinite(value):
            present.append(index)
            sums.append(sums[-1] + value)
    reach = int(len(present) * window) // 2
    means: Values = [None] * len(values)
    for number, index in enumerate(present):
        near = min(reach, number, len(present) - 1 - number)
        start = number - near
        end = number + near + 1
        means[index] = (sums[end] - sums[start]) / (end - start)
    return means


def choose_scale(curves: Sequence[Sequence[float]]) -> tuple[bool, tuple[float, float] | None]:
    """Return whether the curves need a log scale, and the vertical range or None.

    A short spike is cut off. A run that diverged many steps ago gets a log scale. Other figures get
    neither.

    >>> choose_scale([[1.0 + 0.01 * step for step in range(100)] + [80.0]])
    (False, (1.0, 2.91))
    >>> choose_scale([[1.0, 2.0, 1.5]] * 3 + [[1.0, 70.0, 80.0]])
    (True, None)
    >>> choose_scale([[2.0, 1.0, 0.5]])
    (False, None)
    """
    lowest = math.inf
    highest = -math.inf
    low = math.inf  # of trimmed curves
    high = -math.inf
    heights = []
    for curve in curves:
        finite = sorted(filter(math.isfinite, curve))
        if not finite:
            continue
        lowest = min(lowest, finite[0])
        highest = max(highest, finite[-1])
        bottom, top = trim(finite)
        low = min(low, bottom)
        high = max(high, top)
        heights.append(top - bottom)
    if not heights:
        return False, None
    height = high - low
    # Use the typical height, so that a diverging curve does not hide that all others are flat.
    typical = median_low(heights)
    if lowest > 0 and highest > _SPREAD * lowest and 0 < typical < _FLAT * height:
        return True, None
    if not (0 < _FLATTENED * height < highest - lowest < math.inf):
        return False, None
    # Add a height on each side, so that the steep start of a curve stays visible.
    bottom = max(lowest, low - height)
    top = min(highest, high + height)
    return False, (float(f"{bottom:.6g}"), float(f"{top:.6g}"))


def trim(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest of sorted values, without the outermost values."""
    cut = 0
    if len(values) >= _FEWEST:
        cut = math.ceil(_TRIMMED * len(values))
    return values[cut], values[-1 - cut]
