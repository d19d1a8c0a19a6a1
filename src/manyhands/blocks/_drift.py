"""How far the workers went in a block, and how far apart, from the lengths of a few vectors.

n workers have moved by d_i from the anchor, and their mean is D. With a mean over workers written
as < >,

    spread^2    <|d_i - D|^2>  =  <|d_i|^2> - |D|^2
    cosine      mean of d_i . d_j over all pairs, in units of <|d_i|^2>
                =  (n |D|^2 - <|d_i|^2>) / ((n - 1) <|d_i|^2>)

The cosine is 1 where all went the same way and 0 where each went its own. All here are floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Drift:
    """What one meeting has found."""

    distance: float = math.nan  # of the mean from the anchor
    spread: float = math.nan  # of the workers around their mean
    cosine: float = math.nan

    @classmethod
    def of(cls, squares: Sequence[float], square_of_mean: float) -> Drift:
        """From each worker's squared distance, and that of the mean.

        >>> Drift.of([25.0, 25.0], 16.0)  # (4, 3) and (4, -3)
        Drift(distance=4.0, spread=3.0, cosine=0.28)
        """
        n = len(squares)
        if n == 0:
            return cls()
        mean = sum(squares) / n
        if not math.isfinite(mean + square_of_mean):  # numbers near 1e19, whose squares overflow
            return cls()
        spread = math.sqrt(max(mean - square_of_mean, 0.0))
        if n == 1 or mean == 0.0:
            return cls(math.sqrt(square_of_mean), spread)
        cosine = (n * square_of_mean - mean) / ((n - 1) * mean)
        return cls(math.sqrt(square_of_mean), spread, max(-1.0, min(1.0, cosine)))
