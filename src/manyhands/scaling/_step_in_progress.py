"""What is known of the step whose backward passes are under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from manyhands.scaling._hooks import GradientVersion
from manyhands.scaling._step_stats import Norm, StepStats


@dataclass(frozen=True)
class PassWeight:
    """The weight of a pass's gradient if micro-batches differ in size (`_weighted_mean.py`)."""

    squares: float  # its squared norm counts so many times
    small_batches: int  # of the whole step, on all ranks: those that are not empty
    passes: int  # that this rank's step is to have


@dataclass
class StepInProgress:
    """What is known of the step whose backward passes are under way."""

    passes: int = 0  # seen so far; `Batch.passes` is how many the step has
    too_many: bool = False  # whether the last pass was one more than that, and is not counted
    complete: bool = False  # whether the last pass is over
    stats: StepStats | None = None  # once it is complete, if its numbers were sent
    problem: str | None = None  # an error message, for the `step` that would use these gradients
    norms: Mapping[int, Norm] = field(default_factory=dict)  # of the last pass, in `complete`
    squares: Tensor | None = None
    inverse_batches: float = 0.0  # sum over the passes of 1 / examples, if those are measured
    valid: bool = True  # False if a gradient was seen only in part
    last_gradient: GradientVersion | None = None  # of one parameter, after the last pass
    last_norm: Tensor | None = None  # of one gradient, where its version does not tell enough
    divided_by: float = 1  # what the gradient was divided by here
    small_batches: int | None = None  # on all ranks; None: one in each pass of each rank
    announced: int | None = None  # the passes that a WeightedMean was made for
    before: list[int] = field(default_factory=list)  # `MeasuredSteps` before it was counted

    @property
    def gradient_untouched(self) -> bool:
        """Whether nobody has changed the gradients since the last backward pass."""
        return self.last_gradient is not None and self.last_gradient.unchanged
