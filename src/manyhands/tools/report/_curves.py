"""Turn the columns of a run into curves: convert, smooth, thin out, and choose a scale.

    thin           Cut the curve into equal intervals, and keep the lowest and the highest value of
                   each. A single spike in a million steps stays visible; it would be lost if every
                   tenth value were drawn.
    running_mean   Smooth a noisy curve: the mean of the values around each value.
    choose_scale   Keep a run that diverges from flattening all other curves of its figure.

A value is None where a line of the record does not have the value. Records may come from strangers:
`numbers` lets no text through.
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

Values: TypeAlias = list[float | None]  # one for each line of a record

THROUGHPUT = "throughput"  # a computed column
# Columns that are drawn dotted in the figure of another column, and their names there.
DOTTED = {"scale": ("target_scale", "target"), "step_seconds": ("predicted_seconds", "predicted")}
WINDOWS = {"0.5 %": 0.005, "2 %": 0.02, "10 %": 0.1}  # fractions of the run, for running means
WINDOW = 0.02  # the page's first choice
_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
_LONG = 200  # a curve of more values is also drawn as its running mean
_POINTS = 2000  # of a curve, about
_FEWER = 4  # a running mean is drawn with a quarter of the points
_INTERVALS = 200  # intervals of the run in which the throughput is measured


@dataclass(frozen=True)
class Curve:
    """One line in a figure; `x` has one list for each axis that the reader can choose.

    `window` is that of a running mean, 0 for the values under a running mean, and None for a curve
    that is not smoothed.
    """

    run: int
    label: str
    dash: str
    x: dict[str, Values]
    y: list[float]
    window: float | None = None


def batch_size(run: Run) -> float | None:
    """Return the samples of a small batch, if the record has a valid number."""
    return to_positive(run.header.get("batch_size"))


def samples(run: Run) -> Values:
    """Return the samples seen up to each line: None without a batch size."""
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


def work_done(run: Run) -> Values:
    """Return the samples seen up to each line; the steps, if the batch size is unknown."""
    if batch_size(run) is None:
        return numbers(run, "step")
    return samples(run)


def throughput(run: Run) -> Values:
    """Return the rate in equal intervals of the run, at the last line of each interval."""
    done = work_done(run)
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
    """Return a column with None for every value that is not a number, also if it is missing."""
    # A record may come from a stranger. No text of its values gets past this function.
    if column not in run.columns:
        return [None] * len(run.lines)
    return [_to_number(value) for value in run.column(column)]


def _to_number(value: object) -> float | None:
    """Return a number within the range of floats or infinity, and None for anything else."""
    if not isinstance(value, int | float):
        return None
    if value > sys.float_info.max:  # also a whole number beyond all floats
        return math.inf
    if value < -sys.float_info.max:
        return -math.inf
    return value


def progress_values(run: Run) -> Values | None:
    """Return the progress of each line, or None if no line has a progress."""
    values = numbers(run, "progress")
    if not any(value is not None for value in values):
        return None
    return values


def curves_of(key: str, index: int, run: Run, label: str) -> list[Curve]:
    """Return all curves of one run in the figure of `key`, thinned out."""
    curves: list[Curve] = []
    positions = _positions(run)

    def draw(groups: list[Values], label: str, dash: str = "", window: float | None = None) -> None:
        """Add a curve for each parameter group."""
        distinct: list[Values] = []
        for group in groups:
            if group not in distinct:  # equal curves would cover each other
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
        # The rate in use is the schedule's, for the small batch, times the rule's factor.
        applied: list[Values] = []
        for rate, factor in zip(groups, factors, strict=False):
            applied.append(_product(rate, factor))
        draw(applied, label)
        draw(groups, f"{label}, small batch", dash="dot")
    elif key in run.own and any(_is_long(group) for group in groups):
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


def _is_long(values: Values) -> bool:
    return len(values) - values.count(None) > _LONG


def _groups_of(run: Run, key: str) -> list[Values]:
    """Return the values of `key`, or those of each parameter group."""
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
    """Return the position of each line on each of the axes that a reader can choose."""
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


# -- one curve, in plain numbers -------------------------------------------------------------------

_TRIMMED = 0.02  # fraction of a curve's values at either end that does not count towards the range
_FEWEST = 20  # a curve of fewer values is not trimmed
_FLATTENED = 4.0  # values are cut off if the curves are this much higher than the trimmed curves
_FLAT = 0.1  # fraction of the figure's height; a lower typical curve asks for a log scale
_SPREAD = 10.0  # highest over lowest value from which a log scale separates the curves


def thin(values: Sequence[float | None], most: int = _POINTS) -> list[int]:
    """Return the indices of about `most` values to draw. None is left out.

    The first value of an interval that is not finite stays too: it is drawn as a gap.

    >>> thin([3.0, None, 1.0])
    [0, 2]
    >>> thin([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], most=4)
    [0, 1, 4, 6, 7]
    """
    present = [index for index, value in enumerate(values) if value is not None]
    if len(present) <= most:
        return present
    keep = {present[0], present[-1]}
    intervals = max(1, most // 2)  # two values of each are kept
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
    """Return at each value the mean of the values around it; None stays None.

    `window` is a fraction of the curve. Values that are not finite are left out of every mean. At
    both ends the window shrinks, so that it stays centred on its value.

    >>> running_mean([1.0, 2.0, None, 6.0, 7.0], window=0.75)
    [1.0, 3.0, None, 5.0, 7.0]
    """
    present: list[int] = []
    sums = [0.0]  # of the first n values: a window's sum is a difference of two
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
    """Return whether a figure of these curves needs a log scale, and the range to show, or None.

    A short spike is cut off. A run that diverged many steps ago is shown with the other runs on a
    log scale. Curves that a linear scale shows well get neither.

    >>> choose_scale([[1.0 + 0.01 * step for step in range(100)] + [80.0]])
    (False, (1.0, 2.91))
    >>> choose_scale([[1.0, 2.0, 1.5]] * 3 + [[1.0, 70.0, 80.0]])
    (True, None)
    >>> choose_scale([[2.0, 1.0, 0.5]])
    (False, None)
    """
    lowest = math.inf
    highest = -math.inf
    low = math.inf  # of the trimmed curves
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
    # The typical curve decides, so a curve that diverges does not hide that all others are flat.
    typical = median_low(heights)
    if lowest > 0 and highest > _SPREAD * lowest and 0 < typical < _FLAT * height:
        return True, None
    if not (0 < _FLATTENED * height < highest - lowest < math.inf):
        return False, None
    # Show one more height on each side, so that a curve's steep start stays visible.
    bottom = max(lowest, low - height)
    top = min(highest, high + height)
    return False, (float(f"{bottom:.6g}"), float(f"{top:.6g}"))


def trim(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of sorted values, without the outermost at either end."""
    cut = 0
    if len(values) >= _FEWEST:
        cut = math.ceil(_TRIMMED * len(values))
    return values[cut], values[-1 - cut]
