"""A long or uneven curve as a reader can take it in: fewer points, a mean, a vertical range.

    thin           Cut the curve into equal chunks, and keep the lowest and the highest value of
                   each: a single spike in a million steps stays visible, which every tenth value
                   would not ensure.
    running_mean   The course of a noisy curve: the mean of the values around each one.
    choose_scale   One run that diverges must not flatten all other curves of its figure.

Everything here is lists of plain numbers. None is a line of the record without the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

_TRIMMED = 0.02  # of a curve's values, at either end, do not count towards the range
_FEWEST = 20  # values of a curve from which any are trimmed; a short curve is drawn whole
_FLATTENED = 4.0  # times as high as the trimmed curves: from here on, values are cut off
_FLAT = 0.1  # of the figure's height: a typical curve lower than this asks for a log scale
_WIDE = 10.0  # highest over lowest value from which a log scale separates the curves


def thin(values: Sequence[float | None], most: int = 2000) -> list[int]:
    """Return the indices of about `most` values to draw, without those that are None.

    If a chunk holds a value that is not finite, its first one stays too: it is a gap.

    >>> thin([3.0, None, 1.0])
    [0, 2]
    >>> thin([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], most=4)
    [0, 1, 4, 6, 7]
    """
    present = [index for index, value in enumerate(values) if value is not None]
    if len(present) <= most:
        return present
    keep = {present[0], present[-1]}
    chunks = max(1, most // 2)  # two values of each are kept
    for chunk in range(chunks):
        start, end = (len(present) * edge // chunks for edge in (chunk, chunk + 1))
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


def running_mean(values: Sequence[float | None], window: float) -> list[float | None]:
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
    means: list[float | None] = [None] * len(values)
    for number, index in enumerate(present):
        near = min(reach, number, len(present) - 1 - number)
        start, end = number - near, number + near + 1
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
    lowest, highest = min(v[0] for v in finite), max(v[-1] for v in finite)
    trimmed = [_trim(values) for values in finite]
    low, high = min(low for low, _ in trimmed), max(high for _, high in trimmed)
    height = high - low
    # The typical curve decides, so one that diverges does not hide that all others are flat.
    typical = median_low(top - bottom for bottom, top in trimmed)
    if lowest > 0 and highest > _WIDE * lowest and 0 < typical < _FLAT * height:
        return True, None
    if not (0 < _FLATTENED * height < highest - lowest < math.inf):
        return False, None
    # At most one height more on each side: a curve's steep beginning stays in sight.
    bottom, top = max(lowest, low - height), min(highest, high + height)
    return False, (float(f"{bottom:.6g}"), float(f"{top:.6g}"))


def _trim(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of sorted values, without the outermost at either end."""
    cut = math.ceil(_TRIMMED * len(values)) if len(values) >= _FEWEST else 0
    return values[cut], values[-1 - cut]
