"""Observe a run's steps for `Ramp`: noise and step times.

**`NoiseWatch`: error and memory of the noise estimate.** If noise dominates and is Gaussian, a step
with n small batches estimates sqr = |true gradient|^2 (`scaling/_noise.py`) with the variance

    2 var^2 / (d n (n - 1))      var: the noise at scale 1, of a small batch

for noise in d directions of equal size. If micro-batches are larger than the small batch, each of
the n gradients has S / n times less noise. For an average with weights w_k, the error relative to
var is

    error = sqrt(sum w_k^2 2 / (d n_k (n_k - 1))) / sum w_k

1 / d is the mean squared deviation of the steps' estimates from the average, relative to the
expected value for d = 1. The initial value 1 is also the upper limit, with the weight of
`PRIOR_STEPS` steps.

*Memory* is the number of small batches in the averages. A long memory has a small error, but lags
behind growing noise. With n gradients per step, M small batches have an error of sqrt(2 / (n M))
var in the worst case (d = 1). `memory_for` returns the M with an error of half of sqr, but no less
than `MEMORY_STEPS` steps: the gain of a single step jumps by factors of 2 or 4, which can raise the
loss. A memory based on the measured d also follows single steps too closely.

`Ramp` grows the batch only if sqr + 0.7 error var calls for a larger batch. Otherwise an early
estimate near zero would select the largest batch. Shrinking requires that sqr - error var calls for
a smaller batch.

**`StepTimer`: step times.** A step of p passes takes a + b p seconds, including data, backward,
communication and optimizer. Ranks that average gradients have equal step times in the long run, so
the time of a step is the mean over ranks; the maximum would be too large. `StepTimes` stores the
last `WINDOW` steps. For each p it computes a mean in which a pause (an evaluation, a checkpoint, a
compilation) counts as no more than `CUT_OFF` times the usual deviation from the median. The slope b
is the weighted median of the slopes between pairs of numbers of passes (Theil and Sen). The
constant a is the weighted median of the remainders. The sync rounds of blocks count as pauses.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import accumulate, combinations
from statistics import fmean, median

from manyhands._optimizers.state_parts import SavedEntries
from manyhands.ramp._decision import Noise, StepTime
from manyhands.scaling._noise import estimate
from manyhands.scaling._payload import RankReport
from manyhands.scaling._rule_base import ScalingRuleBase

MEMORIES = (50.0, 1000.0)  # the shortest and the longest, in small batches
MEMORY_STEPS = 3  # the shortest memory, in steps
ERROR = 0.5  # intended error of sqr, in units of sqr
PRIOR_STEPS = 3.0  # weight, in steps, of the assumption d = 1
DEVIATIONS_FADE = 0.99  # the weight of past deviations, per step
LARGEST_DEVIATION = 10.0  # of a step, squared, relative to the expectation for d = 1
NOISE_LASTS = 60  # steps without a new measurement until the noise is discarded
WINDOW = 240  # steps
ENOUGH = 3  # minimum number of timed steps per number of passes
CUT_OFF = 4.5  # median deviations; three standard deviations of a normal distribution


class NoiseWatch:
    """Follows the averaged noise of a rule, with the error of the average."""

    def __init__(self, rule: ScalingRuleBase) -> None:
        self._rule = rule
        self._port = rule.port
        self._average = self._port.history.average
        self._unmeasured = 0  # steps since the noise was last measured
        self._memory = self._port.batch.memory
        self.evidence = Evidence()

    def measured(self) -> Noise | None:
        """Return the noise with the error of `sqr`; None before the first measurement."""
        average = self._port.history.average
        if not average.measured:
            return None
        return Noise(average.sqr_of(), average.var_of(), self.evidence.error)

    def add_step(self) -> None:
        """Update the error if the rule has measured the noise in this step."""
        rule = self._rule
        port = self._port
        before = self._average
        average = port.history.average
        self._unmeasured += 1
        if average is before:
            return
        self._average = average
        self._unmeasured = 0
        if before.consecutive and not average.consecutive:
            self.evidence = Evidence()  # the average has restarted, with a better measurement
        count = float(rule.passes * port.batch.workers)
        scale = rule.scale
        sums = port.history.sums
        assert sums is not None  # the average has changed
        if average.consecutive:
            count = 2 * count
            scale = 2.0 * scale
        var = before.var_of()  # zero if var_floor=0.0 and all gradients of a step were equal
        if before.measured and before.norm_kind == average.norm_kind and var > 0.0:
            deviation = sum(estimate(sums).sqr) - sum(before.raw_sqr)
            self.evidence.add_deviation(count, scale, deviation / var)
        self.evidence.add(count, scale, rule.smoothing)

    def forget_old(self) -> None:
        """Restart the averages if the noise was not measured for `NOISE_LASTS` steps."""
        if self._unmeasured > NOISE_LASTS and self._port.history.average.measured:
            self._average = self._port.restart_averages()
            self.evidence = Evidence()

    def set_memory(self) -> None:
        batch = self._port.batch
        average = self._port.history.average
        if average.measured:
            gradients = batch.passes * batch.workers
            noise = Noise(average.sqr_of(), average.var_of())
            self._memory = memory_for(noise, gradients, self._rule.scale)
            self._port.set_memory(self._memory)

    def state_dict(self) -> dict[str, object]:
        return {
            "memory": self._memory,
            "unmeasured": self._unmeasured,
            "evidence": list(astuple(self.evidence)),
        }

    def load(self, memory: float, unmeasured: int, evidence: Evidence) -> None:
        self._memory = memory
        self._unmeasured = unmeasured
        self.evidence = evidence

    def rule_was_loaded(self) -> None:
        self._average = self._port.history.average
        self._port.set_memory(self._memory)


@dataclass
class Evidence:
    """The standard error of the averaged |true gradient|^2, in units of the averaged noise."""

    squares: float = 0.0
    weight: float = 0.0
    deviations: float = PRIOR_STEPS  # squared, relative to the expectation for d = 1
    steps: float = PRIOR_STEPS

    @classmethod
    def of_saved(cls, saved: SavedEntries) -> Evidence:
        evidence = cls(*saved.reals("evidence", 4))
        if not evidence.steps:
            raise saved.wrong("evidence[3]", "above 0", evidence.steps)
        return evidence

    def add_deviation(self, small_batches: float, scale: float, deviation: float) -> None:
        """Add the deviation of a step's estimate from the previous average."""
        if small_batches < 2:
            return  # no pairs of gradients to compare
        expected = _variance(small_batches, scale)
        if self.weight:
            expected += self.squares / self.weight**2
        # Long-tailed noise has rare large deviations.
        squared = min(deviation**2 / expected, LARGEST_DEVIATION)
        self.deviations = DEVIATIONS_FADE * self.deviations + squared
        self.steps = DEVIATIONS_FADE * self.steps + 1.0

    def add(self, small_batches: float, scale: float, smoothing: float) -> None:
        if small_batches < 2:
            return  # no pairs of gradients to compare
        variance = _variance(small_batches, scale)
        self.squares = smoothing**2 * self.squares + (1.0 - smoothing) ** 2 * variance
        self.weight = smoothing * self.weight + (1.0 - smoothing)

    @property
    def error(self) -> float:
        """The standard error; infinite before the first measurement.

        >>> evidence = Evidence()
        >>> for _ in range(100):
        ...     evidence.add(small_batches=2, scale=2.0, smoothing=0.999)
        >>> round(evidence.error, 3)  # sqrt(2 / (2 * 1) / 100)
        0.1
        """
        inverse_directions = min(self.deviations / self.steps, 1.0)
        variance = inverse_directions * self.squares
        return math.sqrt(variance) / self.weight if self.weight else math.inf


