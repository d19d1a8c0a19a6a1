"""How long does a step take, by its number of passes? Measured on the run, fitted robustly.

Steps of p passes take a + b p seconds, on the slowest worker, with everything in it: data,
backward, communication, the optimizer. `StepTimes` keeps the last `WINDOW` steps. For each p it
takes the median, which a pause (an evaluation, a checkpoint, a compilation) does not move. The
slope b is the weighted median of the slopes between two numbers of passes (Theil and Sen), and a
the weighted median of what is left. So neither a pause nor one odd number of passes decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from manyhands.ramp._goodput import StepTime

WINDOW = 240  # steps
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
