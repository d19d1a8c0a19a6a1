"""Compute the distance and the disagreement of workers in a block. Floats only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Drift:
    """How far the workers went in a block, and how far apart, from the lengths of a few vectors.

    n workers have moved by d_i from the anchor, and their mean is D. With a mean over workers
    written as < >,

        spread^2    <|d_i - D|^2>  =  <|d_i|^2> - |D|^2
        cosine      mean of d_i . d_j over all pairs, in units of <|d_i|^2>
                    =  (n |D|^2 - <|d_i|^2>) / ((n - 1) <|d_i|^2>)

    The cosine is 1 if all workers moved the same way, and 0 if their ways are unrelated. If workers
    count differently in the mean, by weights p_i that sum to 1, these are the weights of < > too:

        cosine      (|D|^2 - sum p_i^2 |d_i|^2) / ((1 - sum p_i^2) <|d_i|^2>)
    """

    distance: float = math.nan  # of the mean from the anchor
    spread: float = math.nan  # of the workers around their mean
    cosine: float = math.nan

    @classmethod
    def of(
        cls, squares: Sequence[float], square_of_mean: float, weights: Sequence[float] = ()
    ) -> Drift:
        """Return the drift from each worker's squared distance and the mean's.

        >>> Drift.of([25.0, 25.0], 16.0)  # (4, 3) and (4, -3)
        Drift(distance=4.0, spread=3.0, cosine=0.28)
        """
        n = len(squares)
        if n == 0:
            return cls()
        total = sum(weights)
        shares = [w / total for w in weights] if total > 0 else [1 / n] * n
        equal = min(shares) == max(shares)
        mean = sum(squares) / n if equal else _dot(shares, squares)
        if not math.isfinite(mean + square_of_mean):  # the square of 1e20 overflows a float32
            return cls()
        # Variance = mean square - square of the mean; rounding may make it negative.
        spread = math.sqrt(max(mean - square_of_mean, 0.0))
        if n == 1 or mean == 0.0:
            return cls(math.sqrt(square_of_mean), spread)
        # From |sum|^2 = sum of the squares + sum over the pairs, both divided by n.
        # Rounding may lead slightly out of [-1, 1].
        if equal:
            cosine = (n * square_of_mean - mean) / ((n - 1) * mean)
        else:
            alone = _dot([p * p for p in shares], squares)
            others = (1 - _dot(shares, shares)) * mean
            cosine = (square_of_mean - alone) / others if others > 0 else math.nan
        return cls(math.sqrt(square_of_mean), spread, max(-1.0, min(1.0, cosine)))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
