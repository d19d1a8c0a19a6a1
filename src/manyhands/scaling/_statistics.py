"""The noise of the gradient so far: estimates, averaged over steps.

`NoiseAverage` is immutable: `after(reading)` is what it becomes with one more step's reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
