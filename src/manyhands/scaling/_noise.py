"""How noisy is a gradient? Two norms in, two unbiased estimates out.

n small batches give gradients g_1 ... g_n; their mean is G. Then

    E |g_i|^2 = sqr + var          sqr = |true gradient|^2
    E |G|^2   = sqr + var / n      var = trace of the covariance of one g_i

and solving the pair for (sqr, var) gives `estimate`. `var` is then restated for a batch of
scale 1: if n small batches make up a batch of scale S, one of them has scale S / n, and the
noise of a mean falls with the batch size, so var(scale 1) = var(one small batch) * S / n.

`gain` is AdaScale's r (Johnson et al. 2020, eq. 5): how many scale-1 steps one step at
scale S is worth. It is 1 if the gradients agree and S if they are pure noise.

Everything here is plain floats: no tensors, no process groups. Smoothing over steps is in
`_averages.py`; the norms come from `_tap.py` and `_mean_gradient.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# The noise has a positive floor, as in fairscale and adaptdl, so that a gain is defined even if
# no noise was seen. The squared signal can only be cut off at zero.
VAR_FLOOR = 1e-6
SQR_FLOOR = 0.0


@dataclass(frozen=True)
class NormSums:
    """The squared norms that one step measured, per parameter group.

    `small_squares` is the sum of |g_i|^2 over all `small_batches`; `mean_square` is |G|^2.
    """

    small_squares: tuple[float, ...]
    mean_square: tuple[float, ...]
    small_batches: int
    scale: float
    consecutive: bool = False  # the "small batches" are the gradients of two consecutive steps
    norm_kind: str = "plain"  # or "preconditioned": see `_norm_kinds.py`

    def unscale(self, loss_scale: float) -> NormSums:
        """Return the sums for gradients that are not multiplied by a loss scale."""
        squared = loss_scale * loss_scale
        return replace(
            self,
            small_squares=tuple(value / squared for value in self.small_squares),
            mean_square=tuple(value / squared for value in self.mean_square),
        )

    @property
    def all_finite(self) -> bool:
        """Whether every gradient of the step was finite."""
        return all(map(math.isfinite, (*self.small_squares, *self.mean_square)))


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates from one step, per parameter group; either may be negative."""

    sqr: tuple[float, ...]
    var: tuple[float, ...]


def estimate(sums: NormSums) -> Estimate:
    """Solve the two expectations for |true gradient|^2 and the noise at scale 1."""
    n, scale = sums.small_batches, sums.scale
    if n < 2:
        raise ValueError(f"noise needs at least 2 gradients to compare, got {n}.")
    pairs = [
        (total / n, mean) for total, mean in zip(sums.small_squares, sums.mean_square, strict=True)
    ]
    return Estimate(
        sqr=tuple((n * mean - small) / (n - 1) for small, mean in pairs),
        # var of one small batch is (small - mean) * n / (n - 1); times scale / n: at scale 1
        var=tuple((small - mean) * scale / (n - 1) for small, mean in pairs),
    )


def gain(sqr: float, var: float, scale: float) -> float:
    """Return how many steps at scale 1 one step at `scale` is worth.

    >>> gain(sqr=1.0, var=3.0, scale=4.0)
    2.2857142857142856
    >>> gain(sqr=1.0, var=0.0, scale=4.0)  # no noise: a larger batch gains nothing
    1.0
    >>> gain(sqr=0.0, var=1.0, scale=4.0)  # pure noise: a larger batch gains everything
    4.0
    >>> gain(sqr=0.0, var=0.0, scale=4.0)  # no gradient: no evidence that more samples help
    1.0
    """
    large_batch = var / scale + sqr
    if scale == 1.0 or large_batch == 0.0:
        return 1.0
    return (var + sqr) / large_batch


def check_var_floor(var_floor: float) -> float:
    """Return the floor of the noise, or raise if it is negative."""
    # `not >=` instead of `<`, so that NaN is rejected too
    if not var_floor >= 0.0:
        raise ValueError(f"var_floor must not be negative, got {var_floor}.")
    return float(var_floor)


def apply_floor(values: Sequence[float], floor: float) -> tuple[float, ...]:
    """Return the values, with those below `floor` replaced by it."""
    return tuple(max(value, floor) for value in values)
