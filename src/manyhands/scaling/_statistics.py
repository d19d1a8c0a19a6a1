"""The noise of the gradient so far: estimates, averaged over steps.

`NoiseAverage` is immutable: `after(reading)` is what it becomes with one more step's reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from manyhands.scaling._average import Average, Debiased, PaperAverage, restored, saved
from manyhands.scaling._noise import (
    SQR_FLOOR,
    VAR_FLOOR,
    Estimate,
    Reading,
    estimate,
    floored,
    gain,
)


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
    floor_each_step: bool = False

    @classmethod
    def empty(cls, groups: int, *, debiased: bool, floor_each_step: bool) -> NoiseAverage:
        start: Average = Debiased() if debiased else PaperAverage()
        return cls(groups, start, start, floor_each_step=floor_each_step)

    def after(self, reading: Reading, smoothing: float) -> NoiseAverage:
        """With one more finite reading. Leaving differenced readings behind starts anew."""
        new = estimate(reading)
        if self.floor_each_step:
            new = Estimate(floored(new.sqr, SQR_FLOOR), floored(new.var, VAR_FLOOR))
        restart = self.differenced and not reading.differenced
        sqr, var = (type(self.sqr)(), type(self.var)()) if restart else (self.sqr, self.var)
        return NoiseAverage(
            self.groups,
            sqr.add(new.sqr, smoothing),
            var.add(new.var, smoothing),
            reading.differenced,
            self.floor_each_step,
        )

    def with_groups(self, groups: int) -> NoiseAverage:
        """Room for parameter groups that were added."""
        return NoiseAverage(groups, self.sqr, self.var, self.differenced, self.floor_each_step)

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
        values = floored(self.raw_var, VAR_FLOOR)
        return sum(values) if group is None else values[group]

    def gain(self, scale: float, group: int | None = None) -> float:
        return gain(self.sqr_of(group), self.var_of(group), scale)

    def noise_scale(self, group: int | None = None) -> float | None:
        """noise / |true gradient|^2 in batches of scale 1; None where there is no signal."""
        sqr = self.sqr_of(group)
        return self.var_of(group) / sqr if sqr > 0.0 else None

    def saved(self) -> dict[str, Any]:
        return {
            "debiased": isinstance(self.sqr, Debiased),
            "sqr": saved(self.sqr),
            "var": saved(self.var),
            "differenced": self.differenced,
        }

    def restored(self, state: dict[str, Any]) -> NoiseAverage:
        """The average that was `saved`; a ValueError if it cannot have been."""
        try:
            kind = Debiased if state["debiased"] else PaperAverage
            sqr, var = restored(kind, state["sqr"]), restored(kind, state["var"])
            if len(sqr.value(1.0, 0)) > self.groups or len(var.value(0.0, 0)) > self.groups:
                raise ValueError(f"it is of more than {self.groups} parameter groups")
            differenced = bool(state["differenced"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the state dict is damaged: its noise average, {error!r}.") from error
        return NoiseAverage(self.groups, sqr, var, differenced, self.floor_each_step)
