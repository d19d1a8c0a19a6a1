"""How noisy is a gradient? Two norms in, two unbiased estimates out.

n small batches give gradients g_1 ... g_n; their mean is G. Then

    E |g_i|^2 = sqr + var          sqr = |true gradient|^2
    E |G|^2   = sqr + var / n      var = trace of the covariance of one g_i

and solving the pair for (sqr, var) gives `estimate`. `var` is then restated for a batch of
scale 1: with n small batches making up a batch of scale S, one of them has scale S / n, and
the noise of a mean falls with its size, so var(scale 1) = var(one small batch) * S / n.

`gain` is AdaScale's r (Johnson et al. 2020, eq. 5): how many scale-1 steps one step at
scale S is worth. It is 1 where gradients agree and S where they are all noise.

Everything here is plain floats: no tensors, no process groups. What is left out: smoothing
over steps (`_averages.py`) and where the norms come from (`_tap.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VAR_FLOOR = 1e-6
SQR_FLOOR = 0.0


@dataclass(frozen=True)
class Reading:
    """What one step measured, per parameter group.

    `squares` sums |g_i|^2 over all `count` small batches; `mean` is |G|^2.
    """

    squares: tuple[float, ...]
    mean: tuple[float, ...]
    count: int
    scale: float
    differenced: bool = False
    unit: str = "plain"  # or "preconditioned": what the norms were taken of

    def divided_by(self, loss_scale: float) -> Reading:
        """The same reading of gradients that were not multiplied with a loss scale."""
        squared = loss_scale * loss_scale
        return Reading(
            tuple(value / squared for value in self.squares),
            tuple(value / squared for value in self.mean),
            self.count,
            self.scale,
            self.differenced,
            self.unit,
        )


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates from one step, per parameter group; either may be negative."""

    sqr: tuple[float, ...]
    var: tuple[float, ...]


def estimate(reading: Reading) -> Estimate:
    """Solve the two expectations for |true gradient|^2 and the noise at scale 1."""
    n, scale = reading.count, reading.scale
    if n < 2:
        raise ValueError(f"noise needs at least 2 gradients to compare, got {n}.")
    pairs = [(total / n, mean) for total, mean in zip(reading.squares, reading.mean, strict=True)]
    return Estimate(
        sqr=tuple((n * mean - small) / (n - 1) for small, mean in pairs),
        var=tuple((small - mean) * scale / (n - 1) for small, mean in pairs),
    )


def gain(sqr: float, var: float, scale: float) -> float:
    """How many steps at scale 1 one step at `scale` is worth.

    >>> gain(sqr=1.0, var=3.0, scale=4.0)
    2.2857142857142856
    >>> gain(sqr=1.0, var=0.0, scale=4.0)  # no noise: a larger batch brings nothing
    1.0
    >>> gain(sqr=0.0, var=1.0, scale=4.0)  # all noise: it brings everything
    4.0
    >>> gain(sqr=0.0, var=0.0, scale=4.0)  # no gradient: nothing says that it would bring anything
    1.0
    """
    large_batch = var / scale + sqr
    if scale == 1.0 or large_batch == 0.0:
        return 1.0
    return (var + sqr) / large_batch


def checked_var_floor(var_floor: float) -> float:
    """The floor of the noise, if it is one."""
    if not var_floor >= 0.0:
        raise ValueError(f"var_floor must not be negative, got {var_floor}.")
    return float(var_floor)


def floored(values: Sequence[float], floor: float) -> tuple[float, ...]:
    """Each value, or the floor where it is below."""
    return tuple(max(value, floor) for value in values)
