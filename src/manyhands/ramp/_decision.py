"""Decide how many passes the next step has, by pure functions of the measurements.

All ranks know the same numbers, and so they decide the same. This file counts in passes. With an
`AdaptiveDataLoader`, "pass" means one of its units here: a rank's part of the small batch
(`_micro_batches.py`).

Time      a step of p passes takes         t(p) = a + b p              seconds (`_observed.py`)
Scale     its batch is, in small batches,  S(p) = u p                  u: one pass on all workers
Worth     in steps of scale 1              r(S) = (v + s) / (v / S + s)       the gain, `_noise.py`
Goodput   worth per second                 r(u p) / t(p)

with s = |true gradient|^2 and v = the noise at scale 1. As a function of p the goodput is, up to a
constant, p / ((v + s u p) (a + b p)). Its maximum, where the derivative is zero, is at

    p* = sqrt((a / b) (v / s) / u)

so the batch u p* is the geometric mean of two batches: u a / b, whose passes take as long as the
rest of their step, and v / s, the noise scale. The best whole number of passes is one of the two
neighbours of p*, because the goodput rises before p* and falls after it.

Efficiency is what a sample is worth, in samples at scale 1: r(S) / S. It falls with S.

Few steps and few samples (`goal="samples"`) is the same question with another price. A step costs
its S small batches, and c small batches for being a step (McCandlish et al. 2018). The best batch
is S* = sqrt(c v / s). With c = 4 (1 - e) / e^2, a sample there is worth at least e, whatever the
noise: with c = 0.8 at least 0.85.

`decide` moves towards the best number of passes. Its reasons:

    explore    try another number of passes: the noise is not known (any more), or the time of a
               step is known for one number of passes only
    grow       towards the best number, by at most the factor `GROWTH` at a time
    shrink     towards the best number, likewise
    stay       the best number is not better by more than `MARGIN` (so the batch does not flutter)
    wait       no decision was made yet

`goal` says what is best:

    "time"      the most progress in a second: `fastest_passes`
    "samples"   few steps and few samples, at `PRICE_OF_A_STEP`; with `efficiency`, the largest
                batch whose efficiency is at least that
    "steps"     the largest batch that is allowed
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.scaling._noise import gain

PRICE_OF_A_STEP = 0.8  # in small batches, with goal="samples"
CAUTION = 0.7  # standard errors
GROWTH = 2.0  # the largest factor by which one decision changes the passes
MARGIN = 0.01  # how much better the goodput must become

Goal = Literal["time", "samples", "steps"]
Reason = Literal["explore", "grow", "shrink", "stay", "wait"]


@dataclass(frozen=True)
class StepTime:
    """The time of a step: `fixed` seconds (a), and `per_pass` seconds for every pass (b)."""

    fixed: float
    per_pass: float

    def seconds(self, passes: int) -> float:
        """Return how long a step with this number of passes takes.

        >>> StepTime(fixed=0.4, per_pass=0.1).seconds(4)
        0.8
        """
        return self.fixed + self.per_pass * passes


@dataclass(frozen=True)
class Noise:
    """The gradient's squared norm (s) and its noise at scale 1 (v)."""

    sqr: float
    var: float
    error: float = 0.0  # the standard error of `sqr`, in units of `var`

    def shifted(self, errors: float) -> Noise:
        """Return the noise with `sqr` higher by this number of standard errors."""
        return Noise(max(self.sqr + errors * self.error * self.var, 0.0), self.var)


def efficiency(noise: Noise, scale: float) -> float:
    """Return what a sample of a batch of `scale` is worth, in samples at scale 1.

    >>> efficiency(Noise(sqr=1.0, var=3.0), 4.0)
    0.5714285714285714
    """
    return gain(noise.sqr, noise.var, scale) / scale


def goodput(noise: Noise, time: StepTime, scale_per_pass: float, passes: int) -> float:
    """Return how many steps of scale 1 a second of steps with `passes` is worth."""
    return gain(noise.sqr, noise.var, scale_per_pass * passes) / time.seconds(passes)


def fastest_passes(noise: Noise, time: StepTime, scale_per_pass: float, most: int) -> int:
    """Return the number of passes, from 1 to `most`, that has the highest goodput.

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
    # the smaller batch if both are equal: it has seen fewer samples
    return max((low, high), key=lambda n: (goodput(noise, time, scale_per_pass, n), -n))


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


@dataclass(frozen=True)
class Limits:
    """What a decision is bound by."""

    goal: Goal = "time"
    efficiency: float | None = None  # with goal="samples": what a sample must be worth
    most: int = 1  # passes


@dataclass(frozen=True)
class Decision:
    """The passes of the next steps, and why."""

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

    `noise` and `time` are None if they are not known. `timed_here` says whether enough steps with
    this number of passes were timed.

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
        # One pass more: a single gradient on a single worker says nothing about the noise.
        other = passes_here + 1 if passes_here < limits.most else passes_here - 1
        return Decision(other, "explore", other)
    elif limits.goal == "time" and time is None:
        # Stay until this number of passes was timed often enough, and then try another one.
        other = _neighbouring_passes(passes_here, limits.most) if timed_here else passes_here
        return Decision(other, "explore", other)
    else:
        # Grow only if it pays even with less noise (`sqr` most of a standard error higher), and
        # shrink only if it pays even with more noise (`sqr` one standard error lower).
        used = noise.shifted(+CAUTION)
        target = _best_passes(used, time, scale_per_pass, limits)
        if target < passes_here:
            used = noise.shifted(-1.0)
            target = min(_best_passes(used, time, scale_per_pass, limits), passes_here)
        price = _cost_of_step(time, scale_per_pass, limits)
        if price is not None:
            now, best = (goodput(used, price, scale_per_pass, p) for p in (passes_here, target))
            if best < now * (1.0 + MARGIN):
                return Decision(passes_here, "stay", target)
    if target > passes_here:
        return Decision(min(target, math.floor(passes_here * GROWTH)), "grow", target)
    if target < passes_here:
        return Decision(max(target, math.ceil(passes_here / GROWTH)), "shrink", target)
    return Decision(passes_here, "stay", target)


def _best_passes(noise: Noise, time: StepTime | None, scale_per_pass: float, limits: Limits) -> int:
    """Return the best number of passes for this noise."""
    price = _cost_of_step(time, scale_per_pass, limits)
    if price is not None:
        return fastest_passes(noise, price, scale_per_pass, limits.most)
    assert limits.efficiency is not None
    return most_efficient_passes(noise, limits.efficiency, scale_per_pass, limits.most)


def _cost_of_step(time: StepTime | None, scale_per_pass: float, limits: Limits) -> StepTime | None:
    """Return what a step costs, in seconds or in samples; None with a stated efficiency."""
    if limits.goal == "time":
        return time
    return None if limits.efficiency is not None else StepTime(PRICE_OF_A_STEP, scale_per_pass)


def _neighbouring_passes(passes: int, most: int) -> int:
    """Return a number of passes far enough away to separate the time of a pass from the rest."""
    distance = max(2, min(passes, 8), passes // 4)
    if passes + distance <= most:
        return passes + distance
    return passes - distance if passes > distance else (1 if passes > 1 else most)
