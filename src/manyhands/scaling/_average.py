"""Smooth a step's estimates over time.

One step's estimate is unbiased and very noisy; the average over the last 1 / (1 - smoothing)
steps is what a rule can act on. Averages are immutable: `add` returns the next one, so that a
step can look at what its gradients would make of the average before it is taken.

* `Debiased` is a moving average divided by the weight it has gathered (as Adam does). The
  smoothing may differ from step to step.
* `PaperAverage` is the AdaScale paper's appendix B.3: a plain mean until 1 / (1 - smoothing)
  steps have been seen, a moving average from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Debiased:
    """A moving average without the pull towards its starting value."""

    total: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()

    def value(self, start: float, groups: int) -> tuple[float, ...]:
        """The average per group; `start` for a group of which nothing has been seen."""
        seen = [t / w if w else start for t, w in zip(self.total, self.weight, strict=True)]
        return (*seen, *[start] * (groups - len(seen)))

    def add(self, values: Sequence[float], smoothing: float) -> Debiased:
        total = (*self.total, *[0.0] * (len(values) - len(self.total)))
        weight = (*self.weight, *[0.0] * (len(values) - len(self.weight)))
        new = 1.0 - smoothing
        return Debiased(
            tuple(smoothing * t + new * v for t, v in zip(total, values, strict=True)),
            tuple(smoothing * w + new for w in weight),
        )


@dataclass(frozen=True)
class PaperAverage:
    """Appendix B.3: the mean of all values at first, a moving average later."""

    mean: tuple[float, ...] = ()
    count: tuple[int, ...] = ()

    def value(self, start: float, groups: int) -> tuple[float, ...]:
        return (*self.mean, *[start] * (groups - len(self.mean)))

    def add(self, values: Sequence[float], smoothing: float) -> PaperAverage:
        mean = (*self.mean, *[0.0] * (len(values) - len(self.mean)))
        count = (*self.count, *[0] * (len(values) - len(self.count)))
        return PaperAverage(
            tuple(
                m + (v - m) / (c + 1)
                if c + 1 < 1 / (1 - smoothing) or c == 0
                else smoothing * m + (1 - smoothing) * v
                for m, v, c in zip(mean, values, count, strict=True)
            ),
            tuple(c + 1 for c in count),
        )


Average = Debiased | PaperAverage


def converted(
    average: Average, kind: type[Debiased] | type[PaperAverage], smoothing: float
) -> Average:
    """The same values as the other kind of average, as after the same number of steps."""
    if isinstance(average, kind):
        return average
    if isinstance(average, PaperAverage):
        weight = tuple(1.0 - smoothing**count for count in average.count)
        total = tuple(m * w for m, w in zip(average.mean, weight, strict=True))
        return Debiased(total, weight)
    most = math.ceil(1 / (1 - smoothing))  # from then on the count makes no difference
    counts = (
        most if w >= 1.0 or smoothing == 0.0 else round(math.log1p(-w) / math.log(smoothing))
        for w in average.weight
    )
    mean = average.value(0.0, len(average.weight))
    return PaperAverage(mean, tuple(max(1, min(count, most)) for count in counts))


def saved(average: Average) -> dict[str, Any]:
    """An average as lists of numbers, for a state dict."""
    return {name: list(values) for name, values in asdict(average).items()}


def restored(kind: type[Debiased] | type[PaperAverage], state: dict[str, Any]) -> Average:
    """The average that `saved` wrote."""
    return kind(**{name: tuple(values) for name, values in state.items()})
