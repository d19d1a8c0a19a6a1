"""From gradients to norms: one `StepStats` for each step's backward passes.

A hook on every parameter takes |g|^2 when autograd has computed the gradient: before it is added
to `.grad`, and before any reduction over the ranks. After the step's last backward pass, when the
gradients have been averaged, |G|^2 is taken once (`_mean_gradient.py`). Both travel in one
`StepStats`. Under `fully_shard`, gradients are computed on other tensors than the optimizer's
(`_fsdp_params.py`).

Tensors held, and when
    step.norms          parameter index -> |g| of the pass under way
    step.partial_sums   parameter index -> the sum of its gradients, if one micro-batch has
                        several: inside `one_sample`, and for a parameter that several reentrant
                        checkpoints share
    step.squares        sum of |g_i|^2 per group, over the passes of this step so far
    step.stats          the finished numbers, from the step's last pass until `clear`

The tap counts passes, but takes no decisions: it asks `context` for what it cannot know, and
returns numbers. The averages, the rule and the optimizer are elsewhere.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.backward import BackwardPasses, current_task
from manyhands._core.dtensor import local_shard
from manyhands._core.ranks import RankGroup
from manyhands.scaling._fsdp_params import unsharded_parameters
from manyhands.scaling._hooks import GradientVersion, ParameterHooks, has_values
from manyhands.scaling._late_ranks import (
    NO_BACKWARD,
    NOT_AVERAGED,
    PATIENCE,
    GradientAnomaly,
    find_missing_gradients,
    wait_for_ranks,
)
from manyhands.scaling._mean_gradient import MeanGradient, Norm, StepContext, StepFacts
from manyhands.scaling._norm_kinds import NormKind
from manyhands.scaling._step_stats import StepStats


@dataclass
class Accumulation:
    """How the gradients of one step are accumulated.

    If `declared` is a number, so many passes make a step, and the user divides: the loss
    (`loss_is_divided`), or the gradient after the last pass. If it is None, passes are counted
    until one is averaged over the ranks (`averages_next_pass`), and the sum is divided here.
    """

    declared: int | None = 1
    loss_is_divided: bool = True
    averages_next_pass: Callable[[], bool] = lambda: True


@dataclass
class StepInProgress:
    """What is known of the step whose backward passes are under way."""

    passes: int = 0
    stats: StepStats | None = None
    problem: str | None = None  # an error message, for the `step` that would use these gradients
    norms: dict[int, Norm] = field(default_factory=dict)
    partial_sums: dict[int, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None
    valid: bool = True  # False if a gradient was seen only in part
    last_gradient: GradientVersion | None = None  # of one parameter, after the last pass
    divided_by: int = 1  # what the sum of the passes was divided by here


class GradientTap:
    """Turns each step's gradients into a `StepStats`.

    `context(passes)` is asked once, when a step is complete. `on_stats` is called with its result.
    `on_excess` is called if there are more passes than declared; by default it raises.
    `join_averaging` takes part in averaging the gradients of passes that this rank did not run.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        ranks: RankGroup,
        norms: NormKind,
        accumulation: Accumulation,
        *,
        context: Callable[[int], StepContext],
        on_stats: Callable[[StepStats], Any] = lambda stats: None,
        on_excess: Callable[[str], None] | None = None,
        join_averaging: Callable[[], None] = lambda: None,
        compare_at_scale_1: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.accumulation = accumulation
        self.mean = MeanGradient(ranks, norms, compare_at_scale_1=compare_at_scale_1)
        self.norms = norms
        self.paused = False
        self.in_one_sample = False
        self.step = StepInProgress()
        self._norm_of = norms.one
        self._context = context
        self._on_stats = on_stats
        self._on_excess = on_excess or _raise
        self._join_averaging = join_averaging
        self._model = model
        # Weak, so that there is no cycle: dropping the optimizer then drops the hooks at once.
        tap = weakref.proxy(self)
        self._passes = BackwardPasses(lambda: tap._begin_pass(), lambda: tap._end_pass())
        # parameters whose gradient has come in several parts, ever
        self._repeated: set[int] = set()
        # the gradient along which the last step was made, until the next pass begins
        self._gradient_at_step: GradientVersion | None = None
        self._hooks: ParameterHooks | None = None
        self.hook(param_groups)

    # -- hooks on parameters -----------------------------------------------------------------

    def hook(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Measure these parameters, and no others."""
        self.unhook()
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self.mean.set_params(param_groups)
        self._unsharded = unsharded_parameters(self._params, self._model)
        deliver = partial(_deliver, weakref.ref(self))
        self._hooks = ParameterHooks(self._params, self._unsharded, deliver)
        self.clear()

    def unhook(self) -> None:
        """Stop measuring."""
        if self._hooks is not None:
            self._hooks.remove()

    @property
    def hooked(self) -> bool:
        return self._hooks is not None and self._hooks.active

    @property
    def parameters_moved(self) -> bool:
        """Whether parameters were moved or converted since, which takes their hooks away."""
        return self._hooks is not None and self._hooks.parameters_moved

    def on_gradient(self, index: int, grad: Tensor) -> None:
        """Measure a parameter's gradient. (Called for each parameter: every microsecond counts.)"""
        task = current_task()
        if task != self._passes.task:
            self._first_index = index
            self._passes.enter(task)
        if grad.requires_grad:  # with create_graph=True
            grad = grad.detach()
        step = self.step
        if self.in_one_sample or index in self._repeated:
            partial_sum = step.partial_sums.get(index)
            # a copy, because autograd may reuse the memory of `grad` for `.grad`
            step.partial_sums[index] = grad.clone() if partial_sum is None else partial_sum + grad
        elif index not in step.norms:
            norm = self._norm_of(index, grad)
            # on a CPU, floats cost a fraction of one-element tensors
            step.norms[index] = norm.item() if self.mean.on_cpu else norm
        else:
            self._on_repeated_gradient(index, grad)

    def _on_repeated_gradient(self, index: int, grad: Tensor) -> None:
        """Add the second part of a gradient that comes in parts.

        A reentrant checkpoint that runs its parameter again causes this. The first part was
        measured and not kept. If `.grad` has the norm that was measured, `.grad` is the first part
        alone. If not, this step's statistics are spoiled, this once: from now on, parts of this
        parameter's gradient are summed.
        """
        self._repeated.add(index)
        assert self._hooks is not None
        first = self._hooks.autograd_params[index].grad
        measured = float(self.step.norms.pop(index))
        norm = math.nan if first is None else float(self.norms.one(index, first))
        if first is not None and math.isclose(norm, measured, rel_tol=1e-4, abs_tol=1e-8):
            self.step.partial_sums[index] = first + grad
        else:
            self.step.valid = False

    # -- one step ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget what was measured and not used: the gradients were cleared."""
        self._passes.forget()
        self._gradient_at_step = None
        if self._unsharded and self._lacks_last_pass:
            for param in self._unsharded.values():
                # Passes without synchronization leave their sum here, where the zero_grad() of
                # `fully_shard` does not clear it.
                param.grad = None
        self._start_over()

    @property
    def _lacks_last_pass(self) -> bool:
        """Whether passes were measured and the step's last pass is still to come."""
        return self.step.passes > 0 and self.step.stats is None

    def finish_step(self) -> None:
        """Prepare for the next step: the optimizer is about to step along these gradients."""
        self.mean.consecutive.remember()
        last_gradient = self.step.last_gradient
        self.clear()
        self._gradient_at_step = last_gradient

    def _start_over(self) -> None:
        self.mean.consecutive.forget()
        self.step = StepInProgress()

    @property
    def accumulating(self) -> bool:
        """Whether a step is under way that still lacks its last backward pass."""
        return self._lacks_last_pass and not self._gradients_cleared()

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step."""
        if self.accumulating:
            raise RuntimeError(
                f"{what} in the middle of a step, after {self.step.passes} of its backward passes. "
                "Call it between step() and the next backward(). If no step will follow these "
                "passes, as at the end of an epoch, call zero_grad() first."
            )

    @property
    def in_backward(self) -> bool:
        return self._passes.open

    @property
    def gradient_untouched(self) -> bool:
        """Whether nobody has changed the gradients since the last backward pass."""
        return self.step.last_gradient is not None and self.step.last_gradient.unchanged

    def _gradients_cleared(self) -> bool:
        """Return whether the gradients of this step's passes have been cleared.

        Values are read only if somebody has touched the gradients.
        """
        last = self.step.last_gradient
        if last is None or last.grad is None or last.unchanged:
            return False
        if last.param.grad is None:
            return True
        # This needs no collective, even if gradients are sharded. All ranks then come to the same
        # answer, unless a shard is zero on one rank alone and was changed without being cleared.
        return not self._any_values()

    def _any_values(self) -> bool:
        return any(has_values(p.grad) for p in self._params if p.grad is not None)

    def _begin_pass(self) -> None:
        """React to a backward pass's first gradient, before it is added to any `.grad`."""
        if self.in_one_sample and self.step.partial_sums:
            return  # a further pass over the same samples
        if self._gradients_cleared():
            self._start_over()
        # Now, and not after the pass: DDP's collectives are part of it, and in them the other
        # ranks may be waiting for a pass that this rank will not run.
        self.mean.check_announcements(patience=0.0 if self.step.passes else PATIENCE)
        self.step.norms, self.step.partial_sums = {}, {}
        if self.step.divided_by > 1:  # what looked like the last pass was not: undo the division
            self.multiply_gradients(self.step.divided_by)
            self.step.divided_by = 1
        if self.step.passes == 0 and self._gradient_at_step is not None:
            at_step, self._gradient_at_step = self._gradient_at_step, None
            not_cleared = at_step.grad is not None and at_step.unchanged
            if not_cleared and self._unsharded:
                # foreach operations on DTensors do not change their version
                not_cleared = self._any_values()
            if not_cleared:
                self.step.problem = (
                    "the gradients of the step before were not cleared, and this step's were "
                    "added to them. Call zero_grad() after every step()."
                )

    def _end_pass(self) -> None:
        """React to the end of a backward pass; DDP has averaged the gradients if it was to."""
        # asked now, because the caller may leave `no_sync()` before the sample is complete
        self._averaged = self.accumulation.averages_next_pass()
        if not self.in_one_sample:
            self._close_pass()

    @contextmanager
    def one_sample(self) -> Iterator[None]:
        """Treat the backward passes inside as one pass over one micro-batch."""
        if self.in_one_sample:
            raise RuntimeError("one_sample() is open already; leave it before entering it again.")
        self.in_one_sample = True
        passes_before = self._passes.count
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            self.in_one_sample = False
        if self._passes.count > passes_before:
            self._close_pass()

    def _close_pass(self) -> None:
        """Add the pass's squared norms to the step's; complete the step if this was the last."""
        step, declared = self.step, self.accumulation.declared
        if declared is not None and step.passes >= declared:
            self._on_excess(
                f"this is backward pass {step.passes + 1} since the last step(), and "
                f"num_gradients_to_accumulate={declared}. Clear the gradients of passes that no "
                "step will follow (as at the end of an epoch) with zero_grad(); declare more "
                "passes, if there are more; or, if several losses of the same samples have a "
                "backward each, run them inside `with ....one_sample():`."
            )
            return
        for index, partial_sum in step.partial_sums.items():
            step.norms[index] = self.norms.one(index, partial_sum)
        step.passes += 1
        if self._averaged if declared is None else step.passes == declared:
            self._complete()
        if declared is None or step.passes < declared:
            # Counted passes may go on after one that was averaged, so their sum is always kept.
            squares = self.mean.squares_per_group(step.norms)
            step.squares = squares if step.squares is None else step.squares + squares
        step.norms, step.partial_sums = {}, {}
        step.last_gradient = GradientVersion(self._params[self._first_index])

    @torch.no_grad()
    def _complete(self) -> None:
        """Measure the mean gradient and send the step's numbers to the other ranks."""
        step, declared = self.step, self.accumulation.declared
        passes = step.passes if declared is None else declared
        self._check_fully_shard_averaged()
        by_user = declared is not None and self.accumulation.loss_is_divided
        stats = self.mean.measure_step(
            step.squares,
            step.norms,
            StepFacts(
                passes=passes,
                passes_seen=step.passes,
                context=self._context(passes),
                small_batch_divided_by=passes if by_user else 1,
                mean_multiplied_by=1 if by_user else max(passes, 1),
                valid=step.valid,
            ),
        )
        step.stats = stats
        anomaly = self._find_anomaly()
        if anomaly is not None:
            stats.wait_for_ranks = partial(
                wait_for_ranks, anomaly, stats.pending, self.mean.ranks.rank, self._params
            )
        if declared is None and passes > 1:
            self.multiply_gradients(1 / passes)
            step.divided_by = passes
        self._on_stats(stats)

    def _check_fully_shard_averaged(self) -> None:
        """Note a problem if `fully_shard` has not averaged all gradients of the last pass."""
        if any(i in self._unsharded and self._params[i].grad is None for i in self.step.norms):
            self.step.problem = (
                "after the step's last backward() there are gradients that fully_shard has not "
                "averaged. Was that pass inside no_sync(), or after "
                "set_requires_gradient_sync(False)? Only the passes before it may be."
            )
        elif any(param.grad is not None for param in self._unsharded.values()):
            self.step.problem = (
                "the step's last backward() has left gradients that fully_shard has not averaged: "
                "a module that it was called on ran several times under reentrant checkpoints, "
                "which torch's fully_shard does not support. Pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint, or wrap the module with mh.FSDP."
            )

    def _find_anomaly(self) -> GradientAnomaly | None:
        """Return what is odd about this rank's gradients, if DDP should have averaged them."""
        ranks, step = self.mean.ranks, self.step
        # In a group of our own, only a rank that has not sent can delay the numbers.
        if ranks.size == 1 or not ranks.own_group or self._unsharded:
            return None
        if step.passes == 0:
            return None if any(p.grad is not None for p in self._params) else NO_BACKWARD
        alone = step.passes == 1 and self.mean.not_averaged
        assert self._hooks is not None
        return find_missing_gradients(
            self._hooks.trainable, step.norms, may_be_intended=not alone
        ) or (NOT_AVERAGED if alone else None)

    def complete_early(self) -> StepStats:
        """Send what there is: `step` was called before this rank has seen all passes.

        The other ranks may be waiting for these numbers. A rank whose own losses used none of the
        parameters, while DDP gave it the other ranks' gradients, has a valid zero to report.
        """
        self._join_averaging()
        self._complete()
        assert self.step.stats is not None
        return self.step.stats

    @property
    def previous_gradient(self) -> list[Tensor | None]:
        """The last step's gradient by parameter; empty unless consecutive ones are compared."""
        return self.mean.consecutive.previous

    @previous_gradient.setter
    def previous_gradient(self, grads: Sequence[Tensor | None]) -> None:
        # a loaded state dict may be on another device
        self.mean.consecutive.previous = [
            None if grad is None else grad.to(param.device)
            for grad, param in zip(grads, self._params, strict=False)
        ]

    def multiply_gradients(self, factor: float) -> None:
        """Multiply every `.grad` in place."""
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    local_shard(param.grad).mul_(factor)


def _deliver(tap: weakref.ref[GradientTap], index: int, grads: tuple[Tensor | None]) -> None:
    """Pass a gradient to the tap, unless it is gone or paused."""
    receiver, grad = tap(), grads[0]
    if receiver is not None and grad is not None and not receiver.paused:
        receiver.on_gradient(index, grad)


def _raise(message: str) -> None:
    raise RuntimeError(message)
