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
from dataclasses import asdict, dataclass, replace
from typing import Any

from manyhands.scaling._noise import (
    SQR_FLOOR,
    VAR_FLOOR,
    Estimate,
    Reading,
    estimate,
    floored,
    gain,
)


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


def is_finite(reading: Reading) -> bool:
    """Whether every gradient of the step was finite."""
    return all(map(math.isfinite, (*reading.squares, *reading.mean)))


@dataclass(frozen=True)
class NoiseAverage:
    """|true gradient|^2 and the noise at scale 1, per parameter group, smoothed.

    Floors are applied to the averages. `floor_each_step` applies them to every step's estimate
    as well, as fairscale does; that biases both upwards wherever single steps are noisy.
    """

    groups: int
    sqr: Average = Debiased()
    var: Average = Debiased()
    differenced: bool = False
    unit: str = "plain"
    floor_each_step: bool = False
    mix_units: bool = False
    var_floor: float = VAR_FLOOR

    def after(self, reading: Reading, smoothing: float) -> NoiseAverage:
        """With one more finite reading.

        Starts anew when differenced readings are left behind, and when the norms begin to be
        taken of something else: of divided gradients (unless `mix_units`, as adaptdl does), or
        of plain ones again, where the optimizer that divides was reset.
        """
        new = estimate(reading)
        if self.floor_each_step:
            new = Estimate(floored(new.sqr, SQR_FLOOR), floored(new.var, self.var_floor))
        begins_anew = reading.unit == "plain" or not self.mix_units
        other_unit = reading.unit != self.unit and begins_anew
        restart = other_unit or (self.differenced and not reading.differenced)
        sqr, var = (type(self.sqr)(), type(self.var)()) if restart else (self.sqr, self.var)
        return replace(
            self,
            sqr=sqr.add(new.sqr, smoothing),
            var=var.add(new.var, smoothing),
            differenced=reading.differenced,
            unit=reading.unit,
        )

    def with_groups(self, groups: int) -> NoiseAverage:
        """Room for parameter groups that were added."""
        return replace(self, groups=groups)

    @property
    def raw_sqr(self) -> tuple[float, ...]:
        """Averages of |true gradient|^2 before the floor; 1 before the first reading."""
        return self.sqr.value(1.0, self.groups)

    @property
    def raw_var(self) -> tuple[float, ...]:
        """Averages of the noise before the floor; 0 before the first reading."""
        return self.var.value(0.0, self.groups)

    def sqr_of(self, group: int | None = None) -> float:
        """|true gradient|^2 of one group, or of all together."""
        values = floored(self.raw_sqr, SQR_FLOOR)
        return sum(values) if group is None else values[group]

    def var_of(self, group: int | None = None) -> float:
        """The noise of one group at scale 1, or of all together."""
        values = floored(self.raw_var, self.var_floor)
        return sum(values) if group is None else values[group]

    def gain(self, scale: float, group: int | None = None) -> float:
        return gain(self.sqr_of(group), self.var_of(group), scale)

    @property
    def measured(self) -> bool:
        """Whether there has been a reading at all."""
        return self.sqr != type(self.sqr)()

    def noise_scale(self, group: int | None = None) -> float | None:
        """noise / |true gradient|^2 in batches of scale 1; None where no signal was seen."""
        sqr = self.sqr_of(group)
        return self.var_of(group) / sqr if self.measured and sqr > 0.0 else None

    def saved(self) -> dict[str, Any]:
        return {
            "debiased": isinstance(self.sqr, Debiased),
            "sqr": saved(self.sqr),
            "var": saved(self.var),
            "differenced": self.differenced,
            "unit": self.unit,
        }

    def restored(self, state: dict[str, Any]) -> NoiseAverage:
        """The average that was `saved`; an error if it cannot have been."""
        kind = Debiased if state["debiased"] else PaperAverage
        sqr, var = restored(kind, state["sqr"]), restored(kind, state["var"])
        if len(sqr.value(1.0, 0)) > self.groups or len(var.value(0.0, 0)) > self.groups:
            raise ValueError(f"it is of more than {self.groups} parameter groups")
        differenced, unit = bool(state["differenced"]), str(state["unit"])
        return replace(self, sqr=sqr, var=var, differenced=differenced, unit=unit)
