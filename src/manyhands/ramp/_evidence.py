"""How sure the noise is, and how far its averages look back.

Few steps of few passes say little about |true gradient|^2. If noise dominates and is
Gaussian, a step with n small batches estimates sqr = |true gradient|^2 (`scaling/_noise.py`) with
the variance

    2 var^2 / (d n (n - 1))      var: the noise at scale 1, which is that of one small batch

for noise in d directions of equal size. If the micro-batches are larger than the small batch, the
scale S is larger than n, and each of the n gradients has S / n times less noise. The variance of an
average with the weights w_k is the sum of w_k^2 times those of its steps. So the error relative to
var needs only n, d and the weights:

    error = sqrt(sum w_k^2 2 / (d n_k (n_k - 1))) / sum w_k

1 / d is measured: the mean of the squared deviations of the steps' estimates from their average,
divided by what they would be with d = 1. It begins at 1, which counts as much as `PRIOR_STEPS`
steps, and is never more.

**Memory** is the number of small batches over which the averages look back. A long memory has a
small error, and lags behind a noise that grows. With n gradients in each step, M small batches have
an error of sqrt(2 / (n M)) var in the worst case (d = 1). `memory_for` returns the M at which it is
half of sqr, but never less than `MEMORY_STEPS` steps: the learning rate is multiplied by the gain,
and the gain of a single step jumps by a factor of 2 or 4, at which the loss may rise. With the
measured d, too, the gain follows single steps too closely (`docs/notes.md`).

`Ramp` grows the batch only if sqr + 0.7 error var, most of a standard error above the average, asks
for it. Otherwise an early estimate that is near zero by chance would look like pure noise, and the
run would jump to the largest batch. To shrink the batch, sqr - error var has to ask for it.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from manyhands._core.state_parts import SavedState
from manyhands.ramp._decision import Noise
from manyhands.scaling._noise import estimate
from manyhands.scaling._rule_base import ScalingRuleBase

MEMORIES = (50.0, 1000.0)  # the shortest and the longest, in small batches
MEMORY_STEPS = 3  # the shortest memory, in steps
ERROR = 0.5  # the error of sqr that a memory should have, in units of sqr
PRIOR_STEPS = 3.0  # steps whose deviations are assumed to be those of noise in one direction
DEVIATIONS_FADE = 0.99  # the weight of the past deviations, in each step
LARGEST_DEVIATION = 10.0  # of one step, squared, in units of what is expected with d = 1
NOISE_LASTS = 60  # steps without a new measurement, after which the noise is forgotten


class NoiseWatch:
    """Follows the noise that a rule averages, and how sure it is."""

    def __init__(self, rule: ScalingRuleBase) -> None:
        self._rule = rule
        self._average = rule._tracker.average
        self._unmeasured = 0  # steps since the noise was last measured
        self.evidence = Evidence()

    def measured(self) -> Noise | None:
        """Return the noise and the error of its signal; None before the first measurement."""
        average = self._rule._tracker.average
        if not average.measured:
            return None
        return Noise(average.sqr_of(), average.var_of(), self.evidence.error)

    def see_step(self) -> None:
        """Update how sure the noise is, if the rule has measured it in this step.

        A rule measures nothing from a single gradient at scale 1, or from gradients that overflow.
        """
        rule, before = self._rule, self._average
        average = rule._tracker.average
        self._unmeasured += 1
        if average is before:
            return
        self._average, self._unmeasured = average, 0
        if before.consecutive and not average.consecutive:
            self.evidence = Evidence()  # the average has begun anew, with a better measurement
        count, scale = float(rule.passes * rule._batch.workers), rule.scale
        sums = rule._tracker.sums
        assert sums is not None  # the average is another
        if average.norm_kind == "examples":  # each example counts as one small batch
            count = sums.small_batches
        if average.consecutive:  # two steps' gradients, as one step of twice the size
            count, scale = 2 * count, 2.0 * scale
        var = before.var_of()  # zero where var_floor=0.0 and all gradients of a step were equal
        if before.measured and before.norm_kind == average.norm_kind and var > 0.0:
            deviation = sum(estimate(sums).sqr) - sum(before.raw_sqr)
            self.evidence.see_deviation(count, scale, deviation / var)
        self.evidence.add(count, scale, rule.smoothing)

    def forget_old(self) -> None:
        """Begin the averages anew if nothing was measured for `NOISE_LASTS` steps.

        A few new steps would change little among many old ones.
        """
        tracker = self._rule._tracker
        if self._unmeasured > NOISE_LASTS and tracker.average.measured:
            tracker.average = self._average = tracker.average.begun_anew()
            self.evidence = Evidence()

    def set_memory(self) -> None:
        """Set how far the averages look back: see `memory_for`."""
        batch, average = self._rule._batch, self._rule._tracker.average
        if average.measured:
            gradients = batch.passes * batch.workers
            noise = Noise(average.sqr_of(), average.var_of())
            batch.memory = memory_for(noise, gradients, self._rule.scale)

    def state_dict(self) -> dict[str, object]:
        """Return what is known, in plain values. The rule saves its averages itself."""
        return {"unmeasured": self._unmeasured, "evidence": list(astuple(self.evidence))}

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue with a `state_dict`."""
        self._unmeasured = int(state_dict["unmeasured"])
        self._average = self._rule._tracker.average
        self.evidence = Evidence(*map(float, state_dict["evidence"]))


@dataclass
class Evidence:
    """The standard error of the averaged |true gradient|^2, in units of the averaged noise."""

    squares: float = 0.0
    weight: float = 0.0
    deviations: float = PRIOR_STEPS  # squared, over what they would be in one direction
    steps: float = PRIOR_STEPS

    def see_deviation(self, small_batches: float, scale: float, deviation: float) -> None:
        """Take note of how far a step's estimate is from the average before it."""
        if small_batches < 2:
            return  # nothing was compared
        expected = _variance(small_batches, scale)
        if self.weight:  # the average has an error, too
            expected += self.squares / self.weight**2
        # Noise with long tails has few large deviations; and the signal may have changed.
        squared = min(deviation**2 / expected, LARGEST_DEVIATION)
        self.deviations = DEVIATIONS_FADE * self.deviations + squared
        self.steps = DEVIATIONS_FADE * self.steps + 1.0

    def add(self, small_batches: float, scale: float, smoothing: float) -> None:
        """Add a step; `smoothing` is the weight of the past in the average."""
        if small_batches < 2:
            return  # a single gradient was compared with nothing
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
    """Return the variance of a step's estimate, in units of var^2, for noise in one direction."""
    per_batch = scale / small_batches  # larger micro-batches have less noise
    return 2.0 / (small_batches * (small_batches - 1)) / per_batch**2


def memory_for(noise: Noise, gradients: int, scale: float) -> float:
    """Return how many small batches to look back, for steps of `scale` with `gradients` each.

    >>> memory_for(Noise(sqr=1.0, var=20.0), gradients=8, scale=8.0)
    400.0
    >>> memory_for(Noise(sqr=0.0, var=1.0), gradients=8, scale=8.0)
    1000.0
    >>> memory_for(Noise(sqr=1.0, var=20.0), gradients=80, scale=80.0)
    240.0
    """
    shortest, longest = (
        max(MEMORIES[0], MEMORY_STEPS * scale),
        max(MEMORIES[1], MEMORY_STEPS * scale),
    )
    if noise.sqr <= 0.0:
        return longest
    noise_scale = noise.var / noise.sqr / (scale / gradients)
    return min(max(2.0 * (noise_scale / ERROR) ** 2 / gradients, shortest), longest)
