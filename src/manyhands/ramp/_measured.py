"""What a decision rests on: the time of a step by its passes, and how sure the noise is.

**Times.** Steps of p passes take a + b p seconds, on the slowest worker, with everything in it:
data, backward, communication, the optimizer. `StepTimes` keeps the last `WINDOW` steps. For each p
it takes the median, which a pause (an evaluation, a checkpoint, a compilation) does not move. The
slope b is the weighted median of the slopes between two numbers of passes (Theil and Sen), and a
the weighted median of what is left. So neither a pause nor one odd number of passes decides.

In blocks, a few steps have a sync round after them, and most have none. `SyncRounds` gives every
step its share of their time: a batch that grows has fewer steps, and so fewer rounds, to a sample.

**Evidence.** Few steps of few passes say little about |true gradient|^2. A step with n small
batches estimates sqr = |true gradient|^2 with the variance

    2 var^2 / (n (n - 1))        where noise dominates: var is the noise at scale 1 of a small batch

(`scaling/_noise.py` has the estimate; for Gaussian noise). If its scale S is not n, because its
micro-batches are larger, each has S / n times less noise. An average with the weights w_k has the
variance sum of w_k^2 times theirs. Relative to var^2 it needs only n and the weights:

    error = sqrt(sum w_k^2 2 / (n_k (n_k - 1))) / sum w_k

**Memory.** The averages look back over so many small batches. A long memory has a small error, and
lags behind a noise that grows. `memory_for` returns the one whose error is half of sqr: with
n gradients a step, M small batches have an error of sqrt(2 / (n M)) var. It is never shorter than
`MEMORY_STEPS` steps. The rate is multiplied by the gain, and a gain of one step alone jumps by a
factor of 2 or 4 from step to step, at which the loss may rise (`docs/notes.md`).

`Ramp` grows the batch only if sqr + error var, one standard error above the average, asks for it.
Else a run would take its first luck, an estimate near zero, for pure noise, and jump to the largest
batch. It shrinks the batch if the average itself asks for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from manyhands.ramp._decision import Noise, StepTime

WINDOW = 240  # steps
MEMORIES = (50.0, 1000.0)  # the shortest and the longest, in small batches
MEMORY_STEPS = 3  # never fewer
ERROR = 0.5  # of sqr, in units of sqr
LOOK_BACK = 1000  # steps
ENOUGH = 3  # steps of one number of passes, before their median counts


@dataclass
class StepTimes:
    """The last steps' passes and seconds."""

    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, passes: int, seconds: float) -> None:
        """Add a step. All ranks add the same seconds: those of the slowest."""
        self.steps.append((passes, seconds))

    def medians(self) -> dict[int, tuple[float, int]]:
        """Return for each number of passes the median of its seconds, and how many there are."""
        by_passes: dict[int, list[float]] = {}
        for passes, seconds in self.steps:
            by_passes.setdefault(passes, []).append(seconds)
        return {
            passes: (median(values), len(values))
            for passes, values in sorted(by_passes.items())
            if len(values) >= ENOUGH
        }

    def fit(self) -> StepTime | None:
        """Return the fitted time of a step; None until two numbers of passes were seen."""
        medians = self.medians()
        if len(medians) < 2:
            return None
        slopes = [
            # far apart and often seen counts for more
            ((t2 - t1) / (p2 - p1), (p2 - p1) * min(n1, n2))
            for (p1, (t1, n1)), (p2, (t2, n2)) in combinations(medians.items(), 2)
        ]
        shortest = min(seconds / passes for passes, (seconds, _) in medians.items())
        # A pass takes some time, and no more than a whole step has for each: noise in the medians
        # must not make `fixed` negative.
        per_pass = min(max(weighted_median(slopes), 1e-3 * shortest), shortest)
        rest = [(max(t - per_pass * p, 0.0), n) for p, (t, n) in medians.items()]
        return StepTime(weighted_median(rest), per_pass)


@dataclass
class SyncRounds:
    """A step's share of the time of sync rounds: their mean over the last `LOOK_BACK` steps."""

    seconds: float = 0.0  # of the rounds, fading
    steps: float = 0.0  # likewise
    latest: float = 0.0  # seconds since the last step

    def correct_step(self) -> float:
        """Return a step's share of all rounds, less the time of the rounds that it has seen.

        >>> rounds = SyncRounds()
        >>> rounds.latest = 8.0  # a round
        >>> [round(rounds.correct_step(), 1) for _ in range(2)]
        [0.0, 4.0]
        """
        seen, fading = self.latest, 1.0 - 1.0 / LOOK_BACK
        self.seconds = fading * self.seconds + seen
        self.steps = fading * self.steps + 1.0
        self.latest = 0.0
        return self.seconds / self.steps - seen


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the value that half of the weight is below, and half above.

    >>> weighted_median([(1.0, 1.0), (2.0, 1.0), (9.0, 1.0)])
    2.0
    >>> weighted_median([(1.0, 1.0), (9.0, 3.0)])
    9.0
    """
    ordered = sorted(values)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise ValueError("a weighted median needs at least one value.")


@dataclass
class Evidence:
    """The standard error of the averaged |true gradient|^2, in units of the averaged noise."""

    squares: float = 0.0
    weight: float = 0.0

    def add(self, small_batches: float, scale: float, smoothing: float) -> None:
        """Add a step; `smoothing` is the weight of the past in the average."""
        if small_batches < 2:
            return  # nothing was compared
        per_batch = scale / small_batches  # larger micro-batches have less noise
        variance = 2.0 / (small_batches * (small_batches - 1)) / per_batch**2
        self.squares = smoothing**2 * self.squares + (1.0 - smoothing) ** 2 * variance
        self.weight = smoothing * self.weight + (1.0 - smoothing)

    @property
    def error(self) -> float:
        """The standard error; infinite as long as nothing was measured.

        >>> evidence = Evidence()
        >>> for _ in range(100):
        ...     evidence.add(small_batches=2, scale=2.0, smoothing=0.999)
        >>> round(evidence.error, 3)  # sqrt(2 / (2 * 1) / 100)
        0.1
        """
        return math.sqrt(self.squares) / self.weight if self.weight else math.inf


def memory_for(noise: Noise, gradients: int, scale: float) -> float:
    """Return how many small batches to look back if a step of `scale` has so many gradients.

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
