"""A noisy curve's course: the mean of the values around each point."""

from __future__ import annotations

import math
from collections.abc import Sequence


def running_mean(values: Sequence[float | None], window: float) -> list[float | None]:
    """At each value the mean over the nearest `window` (a share of all); None stays None.

    Values that are not finite are left out of every mean. At both ends the window shrinks, so
    that it lies as far to the left of its point as to the right.

    >>> running_mean([1.0, 2.0, None, 6.0, 7.0], window=0.75)
    [1.0, 3.0, None, 5.0, 7.0]
    """
    there: list[int] = []
    sums = [0.0]
    for index, value in enumerate(values):
        if value is not None and math.isfinite(value):
            there.append(index)
            sums.append(sums[-1] + value)
    reach = int(len(there) * window) // 2
    means: list[float | None] = [None] * len(values)
    for number, index in enumerate(there):
        near = min(reach, number, len(there) - 1 - number)
        start, end = number - near, number + near + 1
        means[index] = (sums[end] - sums[start]) / (end - start)
    return means
