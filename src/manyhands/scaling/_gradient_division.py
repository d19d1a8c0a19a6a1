"""By what a step's accumulated gradient is divided, and by whom.

The gradient of a step is to be the mean over its N passes. Either the user divides each loss, or
the gradient after the last pass, or the tap divides it. A short step of m < N passes, whose losses
were divided by N, has m / N of their mean: it is multiplied by N / m.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands._core.sharded import local_shard
from manyhands.scaling._settings import Batch
from manyhands.scaling._step_in_progress import StepInProgress


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
        passes, batch = step.passes, self._batch
        before = step.last_norm
        if not step.gradient_untouched or (
            before is not None and not torch.equal(before, self.norm_of_one())
        ):
            raise RuntimeError(
                f"step() after {passes} of {batch.passes} backward passes, whose gradient was "
                "changed before (clipped, unscaled) as if it were that of a whole step. Call "
                f"set_num_gradients_to_accumulate({passes}) before the first backward() of the "
                f"shorter step, and divide its losses by {passes}."
            )
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
                f"a WeightedMean of {step.announced} counts, and only {step.passes} backward "
                "passes in the step. Make it of as many counts as the step will have passes."
            )
        batch.short = step.passes
        self.multiply(batch.passes / step.passes)
        step.divided_by = step.passes / batch.passes

    # -- divided by the user -----------------------------------------------------------------

    def divide_for_user(self, step: StepInProgress) -> None:
        """Divide the gradients by the number of passes, if that is left to the user."""
        batch = self._batch
        if batch.counts_passes or batch.loss_is_divided:
            raise RuntimeError(
                "the gradients are divided already: scale_grad_by_num_grads_to_accum() is for "
                "is_scaled_loss=False, where the losses are not divided."
            )
        if not step.complete or not step.gradient_untouched:
            raise RuntimeError(
                "call scale_grad_by_num_grads_to_accum() once, after the step's last backward() "
                "and before anything else changes the gradients (clipping, for one)."
            )
        self.multiply(1 / batch.passes)

    def check_divided(self, step: StepInProgress) -> None:
        """Raise if the user was to divide the gradients by the number of passes, and has not."""
        batch = self._batch
        left_to_user = not batch.counts_passes and not batch.loss_is_divided and batch.passes > 1
        if left_to_user and step.complete and step.gradient_untouched:
            raise RuntimeError(
                f"is_scaled_loss=False, and the sum of {batch.passes} passes' gradients has not "
                "been divided. Call scale_grad_by_num_grads_to_accum() before step(), or divide "
                f"each pass's loss by {batch.passes} and leave is_scaled_loss=True."
            )
