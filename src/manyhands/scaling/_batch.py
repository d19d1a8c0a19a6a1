"""How large a step's batch is, in small batches, and how fast its noise is averaged.

Plain numbers: workers, passes, and what the user has said of the scale and the smoothing.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

from manyhands.scaling._options import OptionChange


@dataclass
class Batch:
    """The size of the whole batch: all workers, all passes.

    The scale is workers x passes (each micro-batch is a small batch), unless `scale` or
    `scale_per_pass` is given. `counted` says that passes are counted step by step, in which
    case the smoothing follows the scale, as adaptdl's does; otherwise the number of small
    gradients, as fairscale's.
    """

    workers: int = 1
    passes: int = 1  # of a whole step: declared, or counted in the last one
    scale: float | None = None
    scale_per_pass: float | None = None
    smoothing: float | None = None
    counted: bool = False
    said: frozenset[str] = frozenset()  # of "scale" and "smoothing": by the user, in this run

    def scale_of(self, passes: int) -> float:
        """The scale of a batch of so many passes."""
        if self.scale is not None:
            return self.scale
        if self.scale_per_pass is not None:
            return self.scale_per_pass * passes
        return float(self.workers * passes)

    def smoothing_at(self, scale: float) -> float:
        """The weight of the past in the averages, when a batch of this scale is added."""
        if self.smoothing is not None:
            return self.smoothing
        if self.counted:
            return float(0.999**scale)
        return max(1.0 - self.workers * self.passes / 1000.0, 0.0)

    def say_scale(self, *, scale: float | None = None, per_pass: float | None = None) -> None:
        """The user gives the scale, of the whole batch or of one pass."""
        self.scale, self.scale_per_pass = scale, per_pass
        self.said |= {"scale"}

    def say_smoothing(self, smoothing: float | None) -> None:
        """The user gives the smoothing; None: the default again."""
        self.smoothing = checked_smoothing(smoothing)
        self.said = self.said - {"smoothing"} if smoothing is None else self.said | {"smoothing"}

    def saved(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "scale_per_pass": self.scale_per_pass,
            "smoothing": self.smoothing,
            "workers": self.workers,
            "passes": self.passes,
        }

    def loaded(self, state: dict[str, Any]) -> tuple[Batch, list[OptionChange]]:
        """This run's workers and passes, with what was given to the run that was saved.

        A given scale stays in proportion to workers x passes: the micro-batch is the same.
        Where passes are counted they are taken to be as many as before. What was said in this
        run stays, and where the saved run differs is returned.
        """
        passes = int(state["passes"]) if self.counted else self.passes
        scale, per_pass = state["scale"], state["scale_per_pass"]
        before = int(state["workers"]) * int(state["passes"])
        here = replace(self, passes=passes)
        there = replace(
            here,
            scale=None if scale is None else float(scale) * self.workers * passes / before,
            scale_per_pass=None if per_pass is None else float(per_pass),
            smoothing=checked_smoothing(state["smoothing"]),
        )
        changes = []
        if "scale" in self.said:
            pair = here.scale_of(passes), there.scale_of(passes)
            changes += [OptionChange("scale", *pair)] if pair[0] != pair[1] else []
            there = replace(there, scale=self.scale, scale_per_pass=self.scale_per_pass)
        if "smoothing" in self.said:
            scale = there.scale_of(passes)
            pair = here.smoothing_at(scale), there.smoothing_at(scale)
            changes += [OptionChange("smoothing", *pair)] if pair[0] != pair[1] else []
            there = replace(there, smoothing=self.smoothing)
        return there, changes


def checked_scale(scale: float, smallest: float, rule: str, how: str = "") -> float:
    """The scale, if it is a size that the rule can work with."""
    if not (math.isfinite(scale) and scale > 0.0 and scale >= smallest):
        least = "at least 1" if smallest == 1.0 else "above 0"
        raise ValueError(
            f"scale must be finite and {least} for {rule}, got {scale}{how}. It is the size of the "
            "whole batch (all workers, all passes) in small batches."
        )
    return float(scale)


def checked_passes(passes: Any) -> int:
    """The number of passes, if it is one."""
    try:
        number = 0 if isinstance(passes, bool) else operator.index(passes)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(
            f"num_gradients_to_accumulate must be a whole number of at least 1, got {passes!r}. It "
            "is the number of backward() calls between two step() calls; 1 means no accumulation."
        )
    return number


def checked_smoothing(smoothing: float | None) -> float | None:
    """The smoothing, if an average can be made with it."""
    if smoothing is not None and not 0.0 <= smoothing < 1.0:
        raise ValueError(
            f"smoothing must be at least 0 and below 1, got {smoothing}. It is the weight of "
            "the past; 0 looks at the newest step only."
        )
    return smoothing
