"""Which branches are level with the branch of scale 1? A test on paired losses, in plain numbers.

Every branch k was trained in R repeats, and evaluated on the same H held-out micro-batches:

    x_rh   its loss minus that of scale 1, in repeat r, on held-out micro-batch h
    d      the mean of all x_rh
    a      the standard deviation over r of the means over h, with R - 1 degrees of freedom
    b      the standard deviation over h of the means over r, with H - 1
    s      the standard deviation over r of scale 1's own loss: its spread from run to run

Repeats and micro-batches are both samples of something larger, so both add to the error of d:

    d_high = d + sqrt((t_{R-1} a)^2 / R + (t_{H-1} b)^2 / H)           d_low likewise
    s_low  = s sqrt((R - 1) / chi2_{R-1, confidence})                  s_high with 1 - confidence

t and chi2 are quantiles at the confidence. A branch may be behind by as much as another run at
scale 1 may be, by luck. Its margin is c s with c = sqrt(2) z(0.75) = 0.954: at that distance a run
at scale 1 beats one at scale k in three of four cases. (Bouthillier et al. 2021 call a difference
meaningful from there on.) The bounds of d - c s have a closed form (Donner and Zou 2012):

    level   d - c s + sqrt((d_high - d)^2 + c^2 (s - s_low)^2) < 0     surely within the margin
    worse   d - c s - sqrt((d - d_low)^2 + c^2 (s_high - s)^2) > 0     surely beyond it

and a branch that is neither is undecided. The scales are tested in their order, and the first that
is not level ends the sequence, so that no test needs a correction for the others (a fixed sequence:
Maurer et al. 1995).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import Literal, TypeAlias

Verdict = Literal["reference", "level", "worse", "undecided", "diverged"]
Losses: TypeAlias = Sequence[Sequence[float]]  # by repeat, and by held-out micro-batch

MEANINGFUL = math.sqrt(2.0) * NormalDist().inv_cdf(0.75)  # c: a margin, in spreads of scale 1


@dataclass(frozen=True)
class LossDifference:
    """How far a branch is behind scale 1: the mean, its one-sided bounds, and the verdict."""

    mean: float
    low: float
    high: float
    verdict: Verdict


def compare(branch: Losses, reference: Losses, confidence: float) -> LossDifference:
    """Compare the losses of a branch with those of scale 1.

    >>> small = [[1.0, 1.1], [1.2, 1.3], [0.9, 1.0], [1.1, 1.2]]
    >>> near = [[loss + 0.001 * r for loss in repeat] for r, repeat in enumerate(small)]
    >>> compare(near, small, 0.95).verdict
    'level'
    >>> compare([[loss + 1.0 for loss in repeat] for repeat in small], small, 0.95).verdict
    'worse'
    """
    if not all(math.isfinite(loss) for repeat in branch for loss in repeat):
        return LossDifference(math.inf, math.inf, math.inf, "diverged")
    if not all(math.isfinite(loss) for repeat in reference for loss in repeat):
        return LossDifference(math.nan, -math.inf, math.inf, "undecided")
    paired = [
        [ours - theirs for ours, theirs in zip(*repeats, strict=True)]
        for repeats in zip(branch, reference, strict=True)
    ]
    by_repeat = [fmean(repeat) for repeat in paired]
    by_micro_batch = [fmean(column) for column in zip(*paired, strict=True)]
    mean = fmean(by_repeat)
    error = math.hypot(_error(by_repeat, confidence), _error(by_micro_batch, confidence))
    spread = run_spread(reference)
    smallest, largest = spread_bounds(spread, len(reference), confidence)
    beyond = mean - MEANINGFUL * spread
    if beyond + math.hypot(error, MEANINGFUL * (spread - smallest)) < 0.0:
        verdict: Verdict = "level"
    elif beyond - math.hypot(error, MEANINGFUL * (largest - spread)) > 0.0:
        verdict = "worse"
    else:
        verdict = "undecided"
    return LossDifference(mean, mean - error, mean + error, verdict)


def run_spread(losses: Losses) -> float:
    """Return the standard deviation of a branch's loss over the repeats."""
    return stdev(map(fmean, losses))


def largest_level(scales: Sequence[int], verdicts: Sequence[Verdict]) -> tuple[int, float]:
    """Return the last scale before the first that is not level, and the first that is worse.

    The second is infinite if no scale is worse.

    >>> largest_level([1, 2, 4, 8], ["reference", "level", "undecided", "worse"])
    (2, 8)
    """
    largest = scales[0]
    for scale, verdict in zip(scales[1:], verdicts[1:], strict=True):
        if verdict != "level":
            break
        largest = scale
    pairs = zip(scales, verdicts, strict=True)
    worse = (k for k, verdict in pairs if k > largest and verdict in ("worse", "diverged"))
    return largest, next(worse, math.inf)


def _error(values: Sequence[float], confidence: float) -> float:
    return student_t(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def spread_bounds(spread: float, repeats: int, confidence: float) -> tuple[float, float]:
    """Return one-sided bounds of a standard deviation that was measured in so many repeats."""
    degrees = repeats - 1
    low, high = (
        spread * math.sqrt(degrees / chi_square(level, degrees))
        for level in (confidence, 1.0 - confidence)
    )
    return low, high


# -- quantiles, for whole degrees of freedom: closed sums (Abramowitz and Stegun 26.7, 26.4) -----


@cache
def student_t(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution for a probability above a half.

    >>> round(student_t(0.95, 5), 3)
    2.015
    """

    def below(t: float) -> float:
        angle = math.atan2(t, math.sqrt(degrees))
        odd = degrees % 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for k in range(1 + odd, degrees, 2):
            total += term
            term *= math.cos(angle) ** 2 * k / (k + 1)
        total *= math.sin(angle)
        return 0.5 + ((angle + total) / math.pi if odd else total / 2.0)

    return _solve(below, probability)


@cache
def chi_square(probability: float, degrees: int) -> float:
    """Return the quantile of the chi-square distribution.

    >>> round(chi_square(0.95, 5), 3)
    11.07
    """

    def below(x: float) -> float:
        half = x / 2.0
        odd = degrees % 2
        above = math.erfc(math.sqrt(half)) if odd else math.exp(-half)
        for k in range(2 - odd, degrees, 2):
            above += half ** (k / 2) * math.exp(-half) / math.gamma(k / 2 + 1)
        return 1.0 - above

    return _solve(below, probability)


def _solve(below: Callable[[float], float], probability: float) -> float:
    """Return where a distribution function, of values from zero on, reaches a probability."""
    low, high = 0.0, 1.0
    while below(high) < probability:
        high *= 2.0
    for _ in range(100):  # to the last bit
        middle = (low + high) / 2.0
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return high
