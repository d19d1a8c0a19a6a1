"""A run's columns as curves: in plain numbers, thinned out, smoothed, on a scale that shows them.

A long or uneven curve is drawn as a reader can take it in:

    thin           Cut the curve into equal intervals, and keep the lowest and the highest value of
                   each: a single spike in a million steps stays visible, which every tenth value
                   would not ensure.
    running_mean   The course of a noisy curve: the mean of the values around each one.
    choose_scale   One run that diverges must not flatten all other curves of its figure.

A value is None where a line of the record does not have it. A record may come from a stranger: no
text of its values gets past `numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from statistics import median_low
from typing import TypeAlias

from manyhands.tools.record import Run
from manyhands.tools.record._run import count_small_batches, to_positive

Values: TypeAlias = list[float | None]  # one for each line of a record

THROUGHPUT = "throughput"  # a column that is computed
# Values that are drawn dotted in the figure of another one, and what the curve is called there.
DOTTED = {"scale": ("target_scale", "target"), "step_seconds": ("predicted_seconds", "predicted")}
WINDOWS = {"0.5 %": 0.005, "2 %": 0.02, "10 %": 0.1}  # of the run, for the running mean
WINDOW = 0.02  # that a page begins with
_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
_LONG = 200  # a curve of more values is also drawn as its running mean
_FEWER = 4  # a running mean needs so many times fewer points
_INTERVALS = 200  # in each of which the throughput is measured


@dataclass(frozen=True)
class Curve:
    """One line in a figure; `x` has one list for each axis the reader can choose.

    `window` is that of a running mean, 0 for the values that it smooths, and None for a curve that
    is always drawn.
    """

    run: int
    label: str
    dash: str
    x: dict[str, Values]
    y: list[float]
    window: float | None = None


def batch_size(run: Run) -> float | None:
    """Return the samples of a small batch, if the record says so; a stranger may say anything."""
    return to_positive(run.header.get("batch_size"))


def samples(run: Run) -> Values:
    """Return how many samples were seen up to each line: None without a batch size."""
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


def throughput(run: Run) -> tuple[list[int], list[float]]:
    """Return the rate in equal intervals of the run, and the index of each interval's last line."""
    if len(run.lines) < 2:
        return [], []
    done = samples(run)
    times = numbers(run, "time")
    if done[0] is None:
        done = numbers(run, "step")
    last = len(run.lines) - 1
    edges = sorted({last * edge // _INTERVALS for edge in range(_INTERVALS + 1)})
    indices = []
    rates = []
    for start, end in pairwise(edges):
        seconds = times[end] - times[start]  # type: ignore[operator]
        if seconds > 0:
            indices.append(end)
            rates.append((done[end] - done[start]) / seconds)  # type: ignore[operator]
    return indices, rates


def numbers(run: Run, column: str) -> Values:
    """Return a column with None for every value that is not a number."""
    # A record may come from a stranger. No text of its values gets past this function.
    return [_to_number(value) for value in run.column(column)]


def _to_number(value: object) -> float | None:
    """Return the value as a float, of however many digits; None if it is no number."""
    if not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.copysign(math.inf, value > 0 or -1)


def is_long(values: Values) -> bool:
    return sum(value is not None for value in values) > _LONG


def curves_of(key: str, index: int, run: Run, label: str, most: int) -> Iterator[Curve]:
    """Yield all curves of one run in the figure of `key`."""

    def draw(
        groups: list[Values], label: str, dash: str = "", window: float | None = None
    ) -> Iterator[Curve]:
        """Yield a curve for each parameter group, thinned, that shares a label and a style."""
        for number, values in enumerate(groups):
            if kept := thin(values, most // _FEWER if window else most):
                yield Curve(
                    run=index,
                    label=label if len(groups) == 1 else f"{label}, group {number}",
                    dash=dash or _DASHES[number % len(_DASHES)],
                    x={axis: [x[at] for at in kept] for axis, x in positions.items()},
                    y=[values[at] for at in kept],  # type: ignore[misc]
                    window=window,
                )

    positions = _positions(run)
    if key == THROUGHPUT and key not in run.columns:
        known = dict(zip(*throughput(run), strict=True))
        if known:
            yield from draw([[known.get(at) for at in range(len(run.lines))]], label)
        return
    groups = [numbers(run, column) for column in _group_columns(run, key)]
    factors = [numbers(run, column) for column in _group_columns(run, "factor")]
    if key == "lr" and factors:
        applied = [_product(rate, factor) for rate, factor in zip(groups, factors, strict=False)]
        # The rate in use is the schedule's, for the small batch, times the rule's factor.
        yield from draw(_distinct(applied), label)
        yield from draw(_distinct(groups), f"{label}, small batch", dash="dot")
    elif key in run.own and any(is_long(group) for group in groups):
        yield from draw(groups, label, window=0.0)
        for window in WINDOWS.values():
            yield from draw([running_mean(each, window) for each in groups], label, window=window)
    else:
        yield from draw(_distinct(groups), label)
        column, name = DOTTED.get(key, ("", ""))
        if column in run.columns:
            yield from draw([numbers(run, column)], f"{label}, {name}", dash="dot")


def _group_columns(run: Run, key: str) -> list[str]:
    """Return `key` itself, or one column for each parameter group."""
    known = set(run.columns)  # a list would be searched anew for each group
    groups = takewhile(known.__contains__, (f"{key}/{index}" for index in count()))
    return [*([key] if key in known else []), *groups]


def _distinct(groups: list[Values]) -> list[Values]:
    """Drop groups that repeat an earlier one: equal curves would cover each other."""
    return [group for index, group in enumerate(groups) if group not in groups[:index]]


def _positions(run: Run) -> dict[str, Values]:
    """Return where each line is on each of the axes that a reader can choose."""
    steps = numbers(run, "step")
    progress = progress_values(run)
    return {
        "progress": steps if progress is None else progress,
        "step": steps,
        "time": numbers(run, "time"),
        "samples": samples(run),
    }


def progress_values(run: Run) -> Values | None:
    """Return the progress of each line, or None if no line has one."""
    values = numbers(run, "progress") if "progress" in run.columns else []
    return values if any(value is not None for value in values) else None


def _product(first: Values, second: Values) -> Values:
    pairs = zip(first, second, strict=True)
    return [None if one is None or two is None else one * two for one, two in pairs]


# -- one curve, in plain numbers; None is a line of the record without the value -------------------

_TRIMMED = 0.02  # of a curve's values, at either end, do not count towards the range
_FEWEST = 20  # values of a curve from which any are trimmed; a short curve is drawn whole
_FLATTENED = 4.0  # times as high as the trimmed curves: from here on, values are cut off
_FLAT = 0.1  # of the figure's height: a typical curve lower than this asks for a log scale
_SPREAD = 10.0  # highest over lowest value from which a log scale separates the curves


def thin(values: Sequence[float | None], most: int = 2000) -> list[int]:
    """Return the indices of about `most` values to draw, without those that are None.

    If an interval holds a value that is not finite, its first one stays too: it is a gap.

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
    for interval in range(intervals):
        start, end = (len(present) * edge // intervals for edge in (interval, interval + 1))
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
    """Return at each value the mean over the nearest `window` of all values; None stays None.

    `window` is a fraction of the curve. Values that are not finite are left out of every mean. At
    both ends the window shrinks, so that it reaches as far to the left of its value as to the
    right.

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
    """Return whether a figure of these curves wants a log scale, and the range to show, or None.

    A short spike is cut off. A run that has diverged for long is shown beside the others on a log
    scale. Curves that a linear scale shows well get neither.

    >>> choose_scale([[1.0 + 0.01 * step for step in range(100)] + [80.0]])
    (False, (1.0, 2.91))
    >>> choose_scale([[1.0, 2.0, 1.5]] * 3 + [[1.0, 70.0, 80.0]])
    (True, None)
    >>> choose_scale([[2.0, 1.0, 0.5]])
    (False, None)
    """
    finite = [sorted(filter(math.isfinite, curve)) for curve in curves]
    finite = [values for values in finite if values]
    if not finite:
        return False, None
    lowest = min(v[0] for v in finite)
    highest = max(v[-1] for v in finite)
    trimmed = [trim(values) for values in finite]
    low = min(low for low, _ in trimmed)
    high = max(high for _, high in trimmed)
    height = high - low
    # The typical curve decides, so one that diverges does not hide that all others are flat.
    typical = median_low(top - bottom for bottom, top in trimmed)
    if lowest > 0 and highest > _SPREAD * lowest and 0 < typical < _FLAT * height:
        return True, None
    if not (0 < _FLATTENED * height < highest - lowest < math.inf):
        return False, None
    # At most one height more on each side: a curve's steep beginning stays in sight.
    bottom = max(lowest, low - height)
    top = min(highest, high + height)
    return False, (float(f"{bottom:.6g}"), float(f"{top:.6g}"))


def trim(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of sorted values, without the outermost at either end."""
    cut = math.ceil(_TRIMMED * len(values)) if len(values) >= _FEWEST else 0
    return values[cut], values[-1 - cut]
