"""Decide the number of passes of the next step, by pure functions of the measurements.

All ranks have equal measurements, and make equal decisions. With an `AdaptiveDataLoader`, a "pass"
in this file is a unit: a rank's part of the small batch (`_micro_batches.py`).

Time      a step of p passes takes         t(p) = a + b p              seconds (`_observed.py`)
Scale     the batch in small batches       S(p) = u p                  u: one pass on all workers
Worth     in steps of scale 1              r(S) = (v + s) / (v / S + s)       the gain, `_noise.py`
Goodput   worth per second                 r(u p) / t(p)

with s = |true gradient|^2 and v = the noise at scale 1. As a function of p the goodput is, up to a
constant, p / ((v + s u p) (a + b p)). The derivative is zero at the maximum

    p* = sqrt((a / b) (v / s) / u)

The batch u p* is the geometric mean of u a / b, where the passes take as long as the rest of the
step, and v / s, the noise scale. The goodput rises before p* and falls after p*, so the best
integer is a neighbor of p*.

Efficiency is the worth of a sample relative to scale 1: r(S) / S. It falls with S.

With `goal="samples"`, a step costs S plus a fixed c small batches (McCandlish et al. 2018). The
best batch is S* = sqrt(c v / s). With c = 4 (1 - e) / e^2, the efficiency there is at least e for
any noise: c = 0.8 gives at least 0.85.

Reasons for a decision:

    explore    try a different number of passes: the noise is unknown or out of date, or only a
               single number of passes was timed
    grow       move towards the best number, by up to the factor `GROWTH`
    shrink     move towards the best number, likewise
    stay       the improvement is below `MARGIN`, which prevents oscillation
    wait       no decision was made yet
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.scaling._noise import gain

PRICE_OF_A_STEP = 0.8  # in small batches, with goal="samples"
CAUTION = 0.7  # standard errors
GROWTH = 2.0  # the largest factor by which a decision changes the passes
MARGIN = 0.01  # minimum relative improvement of the goodput

Goal = Literal["time", "samples", "steps"]
Reason = Literal["explore", "grow", "shrink", "stay", "wait"]


@dataclass(frozen=True)
class StepTime:
    """The time of a step: `fixed` seconds (a) plus `per_pass` seconds per pass (b)."""

    fixed: float
    per_pass: float

    def seconds(self, passes: int) -> float:
        """Return the seconds of a step with this number of passes.

        >>> StepTime(fixed=0.4, per_pass=0.1).seconds(4)
        0.8
        """
        return self.fixed + self.per_pass * passes


@dataclass(frozen=True)
class Noise:
    """The gradient's squared norm (s) and noise at scale 1 (v)."""

    sqr: float
    var: float
    error: float = 0.0  # the standard error of `sqr`, in units of `var`

    def shifted(self, errors: float) -> Noise:
        return Noise(max(self.sqr + errors * self.error * self.var, 0.0), self.var)


def efficiency(noise: Noise, scale: float) -> float:
    """Return the worth of a sample in a batch of `scale`, in samples at scale 1.

    >>> efficiency(Noise(sqr=1.0, var=3.0), 4.0)
    0.5714285714285714
    """
    return gain(noise.sqr, noise.var, scale) / scale


def goodput(noise: Noise, time: StepTime, scale_per_pass: float, passes: int) -> float:
    return gain(noise.sqr, noise.var, scale_per_pass * passes) / time.seconds(passes)


def fastest_passes(noise: Noise, time: StepTime, scale_per_pass: float, most: int) -> int:
    """Return the number of passes, from 1 to `most`, with the highest goodput.

    >>> fastest_passes(Noise(sqr=1.0, var=16.0), StepTime(4.0, 1.0), 1.0, most=64)
    8
    """
    ratio = _ratio(time.fixed, time.per_pass)
    noise_scale = _ratio(noise.var, noise.sqr)
    if ratio == 0.0 or noise_scale == 0.0:
        return 1
    best = math.sqrt(ratio) * math.sqrt(noise_scale) / math.sqrt(scale_per_pass)
    if best >= most:
        return most
    low = max(1, math.floor(best))
    high = min(low + 1, most)
    # On a tie, the smaller batch takes fewer samples.
    return max((low, high), key=lambda n: (goodput(noise, time, scale_per_pass, n), -n))


