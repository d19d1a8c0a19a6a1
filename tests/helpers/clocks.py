"""A clock that tests advance by the time of a step, for `Ramp`."""

from __future__ import annotations


class Clock:
    """Seconds that pass as a step of `fixed + per_unit * units` would take."""

    def __init__(self, fixed: float = 4.0, per_unit: float = 1.0) -> None:
        self.now = 0.0
        self.fixed = fixed
        self.per_unit = per_unit

    def perf_counter(self) -> float:
        return self.now

    def step(self, units: int) -> None:
        self.now += self.fixed + self.per_unit * units
