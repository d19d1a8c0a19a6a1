"""Connect rules to training loops that control the passes.

`CountingLoop` and `FollowingLoop` decide during a step which pass is the last. `LoopPort` is the
interface of a rule for such a loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import SupportsIndex

from manyhands._arguments import whole
from manyhands._optimizers.foreign import PreparedOptimizer
from manyhands._optimizers.state_parts import OptimizerLayers
from manyhands.scaling._batch import PASSES, PER_STEP, Accumulation, Averager, Loop
from manyhands.scaling._noise import NoiseAverage, ratio_of_squares
from manyhands.scaling._optimizer import RuleCore, ScaledOptimizer
from manyhands.scaling._payload import StepObserver
from manyhands.scaling._preconditioned import rescale_second_moments
from manyhands.scaling._step import PassWeight


class CountingLoop(Loop):
    """Count passes until the module averages. `Measurement` divides their sum."""

    counts = True

    def __init__(self, module: Averager) -> None:
        if not hasattr(module, "require_backward_grad_sync"):
            why = "has no require_backward_grad_sync: use AdaptiveDataParallel."
            raise TypeError(f"{type(module).__name__} {why}")
        self.module: Averager = module

    def is_last(self) -> bool:
        return self.module.require_backward_grad_sync


class FollowingLoop(Loop):
    """Follow an `Accumulation`. With `in_every_pass`, its loop calls `step()` after every pass."""

    decides = True

    def __init__(self, accumulation: Accumulation, *, in_every_pass: bool = False) -> None:
        self._accumulation = accumulation
        self._in_every_pass = in_every_pass

    def passes(self) -> int:
        return self._accumulation.gradient_accumulation_steps

    def is_last(self) -> bool:
        return self._accumulation.sync_gradients

    @property
    def in_mid_step(self) -> bool:
        return super().in_mid_step or (self._in_every_pass and not self.is_last())


def prepared_loop(prepared: PreparedOptimizer, declared: int) -> FollowingLoop | None:
    """Return a prepared optimizer's loop; None if the declared number of passes applies."""
    passes = prepared.loop.gradient_accumulation_steps
    if declared not in (1, passes):
        if passes == 1:
            return None
        raise ValueError(
            f"{PASSES}={declared}, but the trainer's loop accumulates {passes} passes. "
            "Omit the argument."
        )
    return FollowingLoop(prepared.loop, in_every_pass=True)


def passes_and_loop(passes: SupportsIndex | Accumulation) -> tuple[int, Loop]:
    if isinstance(passes, Accumulation):
        return passes.gradient_accumulation_steps, FollowingLoop(passes)
    return whole(PASSES, passes, least=1, why=PER_STEP), Loop()


class LoopPort:
    """The interface of a rule for a training loop that controls the passes: `rule.port`.

    `Ramp`, `WeightedMean`, `AdaptiveDataParallel` and adapters of trainers use it. In other loops,
    declare the passes (`num_gradients_to_accumulate`) or pass an `Accumulation`.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> for passes in (1, 3):
    ...     rule.port.begin_step(passes)
    ...     for _ in range(passes):
    ...         (model(torch.randn(8, 2)).mean() / rule.port.divide_by).backward()
    ...     rule.step()
    ...     rule.zero_grad()
    >>> rule.scale, rule.port.steps
    (3.0, 2)
    """

    def __init__(self, rule: ScaledOptimizer, core: RuleCore) -> None:
        self._rule = rule
        self._core = core
        self.batch = core.batch
        """The size of a step. Read-only; change it with the methods."""
        self.history = core.history
        """Results of completed steps."""
        self.loss_scale = core.loss_scale
        """The factor of the gradients. Assign the gradient scaler to the `scaler` attribute, or any
        object with `get_scale()`."""

    # -- control -----------------------------------------------------------------------------

    def begin_step(self, passes: int, *, scale_per_pass: float | None = None) -> None:
        """Declare the number of passes per step, on every rank and between two steps.

        `scale_per_pass` is the size of a pass in small batches, on all ranks together.
        """
        self.check_between_steps("port.begin_step()")
        batch = self._core.batch
        if scale_per_pass is not None:
            batch.scale_per_pass = scale_per_pass
        if not batch.loop.counts:
            batch.set_passes(passes)

    def end_pass(self, last: bool | None) -> None:
        """Declare whether the current pass is the last of the step; None withdraws the statement.

        After False, `step()` and `zero_grad()` have no effect.
        """
        self._core.batch.loop.declared_last = last

    def skip(self) -> None:
        """Drop the passes of the current step, as `zero_grad()` does."""
        self._rule.forget_gradients()

    def follow(self, accumulation: Accumulation | None) -> None:
        """Let a loop control the passes from now on; None restores the declared number.

        The loop divides losses by `gradient_accumulation_steps`. Short steps are corrected.
        """
        self.check_between_steps("port.follow()")
        self._core.batch.follow(Loop() if accumulation is None else FollowingLoop(accumulation))

    def weigh_pass(self, squares: float, small_batches: int, passes: int) -> None:
        """Set the weight of the next pass, for `WeightedMean`.

        The squared norm of the pass is multiplied by `squares`. The step has `small_batches` small
        batches on all ranks, and `passes` passes on this rank.
        """
        self._core.measurement.next_weight = PassWeight(squares, small_batches, passes)

    def set_scale_of_passes(self) -> None:
        """Convert the scale to a scale per pass, before the number of passes changes."""
        batch = self._core.batch
        if batch.scale is not None:
            batch.scale_per_pass = batch.scale / batch.passes
            batch.scale = None

    def set_memory(self, small_batches: float) -> None:
        """Set the memory of the averages in small batches. An explicit smoothing has precedence."""
        self._core.batch.memory = small_batches

    def restart_averages(self) -> NoiseAverage:
        """Discard the averages, and return an empty average."""
        history = self._core.history
        history.average = history.average.restarted()
        return history.average

    def follow_batch(self, before: float, now: float) -> bool:
        """Convert Adam's second moments to scale `now`; return whether the noise is known.

        Call this method on every rank.
        """
        average = self._core.history.average
        if not average.measured:
            return False
        ratio = ratio_of_squares(average.sqr_of(), average.var_of(), before, now)
        rescale_second_moments(OptimizerLayers.of(self._rule).plain, ratio)
        # Also on a rank with an empty shard: all ranks collect sharded moments.
        self._core.measurement.norms.moments_changed()
        return True

    @property
    def observer(self) -> StepObserver | None:
        """An object that takes part in every step, such as a `Ramp`."""
        return self._core.reporter.observer

    @observer.setter
    def observer(self, observer: StepObserver) -> None:
        self._core.reporter.observer = observer

    # -- query -------------------------------------------------------------------------------

    def check_step(self, passes: int, scale_per_pass: float) -> None:
        """Raise if the rule cannot scale the optimizer for these passes."""
        self._rule._check_batch(replace(self._core.batch, scale_per_pass=scale_per_pass), passes)

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step. The message names the operation `what`."""
        self._rule._check_between_steps(what)

    @property
    def divide_by(self) -> int:
        """Divisor of each pass's loss in the loop."""
        batch = self._core.batch
        if batch.passes_divided_by_user:
            return batch.passes
        return 1

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self._core.history.steps

    @property
    def keeps_gradients(self) -> bool:
        return self._core.keeps_gradients
