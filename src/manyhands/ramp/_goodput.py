"""How many passes should a step have? Plain numbers: a step's time and its worth.

Time      a step of p passes takes         t(p) = a + b p              seconds (`_step_times.py`)
Scale     its batch is, in small batches,  S(p) = u p                  u: one pass on all workers
Worth     in steps of scale 1              r(S) = (v + s) / (v / S + s)       the gain, `_noise.py`
Goodput   worth per second                 r(u p) / t(p)

with s = |true gradient|^2 and v = the noise at scale 1. As a function of p the goodput is, up to a
constant, p / ((v + s u p) (a + b p)). Its maximum, where the derivative is zero, is at

    p* = sqrt((a / b) (v / s) / u)

so the batch u p* is the geometric mean of what communication allows (a / b) and of what the noise
allows (v / s, the noise scale). A whole number of passes is one of its two neighbours, because the
goodput rises before p* and falls after it.

Efficiency is the worth of a sample over that of a sample at scale 1: r(S) / S. It falls with S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.scaling._noise import gain


@dataclass(frozen=True)
class StepTime:
    """The time of a step: `fixed` seconds (a), and `per_pass` seconds for every pass (b)."""

    fixed: float
    per_pass: float

    def seconds(self, passes: int) -> float:
        """Return how long a step of so many passes takes.

        >>> StepTime(fixed=0.4, per_pass=0.1).seconds(4)
        0.8
        """
        return self.fixed + self.per_pass * passes


@dataclass(frozen=True)
class Noise:
    """The gradient's squared norm (s) and its noise at scale 1 (v)."""

    sqr: float
    var: float


def efficiency(noise: Noise, scale: float) -> float:
    """Return what a sample of a batch of `scale` is worth, in samples at scale 1.

    >>> efficiency(Noise(sqr=1.0, var=3.0), 4.0)
    0.5714285714285714
    """
    return gain(noise.sqr, noise.var, scale) / scale


def goodput(noise: Noise, time: StepTime, scale_per_pass: float, passes: int) -> float:
    """Return how many steps of scale 1 a second of such steps is worth."""
    return gain(noise.sqr, noise.var, scale_per_pass * passes) / time.seconds(passes)


def fastest_passes(noise: Noise, time: StepTime, scale_per_pass: float, most: int) -> int:
    """Return the number of passes, from 1 to `most`, that has the highest goodput.

    >>> fastest_passes(Noise(sqr=1.0, var=16.0), StepTime(4.0, 1.0), 1.0, most=64)
    8
    """
    ratio, noise_scale = _ratio(time.fixed, time.per_pass), _ratio(noise.var, noise.sqr)
    if ratio == 0.0 or noise_scale == 0.0:
        return 1
    best = math.sqrt(ratio) * math.sqrt(noise_scale) / math.sqrt(scale_per_pass)
    if best >= most:
        return most
    low = max(1, math.floor(best))
    high = min(low + 1, most)
    # the smaller batch if both are equal: it has seen fewer samples
    return max(
        (low, high), key=lambda passes: (goodput(noise, time, scale_per_pass, passes), -passes)
    )


def most_efficient_passes(noise: Noise, least: float, scale_per_pass: float, most: int) -> int:
    """Return the largest number of passes whose efficiency is at least `least`; at least 1.

    (v + s) / (v + s S) >= e  is  S <= (v (1 - e) / s + 1) / e.

    >>> most_efficient_passes(Noise(sqr=1.0, var=16.0), 0.8, 1.0, most=64)
    5
    """
    if noise.var + noise.sqr == 0.0:
        return 1
    largest = (_ratio(noise.var, noise.sqr) * (1.0 - least) + 1.0) / least
    if least >= 1.0 and noise.sqr > 0.0:
        largest = 1.0
    # the tolerance keeps a whole number that rounding made a little smaller
    passes = largest / scale_per_pass + 1e-9
    return most if passes >= most else max(1, math.floor(passes))


def _ratio(numerator: float, denominator: float) -> float:
    """Return the ratio; infinite if only the denominator is zero, and zero if both are."""
    if denominator > 0.0:
        return numerator / denominator
    return math.inf if numerator > 0.0 else 0.0
