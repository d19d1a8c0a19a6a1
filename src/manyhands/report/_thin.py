"""A long curve in few points that looks the same.

The curve is cut into equal pieces, and of each piece the lowest and the highest point stay: a
single spike in a million steps remains visible, which every tenth point would not ensure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def thin(values: Sequence[float | None], most: int = 2000) -> list[int]:
    """The indices of about `most` values to draw; those that are None are never drawn.

    Where a piece holds a value that is not finite, its first one stays too: it is a gap.

    >>> thin([3.0, None, 1.0])
    [0, 2]
    >>> thin([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], most=4)
    [0, 1, 4, 6, 7]
    """
    there = [index for index, value in enumerate(values) if value is not None]
    if len(there) <= most:
        return there
    keep = {there[0], there[-1]}
    pieces = max(1, most // 2)
    for piece in range(pieces):
        start, end = (len(there) * edge // pieces for edge in (piece, piece + 1))
        finite = []
        gap = None
        for index in there[start:end]:
            if math.isfinite(values[index]):  # type: ignore[arg-type]
                finite.append(index)
            elif gap is None:
                gap = index
                keep.add(gap)
        if finite:
            keep.add(min(finite, key=values.__getitem__))  # type: ignore[arg-type]
            keep.add(max(finite, key=values.__getitem__))  # type: ignore[arg-type]
    return sorted(keep)