def most_efficient_passes(noise: Noise, least: float, scale_per_pass: float, most: int) -> int:
    """Return the largest number of passes with an efficiency of `least` or more; at least 1.

    (v + s) / (v + s S) >= e  is  S <= (v (1 - e) / s + 1) / e.

    >>> most_efficient_passes(Noise(sqr=1.0, var=16.0), 0.8, 1.0, most=64)
    5
    """
    if noise.var + noise.sqr == 0.0:
        return 1
    largest = (_ratio(noise.var, noise.sqr) * (1.0 - least) + 1.0) / least
    if least >= 1.0 and noise.sqr > 0.0:
        largest = 1.0
    # The tolerance corrects rounding.
    passes = largest / scale_per_pass + 1e-9
    return most if passes >= most else max(1, math.floor(passes))


def _ratio(numerator: float, denominator: float) -> float:
    """Return the ratio: infinity for a zero denominator, and zero for 0 / 0."""
    if denominator > 0.0:
        return numerator / denominator
    return math.inf if numerator > 0.0 else 0.0


@dataclass(frozen=True)
class Limits:
    goal: Goal = "time"
    efficiency: float | None = None  # with goal="samples": minimum worth of a sample
    most: int = 1  # passes


@dataclass(frozen=True)
class Decision:
    passes: int
    reason: Reason
    target: int  # the best number of passes, towards which `passes` moves


def decide(
    passes: int,
    noise: Noise | None,
    time: StepTime | None,
    scale_per_pass: float,
    limits: Limits,
    timed_here: bool = True,
) -> Decision:
    """Return the next number of passes, after steps with `passes`.

    `timed_here` says whether enough steps with this number of passes were timed.

    >>> limits = Limits(most=64)
    >>> decide(1, Noise(1.0, 64.0), None, 1.0, limits).reason
    'explore'
    >>> decide(2, Noise(1.0, 64.0), StepTime(4.0, 1.0), 1.0, limits)
    Decision(passes=4, reason='grow', target=16)
    """
    passes_here = min(passes, limits.most)
    if limits.goal == "steps" or limits.most == 1:
        target = limits.most
    elif noise is None:
        # A single gradient on a single worker gives no estimate of the noise.
        other = passes_here + 1 if passes_here < limits.most else passes_here - 1
        return Decision(other, "explore", other)
    elif limits.goal == "time" and time is None:
        # Time enough steps with this number of passes, then try a different number.
        other = _neighbouring_passes(passes_here, limits.most) if timed_here else passes_here
        return Decision(other, "explore", other)
    else:
        # Growing must pay even if `sqr` is higher by `CAUTION` standard errors. Shrinking must pay
        # even if `sqr` is one standard error lower.
        cost = StepTime(PRICE_OF_A_STEP, scale_per_pass)
        if limits.goal == "time":
            assert time is not None
            cost = time

        def best(noise: Noise) -> int:
            if limits.efficiency is not None:
                return most_efficient_passes(noise, limits.efficiency, scale_per_pass, limits.most)
            return fastest_passes(noise, cost, scale_per_pass, limits.most)

        used = noise.shifted(+CAUTION)
        target = best(used)
        if target < passes_here:
            used = noise.shifted(-1.0)
            target = min(best(used), passes_here)
        if limits.efficiency is None:
            here = goodput(used, cost, scale_per_pass, passes_here)
            there = goodput(used, cost, scale_per_pass, target)
            if there < here * (1.0 + MARGIN):
                return Decision(passes_here, "stay", target)
    if target > passes_here:
        return Decision(min(target, math.floor(passes_here * GROWTH)), "grow", target)
    if target < passes_here:
        return Decision(max(target, math.ceil(passes_here / GROWTH)), "shrink", target)
    return Decision(passes_here, "stay", target)


def _neighbouring_passes(passes: int, most: int) -> int:
    """Return a different number of passes, distant enough to fit the time of a pass."""
    distance = max(2, min(passes, 8), passes // 4)
    if passes + distance <= most:
        return passes + distance
    return passes - distance if passes > distance else (1 if passes > 1 else most)
