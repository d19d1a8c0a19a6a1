"""How sure is the average of |true gradient|^2? Few steps of few passes say little about it.

A step with n small batches estimates sqr = |true gradient|^2 with the variance

    2 var^2 / (n (n - 1))        where noise dominates: var is the noise at scale 1 of a small batch

(`scaling/_noise.py` has the estimate; for Gaussian noise). An average with the weights w_k has the
variance sum of w_k^2 times theirs. Relative to var^2 it needs only n and the weights:

    error = sqrt(sum w_k^2 2 / (n_k (n_k - 1))) / sum w_k

`Ramp` decides with sqr + error var, one standard error above the average. Else a run would take
its first luck, an estimate near zero, for pure noise, and jump to the largest batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Evidence:
    """The standard error of the averaged |true gradient|^2, in units of the averaged noise."""

    squares: float = 0.0
    weight: float = 0.0

    def add(self, small_batches: int, smoothing: float) -> None:
        """Add a step; `smoothing` is the weight of the past in the average."""
        if small_batches < 2:
            return  # nothing was compared
        variance = 2.0 / (small_batches * (small_batches - 1))
        self.squares = smoothing**2 * self.squares + (1.0 - smoothing) ** 2 * variance
        self.weight = smoothing * self.weight + (1.0 - smoothing)

    @property
    def error(self) -> float:
        """The standard error; infinite as long as nothing was measured.

        >>> evidence = Evidence()
        >>> for _ in range(100):
        ...     evidence.add(small_batches=2, smoothing=0.999)
        >>> round(evidence.error, 3)  # sqrt(2 / (2 * 1) / 100)
        0.1
        """
        return math.sqrt(self.squares) / self.weight if self.weight else math.inf
