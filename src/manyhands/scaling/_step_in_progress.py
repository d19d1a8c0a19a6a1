"""The step whose backward passes are under way: what is known of it, measured or not.

**Which steps are measured?** With `measure_every=k` a rule measures one step in k. That step stands
for k steps, so that the averages look back over as many steps as before: with theta the weight of
the past in one step,

    every step      average = theta   average + (1 - theta  ) estimate
    one step in k   average = theta^k average + (1 - theta^k) estimate

In the steps between, no norm is taken, and the averages stay as they are. The ranks still exchange
their claims (`RankClaims`), so mistakes and stop notices arrive in every step, and ranks that would
measure different steps notice it.

Averages look back over M = 1 / (1 - theta) steps, which by default have 1000 small batches at any
scale. What is measured of them must be enough: at least `LEAST` small batches, in at least
`LEAST_STEPS` steps. Every step is measured while the averages hold fewer than M steps, and while
gradients are not finite.

**Who divides the gradient, and by what?** The gradient of a step is to be the mean over its N
passes. Either the user divides each loss, or the gradient after the last pass, or the tap divides
it. A short step of m < N passes, whose losses were divided by N, has m / N of their mean: it is
multiplied by N / m.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.modules import modules_holding
from manyhands._core.sharded import local_shard
from manyhands.scaling._hooks import GradientVersion
from manyhands.scaling._settings import Batch
from manyhands.scaling._step_stats import Norm, StepStats

LEAST = 100  # measured small batches that an average looks back over
LEAST_STEPS = 4  # measured steps that it looks back over


def steps_between(k: int, memory: float, held: float, small_batches: int) -> int:
    """Return how many steps a measured one may stand for: at most k.

    `memory` is how many steps the averages look back over, and `held` how many they have seen. A
    step has so many `small_batches`.

    >>> steps_between(4, 500, held=500, small_batches=2), steps_between(4, 500, 499, 2)
    (4, 1)
    >>> steps_between(4, 10, held=10, small_batches=2), steps_between(4, 10, 10, 100)
    (1, 2)
    """
    if held < memory - 0.5:
        return 1
    return max(1, min(k, int(memory * min(small_batches / LEAST, 1 / LEAST_STEPS) + 1e-6)))


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
    stats: StepStats | None = None  # once it is complete
    problem: str | None = None  # an error message, for the `step` that would use these gradients
    norms: Mapping[int, Norm] = field(default_factory=dict)  # of the last pass, in `complete`
    squares: Tensor | None = None
    valid: bool = True  # False if a gradient was seen only in part
    last_gradient: GradientVersion | None = None  # of one parameter, after the last pass
    last_norm: Tensor | None = None  # of one gradient, where its version does not tell enough
    divided_by: float = 1  # what the gradient was divided by here
    small_batches: int | None = None  # on all ranks; None: one in each pass of each rank
    announced: int | None = None  # the passes that a WeightedMean was made for

    @property
    def gradient_untouched(self) -> bool:
        """Whether nobody has changed the gradients since the last backward pass."""
        return self.last_gradient is not None and self.last_gradient.unchanged


# -- which steps are measured ----------------------------------------------------------------------


@dataclass
class MeasuredSteps:
    """Where a run is between two measured steps."""

    left: int = 0  # steps until the next that is measured; 0: this one is
    passed: int = 0  # steps since the last that was measured

    @property
    def due(self) -> bool:
        """Whether the step under way, or the next, is measured."""
        return self.left <= 0

    @property
    def stands_for(self) -> int:
        """How many steps this one stands for, if it is measured."""
        return self.passed + 1

    def count(self, period: int) -> None:
        """Count a step; the next measured one is to stand for `period` steps."""
        self.passed = 0 if self.due else self.passed + 1
        self.left = period - 1 if self.due else min(self.left, period) - 1

    def to_state(self) -> list[int]:
        """Return what a bitwise continuation needs."""
        return [self.left, self.passed]


class NoSync:
    """Whether the pass under way is inside DDP's `no_sync()`: asked where no norm can tell."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._modules: list[weakref.ref[nn.Module]] | None = None  # None: not searched yet

    def __call__(self) -> bool:
        if self._modules is None:
            found = modules_holding(self._params, _is_ddp)
            self._modules = [weakref.ref(module) for module, _ in found]
        return any(
            module is not None and not module.require_backward_grad_sync
            for module in (each() for each in self._modules)
        )


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


# -- division by the passes ------------------------------------------------------------------------


class GradientDivision:
    """Divides the gradients of these parameters, and checks whether the user has."""

    def __init__(self, params: Sequence[Tensor], batch: Batch) -> None:
        self._params = params
        self._batch = batch

    def multiply(self, factor: float) -> None:
        """Multiply every `.grad` in place."""
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    local_shard(param.grad).mul_(factor)

    # -- short steps -------------------------------------------------------------------------

    def count_short(self, step: StepInProgress) -> None:
        """Make the gradient the mean of a short step's passes, and the batch their size.

        Each loss was divided by the passes of a whole step, and so is the gradient's sum.
        """
        if step.divided_by != 1:
            return  # it is
        before = step.last_norm
        if not step.gradient_untouched or (
            before is not None and not torch.equal(before, self.norm_of_one())
        ):
            but = ", whose gradient was changed already (clipped, unscaled)"
            raise RuntimeError(self._batch.describe_short(step.passes, but))
        self.apply_short(step)

    def norm_of_one(self) -> Tensor:
        """Return the norm of this rank's shard of one gradient.

        Clipping DTensors in one foreach operation does not change their versions.
        """
        shards = (local_shard(p.grad) for p in self._params if p.grad is not None)
        shard = next((each for each in shards if each.numel()), torch.zeros(1))
        return torch.linalg.vector_norm(shard.detach())

    def apply_short(self, step: StepInProgress) -> None:
        """Do what `count_short` does, without asking whether the gradient was changed before."""
        batch = self._batch
        if step.passes >= batch.passes or batch.short_step != "count":
            batch.short = None  # an earlier pass may have looked like the last one
            return
        if step.announced not in (None, step.passes):
            raise RuntimeError(
                f"a WeightedMean of {step.announced} counts, and only {step.passes} backward()"
            )
        batch.short = step.passes
        self.multiply(batch.passes / step.passes)
        step.divided_by = step.passes / batch.passes

    # -- divided by the user -----------------------------------------------------------------

    def divide_for_user(self, step: StepInProgress) -> None:
        """Divide the gradients by the number of passes, if that is left to the user."""
        batch = self._batch
        if batch.counts_passes or batch.loss_is_divided:
            raise RuntimeError("the gradients are divided already: is_scaled_loss is not False.")
        if not step.complete or not step.gradient_untouched:
            raise RuntimeError(
                "call scale_grad_by_num_grads_to_accum() once, right after the last backward()."
            )
        self.multiply(1 / batch.passes)

    def check_divided(self, step: StepInProgress) -> None:
        """Raise if the user was to divide the gradients by the number of passes, and has not."""
        batch = self._batch
        left_to_user = not batch.counts_passes and not batch.loss_is_divided and batch.passes > 1
        if left_to_user and step.complete and step.gradient_untouched:
            raise RuntimeError(
                f"is_scaled_loss=False, and the sum of {batch.passes} passes' gradients has not "
                "been divided. Call scale_grad_by_num_grads_to_accum() before step()."
            )
