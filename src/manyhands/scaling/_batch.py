"""How large a step's batch is, in small batches, and how fast its noise is averaged.

Plain numbers: ranks, passes, and the scale and smoothing that the user has set.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.scaling._options import OptionMismatch


@dataclass
class Batch:
    """The size of the whole batch: all workers, all passes. The owner of the number of passes.

    The scale is workers x passes (each micro-batch is a small batch), unless `scale` or
    `scale_per_pass` is set.

    Passes are declared, and the user divides: each loss (`loss_is_divided`), or the gradient after
    the last pass. The default smoothing follows the number of small gradients, as fairscale's does.
    Or, if `counts_passes`, passes are counted until one is averaged over the ranks, and the tap
    divides their sum. The default smoothing then follows the scale, as adaptdl's does.
    """

    workers: int = 1
    passes: int = 1  # of a whole step: declared, or counted in the last step
    scale: float | None = None
    scale_per_pass: float | None = None
    smoothing: float | None = None
    counts_passes: bool = False
    loss_is_divided: bool = True
    set_by_user: frozenset[str] = frozenset()  # "scale" and "smoothing", if set in this run

    def scale_for(self, passes: int) -> float:
        """Return the scale of a batch of so many passes."""
        if self.scale is not None:
            return self.scale
        if self.scale_per_pass is not None:
            return self.scale_per_pass * passes
        return float(self.workers * passes)

    @property
    def passes_divided_by_user(self) -> bool:
        """Whether the loss of each pass is divided by the number of passes."""
        return self.loss_is_divided and not self.counts_passes

    def smoothing_for(self, scale: float) -> float:
        """Return the weight of the past when a batch of this scale is added to the averages."""
        if self.smoothing is not None:
            return self.smoothing
        if self.counts_passes:
            return float(0.999**scale)
        return max(1.0 - self.workers * self.passes / 1000.0, 0.0)

    def set_scale(self, *, scale: float | None = None, per_pass: float | None = None) -> None:
        """Set the scale of the whole batch or of one pass, as the user asked."""
        self.scale, self.scale_per_pass = scale, per_pass
        self.set_by_user |= {"scale"}

    def set_smoothing(self, smoothing: float | None) -> None:
        """Set the smoothing as the user asked; None restores the default."""
        self.smoothing = check_smoothing(smoothing)
        if smoothing is None:
            self.set_by_user = self.set_by_user - {"smoothing"}
        else:
            self.set_by_user = self.set_by_user | {"smoothing"}

    def to_state(self) -> dict[str, float | None]:
        """Return the numbers for a state dict."""
        return {
            "scale": self.scale,
            "scale_per_pass": self.scale_per_pass,
            "smoothing": self.smoothing,
            "workers": self.workers,
            "passes": self.passes,
        }

    def parse_state(self, state: Mapping[str, Any]) -> tuple[Batch, list[OptionMismatch]]:
        """Return this run's batch with the saved settings, and where the two runs disagree.

        Workers and passes are this run's. (Counted passes are assumed to be as many as in the
        saved run until a step has been counted.) A saved scale keeps its proportion to workers x
        passes, because the micro-batch stays the same. Settings of this run win over saved ones;
        if they differ, that is a mismatch for the caller to warn about.
        """
        passes = int(state["passes"]) if self.counts_passes else self.passes
        scale, per_pass = state["scale"], state["scale_per_pass"]
        saved_micro_batches = int(state["workers"]) * int(state["passes"])
        ours = replace(self, passes=passes)
        loaded = replace(
            ours,
            scale=None
            if scale is None
            else float(scale) * self.workers * passes / saved_micro_batches,
            scale_per_pass=None if per_pass is None else float(per_pass),
            smoothing=check_smoothing(state["smoothing"]),
        )
        mismatches = []
        if "scale" in self.set_by_user:
            pair = ours.scale_for(passes), loaded.scale_for(passes)
            mismatches += [OptionMismatch("scale", *pair)] if pair[0] != pair[1] else []
            loaded = replace(loaded, scale=self.scale, scale_per_pass=self.scale_per_pass)
        if "smoothing" in self.set_by_user:
            # the default smoothing may depend on the scale: compare both at the final scale
            scale = loaded.scale_for(passes)
            pair = ours.smoothing_for(scale), loaded.smoothing_for(scale)
            mismatches += [OptionMismatch("smoothing", *pair)] if pair[0] != pair[1] else []
            loaded = replace(loaded, smoothing=self.smoothing)
        return loaded, mismatches

    def load_state(self, loaded: Batch) -> None:
        """Become `loaded`, in place: the tap and the noise tracker hold this object."""
        vars(self).update(vars(loaded))


def check_scale(scale: float, smallest: float, rule: str, details: str = "") -> float:
    """Return the scale, or raise if the rule cannot work with a batch of that size."""
    if not (math.isfinite(scale) and scale > 0.0 and scale >= smallest):
        least = "at least 1" if smallest == 1.0 else "above 0"
        raise ValueError(
            f"scale must be finite and {least} for {rule}, got {scale}{details}. It is the size of "
            "the whole batch (all workers, all passes) in small batches."
        )
    return float(scale)


def parse_passes(passes: Any) -> int:
    """Return the number of passes as an int, or raise."""
    try:
        # operator.index takes numpy's integers and rejects floats; True is an int, but a mistake
        number = 0 if isinstance(passes, bool) else operator.index(passes)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(
            f"num_gradients_to_accumulate must be a whole number of at least 1, got {passes!r}. It "
            "is the number of backward() calls between two step() calls; 1 means no accumulation."
        )
    return number


def check_smoothing(smoothing: float | None) -> float | None:
    """Return the smoothing, or raise if no average can be made with it."""
    if smoothing is not None and not 0.0 <= smoothing < 1.0:
        raise ValueError(
            f"smoothing must be at least 0 and below 1, got {smoothing}. It is the weight of "
            "the past; 0 uses the newest step only."
        )
    return smoothing
