"""How far the workers went in a block, and how far apart, from the lengths of a few vectors.

n workers have moved by d_i from the anchor, and their mean is D. With a mean over workers written
as < >,

    spread^2    <|d_i - D|^2>  =  <|d_i|^2> - |D|^2
    cosine      mean of d_i . d_j over all pairs, in units of <|d_i|^2>
                =  (n |D|^2 - <|d_i|^2>) / ((n - 1) <|d_i|^2>)

The cosine is 1 if all workers moved the same way, and 0 if their ways are unrelated. All numbers
here are floats: no tensors, no process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Drift:
    """What one sync round has measured."""

    distance: float = math.nan  # of the mean from the anchor
    spread: float = math.nan  # of the workers around their mean
    cosine: float = math.nan

    @classmethod
    def of(cls, squares: Sequence[float], square_of_mean: float) -> Drift:
        """Return the drift from each worker's squared distance and the mean's.

        >>> Drift.of([25.0, 25.0], 16.0)  # (4, 3) and (4, -3)
        Drift(distance=4.0, spread=3.0, cosine=0.28)
        """
        n = len(squares)
        if n == 0:
            return cls()
        mean = sum(squares) / n
        if not math.isfinite(mean + square_of_mean):  # the square of 1e20 overflows a float32
            return cls()
        spread = math.sqrt(max(mean - square_of_mean, 0.0))
        if n == 1 or mean == 0.0:
            return cls(math.sqrt(square_of_mean), spread)
        # Rounding may lead slightly out of [-1, 1].
        cosine = (n * square_of_mean - mean) / ((n - 1) * mean)
        return cls(math.sqrt(square_of_mean), spread, max(-1.0, min(1.0, cosine)))
