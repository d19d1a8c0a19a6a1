"""Average a step's estimates of signal and noise, with the standard error of their ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from manyhands._optimizers.state_parts import SavedEntries


@dataclass(frozen=True)
class NoiseMoments:
    """Weighted means of sqr, var, their squares and product; sums of the weights."""

    weight: float = 0.0
    squared_weight: float = 0.0
    sqr: float = 0.0
    var: float = 0.0
    sqr_sqr: float = 0.0
    var_var: float = 0.0
    sqr_var: float = 0.0

    @classmethod
    def of_saved(cls, saved: SavedEntries, steps: int) -> NoiseMoments:
        moments = {}
        least = 1e-32 if steps else 0.0
        for each in fields(cls):
            if each.name in ("weight", "squared_weight"):
                moments[each.name] = saved.real(each.name, least, below=1.001)
            else:
                moments[each.name] = saved.real(each.name, -math.inf, below=math.inf)
        return cls(**moments)

    def add(self, sqr: float, var: float, smoothing: float) -> NoiseMoments:
        new = 1.0 - smoothing

        def mix(old: float, value: float) -> float:
            return smoothing * old + new * value

        return NoiseMoments(
            mix(self.weight, 1.0),
            smoothing**2 * self.squared_weight + new**2,
            mix(self.sqr, sqr),
            mix(self.var, var),
            mix(self.sqr_sqr, sqr * sqr),
            mix(self.var_var, var * var),
            mix(self.sqr_var, sqr * var),
        )

    @property
    def ratio_error(self) -> float:
        # Delta method, for independent steps; divided by the effective number of steps.
        w = self.weight
        sqr = self.sqr / w
        var = self.var / w
        ratio = var / sqr
        scatter = (
            self.var_var / w
            - var * var
            - 2.0 * ratio * (self.sqr_var / w - sqr * var)
            + ratio * ratio * (self.sqr_sqr / w - sqr * sqr)
        )
        effective = w * w / self.squared_weight
        return math.sqrt(max(scatter, 0.0) / max(effective - 1.0, 1e-9)) / sqr

    def rescale(self, factor: float) -> NoiseMoments:
        """Return the moments for batches that are `factor` times as large."""
        return replace(
            self,
            var=self.var / factor,
            var_var=self.var_var / factor**2,
            sqr_var=self.sqr_var / factor,
        )