def _variance(small_batches: float, scale: float) -> float:
    per_batch = scale / small_batches  # larger micro-batches have less noise
    return 2.0 / (small_batches * (small_batches - 1)) / per_batch**2


def memory_for(noise: Noise, gradients: int, scale: float) -> float:
    """Return the memory in small batches, for steps of `scale` with `gradients` each.

    >>> memory_for(Noise(sqr=1.0, var=20.0), gradients=8, scale=8.0)
    400.0
    >>> memory_for(Noise(sqr=0.0, var=1.0), gradients=8, scale=8.0)
    1000.0
    >>> memory_for(Noise(sqr=1.0, var=20.0), gradients=80, scale=80.0)
    240.0
    """
    shortest = max(MEMORIES[0], MEMORY_STEPS * scale)
    longest = max(MEMORIES[1], MEMORY_STEPS * scale)
    if noise.sqr <= 0.0:
        return longest
    noise_scale = noise.var / noise.sqr / (scale / gradients)
    return min(max(2.0 * (noise_scale / ERROR) ** 2 / gradients, shortest), longest)


class StepTimer:
    """Times this rank's steps, and stores the means over all ranks."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.last = (0.0, 0)  # seconds and units of this rank's last step, for the next report
        self._began: float | None = None

    def skip(self) -> None:
        self._began = None

    def step_ended(self, units: int, counts: bool) -> None:
        now = time.perf_counter()
        if self._began is not None and counts:
            self.last = (now - self._began, units)
        self._began = now

    def add_reports(self, reports: Sequence[RankReport]) -> None:
        if all(report.seconds > 0.0 for report in reports):
            seconds = fmean(report.seconds for report in reports)
            self.times.add(int(reports[0].timed_passes), seconds)

    def state_dict(self) -> dict[str, object]:
        return {
            "times": [[passes, seconds] for passes, seconds in self.times.steps],
            "timed": list(self.last),
        }

    @classmethod
    def of_saved(cls, saved: SavedEntries) -> StepTimer:
        timer = cls()
        for passes, seconds in saved.pairs("times"):
            timer.times.add(passes, seconds)
        timed_seconds, timed_passes = saved.reals("timed", 2)
        timer.last = timed_seconds, int(timed_passes)
        return timer


@dataclass
class StepTimes:
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, passes: int, seconds: float) -> None:
        self.steps.append((passes, seconds))

    def seconds_by_passes(self) -> dict[int, tuple[float, int]]:
        """Return the usual seconds and the number of steps, by passes."""
        by_passes: dict[int, list[float]] = {}
        for passes, seconds in self.steps:
            by_passes.setdefault(passes, []).append(seconds)
        usual = {}
        for passes, times in sorted(by_passes.items()):
            if len(times) >= ENOUGH:
                usual[passes] = robust_mean(times), len(times)
        return usual

    def fit(self) -> StepTime | None:
        """Return the fit; None until two numbers of passes were timed."""
        levels = self.seconds_by_passes()
        if len(levels) < 2:
            return None
        slopes = []
        for (p1, (t1, n1)), (p2, (t2, n2)) in combinations(levels.items(), 2):
            slopes.append(((t2 - t1) / (p2 - p1), (p2 - p1) * min(n1, n2)))
        shortest = min(seconds / passes for passes, (seconds, _) in levels.items())
        # Bounds: a pass takes some time, and `fixed` must not be negative.
        per_pass = min(max(weighted_median(slopes), 1e-3 * shortest), shortest)
        rest = [(max(t - per_pass * p, 0.0), n) for p, (t, n) in levels.items()]
        return StepTime(weighted_median(rest), per_pass)


def robust_mean(values: Sequence[float]) -> float:
    """Return the mean of the values, clipped to a range around the median.

    The tail of the times will recur, so a mean instead of the median.

    >>> round(robust_mean([1.0, 1.1, 1.2, 1.1, 9.0]), 2)
    1.19
    """
    middle = median(values)
    deviation = CUT_OFF * median(abs(value - middle) for value in values)
    return fmean(min(max(v, middle - deviation), middle + deviation) for v in values)


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the value with half of the weight below and half above.

    >>> weighted_median([(1.0, 1.0), (2.0, 1.0), (9.0, 1.0)])
    2.0
    >>> weighted_median([(1.0, 1.0), (9.0, 3.0)])
    9.0
    """
    ordered = sorted(values)
    below = list(accumulate(weight for _, weight in ordered))
    value, _ = ordered[bisect_left(below, below[-1] / 2)]
    return value
