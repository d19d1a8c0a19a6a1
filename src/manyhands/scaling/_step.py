"""Measure a step: passes, norms, and the divisor of the gradient.

`Measurement` adds the squared norms of each backward pass (`_hooks.py`) to the current `Step`.
After the last pass, when gradients have been averaged, it computes |G|^2 (`_mean_gradient.py`) and
sends all numbers in a small collective (`_payload.py`). A rule or `NoiseScale` reads the result.

Memory
    hooks.norms      |g| by parameter, for the current pass
    step.squares     sum of |g_i|^2 per group, over the completed passes of the step
    step.sent        the step's numbers, from the last pass until `clear`
    previous.grads   the gradient of the previous step, if consecutive gradients are compared

**Last pass.** The batch's `Loop` determines which pass is the last of a step (`_batch.py`).

**Divisor.** A step's gradient is the mean over N passes. The user divides each loss or, after the
last pass, the gradient; with a `CountingLoop`, `Measurement` divides the gradient. Trainers end an
epoch with a short step of m < N passes, and still divide each loss by N. The gradient is then
multiplied by N / m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.modules import ParallelModules
from manyhands._optimizers.state_parts import SavedEntries
from manyhands._optimizers.wrappers import LossScale, ParamGroup, params_of, unwrap
from manyhands._ranks.ranks import PendingSums, RankGroup
from manyhands._tensors.backward import BackwardPasses
from manyhands._tensors.flat import local_shard
from manyhands._tensors.profiler import Range
from manyhands.scaling._batch import PASSES, Batch
from manyhands.scaling._hooks import (
    GradientHooks,
    GradientVersion,
    Norm,
    PlainNorm,
    any_values,
)
from manyhands.scaling._mean_gradient import MeanGradient, StepFacts
from manyhands.scaling._noise import MeasuredSteps
from manyhands.scaling._payload import (
    NO_BACKWARD,
    NOT_AVERAGED,
    PATIENCE,
    GradientAnomaly,
    RankReport,
    SentStep,
    StepExchange,
)
from manyhands.scaling._previous_gradient import PreviousGradient, parse_previous
from manyhands.scaling._unsharded import find_unaveraged_gradients, unsharded_parameters

NO_REPORT = RankReport()
REPEATED = (
    "a parameter received two gradients in a backward pass: reentrant checkpoints share it. Pass "
    "use_reentrant=False to torch.utils.checkpoint.checkpoint, or run the pass inside one_sample()."
)


@dataclass(frozen=True)
class PassWeight:
    """The weight of a pass, for micro-batches of different sizes (`_weighted_mean.py`)."""

    squares: float  # factor of the squared norm
    small_batches: int  # micro-batches with tokens in this step, on all ranks
    passes: int  # of this rank's step


@dataclass
class Step:
    passes: int = 0  # completed; `Batch.passes` is the expected number
    too_many: bool = False  # whether the last pass exceeded that number and was not counted
    complete: bool = False
    sent: SentStep | None = None
    problem: str | None = None  # an error message for `step`
    norms: Mapping[int, Norm] = field(default_factory=dict)  # of the last pass, in `complete`
    squares: Tensor | None = None
    valid: bool = True  # False if a gradient was measured incompletely
    last_gradient: GradientVersion | None = None  # of some parameter, after the last pass
    divided_by: float = 1  # divisor that `Measurement` has applied to the gradient
    small_batches: int | None = None
    announced: int | None = None  # passes according to a WeightedMean

    @property
    def gradient_untouched(self) -> bool:
        return self.last_gradient is not None and self.last_gradient.unchanged

    @property
    def corrected(self) -> bool:
        """Whether the gradient of a short step is the mean over the passes."""
        return self.divided_by != 1

    @property
    def lacks_last_pass(self) -> bool:
        return self.passes > 0 and not self.complete


# -- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasurementState:
    previous: dict[int, Tensor]  # the previous step's gradient, by parameter
    norms: list[list[float]]
    schedule: MeasuredSteps = field(default_factory=MeasuredSteps)


class Measurement:
    """Turn the gradients of each step's backward passes into a `SentStep`.

    In an unmeasured step (`MeasuredSteps`), ranks still exchange reports.

    `end_passes(self)` is called after a step's last pass and must call `complete`. It is also
    called after an excess pass, with `step.too_many` set. It must not refer to this object: in a
    reference cycle, hooks would run until the next garbage collection.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        ranks: RankGroup,
        norms: PlainNorm,
        batch: Batch,
        loss_scale: LossScale,
        end_passes: Callable[[Measurement], object],
        *,
        compare_at_scale_1: bool = True,
        changes_gradients: bool = True,
    ) -> None:
        self.ranks = ranks
        self.norms = norms
        self.batch = batch
        self.loss_scale = loss_scale
        self.exchange = StepExchange(ranks)
        self.previous = PreviousGradient(norms)
        self.step = Step()
        self.schedule = MeasuredSteps()
        self.next_weight: PassWeight | None = None
        self._end_passes = end_passes
        self._compare_at_scale_1 = compare_at_scale_1
        self._changes_gradients = changes_gradients  # whether to correct a short step's gradient
        self.hooks = GradientHooks(norms, BackwardPasses(self))
        # The gradient of the last step, until the next pass begins.
        self._gradient_at_step: GradientVersion | None = None
        self.hook(param_groups)

    def hook(self, param_groups: Sequence[ParamGroup]) -> None:
        self._params = params_of(param_groups)
        self._mean = MeanGradient(
            param_groups,
            self.ranks,
            self.norms,
            self.previous,
            compare_at_scale_1=self._compare_at_scale_1,
        )
        self.exchange.set_groups(len(param_groups), self._params[0].device)
        self._parallel = ParallelModules(self._params)
        self._unsharded = unsharded_parameters(self._params)
        self.hooks.attach(self._params, self._unsharded)
        self.clear()

    def change_ranks(self, ranks: RankGroup, param_groups: Sequence[ParamGroup]) -> None:
        self.ranks = ranks
        self.exchange = StepExchange(ranks)
        self.hook(param_groups)

    @property
    def pending(self) -> PendingSums | None:
        """The step's collective, if it has begun."""
        return None if self.step.sent is None else self.step.sent.pending

    def measures(self, param_groups: Sequence[ParamGroup]) -> bool:
        pairs = zip(params_of(param_groups), self._params, strict=False)
        return all(a is b for a, b in pairs)

    # -- from pass to pass -------------------------------------------------------------------

    def begin_pass(self) -> None:
        if self.in_one_sample and self.hooks.partial_sums:
            return  # another pass over the same samples
        if self._gradients_cleared():
            self._start_over()
        # Before the pass, because other ranks may wait in its DDP collectives.
        self.exchange.check_announcements(patience=0.0 if self.step.passes else PATIENCE)
        if self.step.passes == 0:
            self._begin_step()
        self.hooks.reset()
        if self.step.divided_by != 1:  # the previous pass was not the last: undo the division
            self.multiply(self.step.divided_by)
            self.step.divided_by = 1
        if self.step.passes == 0 and self._gradient_at_step is not None:
            at_step = self._gradient_at_step
            self._gradient_at_step = None
            not_cleared = at_step.grad is not None and at_step.unchanged
            if not_cleared and self._unsharded:
                # Foreach operations on DTensors do not change the version.
                not_cleared = any_values(self._params)
            if not_cleared:
                self.step.problem = (
                    "the gradients of the previous step were not cleared, and this step's were "
                    "added to them. Call zero_grad() after every step()."
                )

    def _begin_step(self) -> None:
        # All ranks obtain the same result, even if a rank has no pass.
        self.batch.begin_step()
        self.hooks.idle = not self.schedule.due

    def end_pass(self) -> None:
        # After DDP. Ask now, because the user may leave `no_sync()` before the sample is complete.
        self._is_last = self.batch.loop.is_last()
        if not self.in_one_sample:
            self._close_pass()

    @property
    def in_one_sample(self) -> bool:
        return self.hooks.sums_gradients

    @contextmanager
    def one_sample(self) -> Iterator[None]:
        hooks = self.hooks
        if self.in_one_sample:
            raise RuntimeError("one_sample() is already open; leave the block before the next.")
        hooks.sums_gradients = True
        passes_before = hooks.passes.count
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            hooks.sums_gradients = False
        if hooks.passes.count > passes_before:
            self._close_pass()

    def _close_pass(self) -> None:
        step = self.step
        batch = self.batch
        hooks = self.hooks
        step.too_many = step.passes >= batch.passes and not batch.loop.counts
        if step.too_many:
            self._end_passes(self)
            return
        weight = self.next_weight
        self.next_weight = None
        if weight is None:
            step.norms = hooks.finish_pass(1.0)
        else:
            step.norms = hooks.finish_pass(math.sqrt(weight.squares))
            step.small_batches = weight.small_batches
            step.announced = weight.passes
        step.valid = step.valid and hooks.valid
        if hooks.repeated:
            step.problem = REPEATED
        step.passes += 1
        is_last = self._is_last
        if is_last is None:
            is_last = step.passes == batch.passes
        if is_last:
            self._end_passes(self)
            if self._changes_gradients and batch.loop.decides:
                self._apply_short()  # now, before the user clips the gradient
        if not hooks.idle and (batch.loop.counts or step.passes < batch.passes):
            # A counted step can continue after an averaged pass, so always store the sum.
            squares = self._mean.squares_per_group(step.norms)
            if step.squares is not None:
                squares = step.squares + squares
            step.squares = squares
        hooks.reset()
        step.norms = {}
        step.last_gradient = GradientVersion(self._params[hooks.first_index])

    # -- the end of a step -------------------------------------------------------------------

    @torch.no_grad()
    def complete(self, report: RankReport = NO_REPORT) -> SentStep:
        """Measure the mean gradient and exchange the step's numbers."""
        step = self.step
        batch = self.batch
        schedule = self.schedule
        if self.ranks.size > 1:
            self._parallel.check_not_joined("a scaling rule or NoiseScale")
        passes = step.passes if batch.loop.counts else batch.passes
        if step.passes == 0:
            self._begin_step()
        step.problem = self._find_unaveraged() or step.problem
        claims = report._replace(
            passes=passes,
            passes_seen=step.passes,
            scale=batch.scale_for(passes),
            unmeasured_left=schedule.left,
        )
        self.exchange.check_announcements()
        local = self._mean.empty_numbers()
        if schedule.due:
            facts = self._facts(passes)
            with Range("manyhands::norm of the mean"):
                local = self._mean.measure(step.squares, step.norms, facts)
            local.norm_kind = self.norms.norm_kind
            local.steps = schedule.weight_in_steps
        step.sent = self.exchange.send(
            local,
            claims,
            # Otherwise ranks may differ, if a loss used none of the parameters.
            may_be_short=batch.loop.decides,
        )
        step.sent.anomaly = self._find_anomaly()
        step.complete = True
        if batch.loop.counts and passes > 1:
            self.multiply(1 / passes)
            step.divided_by = passes
        return step.sent

    def _facts(self, passes: int) -> StepFacts:
        step = self.step
        batch = self.batch
        loss_scale = self.loss_scale.in_backward()
        small_batch_divided_by = 1
        mean_multiplied_by = max(passes, 1)
        if batch.passes_divided_by_user:
            small_batch_divided_by = passes
            mean_multiplied_by = 1
        corrections: tuple[Tensor | float, Tensor | float] | None = None
        if passes > 1 or isinstance(loss_scale, Tensor) or loss_scale != 1.0:
            corrections = (
                (small_batch_divided_by / loss_scale) ** 2,
                (1 / (mean_multiplied_by * loss_scale)) ** 2,
            )
        if not step.valid:
            corrections = (math.nan, math.nan)  # `History` skips non-finite steps
        small_batches: float | None = step.small_batches
        if small_batches is not None and 0 < step.passes < passes:
            small_batches *= passes / step.passes  # `SentStep.read` multiplies by the share
        return StepFacts(
            passes, batch.scale_for(passes), loss_scale, corrections, step.valid, small_batches
        )

    def complete_early(self, optimizer: Optimizer | None) -> SentStep:
        """Call `end_passes` for a step with missing passes on this rank."""
        # OSS may have to average gradients of passes that this rank did not run.
        if optimizer is not None:
            for layer in unwrap(optimizer, every_layer=True):
                if hasattr(type(layer), "join_in"):
                    layer.join_in()  # type: ignore[attr-defined]
        self.step.too_many = False
        self._end_passes(self)
        assert self.step.sent is not None
        return self.step.sent

    def describe_excess(self) -> str:
        passes = self.batch.passes
        return (
            f"this is backward pass {passes + 1} since the last step(), and {PASSES}={passes}. If "
            "no step follows the earlier passes, call zero_grad(). Run several losses of the "
            "same samples inside `with ....one_sample():`."
        )

    def _find_unaveraged(self) -> str | None:
        """Return an error message if this rank can tell that gradients were not averaged."""
        step = self.step
        hooks = self.hooks
        if self._unsharded:
            return find_unaveraged_gradients(self._params, self._unsharded, hooks.norms)
        # In a measured step, the ranks compare their gradients.
        if hooks.idle and step.passes and self.ranks.size > 1 and self._parallel.in_no_sync:
            return f"{NOT_AVERAGED}."
        return None

    def _find_anomaly(self) -> GradientAnomaly | None:
        step = self.step
        hooks = self.hooks
        # In a separate group, only a rank that sends late can cause a delay.
        if self.ranks.size == 1 or not self.ranks.own_group or self._unsharded:
            return None
        anomaly = partial(GradientAnomaly, self.ranks.rank, self._params)
        if step.passes == 0:
            if any(param.grad is not None for param in self._params):
                return None
            return anomaly(NO_BACKWARD)
        alone = step.passes == 1 and not hooks.idle and self._mean.not_averaged
        missing = [index for index in hooks.trainable if index not in hooks.norms]
        if missing:
            text = (
                f"{len(missing)} of {len(hooks.trainable)} parameters had no gradient in the "
                f"step's last backward() (the first is number {missing[0]}). If they are frozen or "
                "unused, set find_unused_parameters=True"
            )
            return anomaly(text, may_be_intended=not alone)
        if alone:
            return anomaly(NOT_AVERAGED)
        return None

    # -- from step to step -------------------------------------------------------------------

    def clear(self) -> None:
        """Discard the measurements of gradients that were cleared."""
        self.hooks.passes.forget()
        self._gradient_at_step = None
        if self._unsharded and self.step.lacks_last_pass:
            for param in self._unsharded.values():
                # Passes without synchronization accumulate here. zero_grad() does not clear this
                # gradient.
                param.grad = None
        self._start_over()

    def finish_step(self, period: int = 1) -> None:
        """Prepare for the next step. The next measured step represents `period` steps."""
        if self.previous.candidates:
            self.previous.remember()
        last_gradient = self.step.last_gradient
        self.schedule.count(period)
        self.clear()
        self._gradient_at_step = last_gradient

    def _start_over(self) -> None:
        if self.previous.candidates:
            self.previous.forget()
        self.hooks.reset()
        self.step = Step()

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step. The message names the operation `what`."""
        if self.step.lacks_last_pass and not self._gradients_cleared():
            raise RuntimeError(
                f"{what} in the middle of a step, after {self.step.passes} of its backward passes. "
                "If no step will follow these, call zero_grad() first."
            )

    def _gradients_cleared(self) -> bool:
        # Values are read only if the gradients have changed.
        last = self.step.last_gradient
        if last is None or last.grad is None or last.unchanged:
            return False
        if last.param.grad is None:
            return True
        # No collective: ranks agree, unless a shard is zero on a single rank and was changed
        # without being cleared.
        return not any_values(self._params)

    # -- division ----------------------------------------------------------------------------

    def multiply(self, factor: float) -> None:
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    local_shard(param.grad).mul_(factor)

    def _apply_short(self) -> None:
        step = self.step
        batch = self.batch
        if step.passes >= batch.passes:
            batch.short = None  # an earlier pass may have seemed to be the last
            return
        if step.announced not in (None, step.passes):
            raise RuntimeError(
                f"a WeightedMean of {step.announced} counts, but only {step.passes} backward()"
            )
        batch.short = step.passes
        self.multiply(batch.passes / step.passes)
        step.divided_by = step.passes / batch.passes

    def divide_for_user(self) -> None:
        step = self.step
        batch = self.batch
        if batch.loop.counts or batch.loss_is_divided:
            raise RuntimeError("the gradients are divided already: is_scaled_loss is not False.")
        if not step.complete or not step.gradient_untouched:
            raise RuntimeError(
                "call scale_grad_by_num_grads_to_accum() once, right after the last backward()."
            )
        self.multiply(1 / batch.passes)

    def check_divided(self) -> None:
        step = self.step
        batch = self.batch
        left_to_user = not batch.loop.counts and not batch.loss_is_divided and batch.passes > 1
        if left_to_user and step.complete and step.gradient_untouched:
            raise RuntimeError(
                f"is_scaled_loss=False, but the sum of {batch.passes} passes' gradients has not "
                "been divided. Call scale_grad_by_num_grads_to_accum() before step()."
            )

    # -- saving and loading ------------------------------------------------------------------

    def to_state(self) -> dict[str, object]:
        return {
            "previous": self.previous.to_state(),
            "norms": self.norms.to_state(),
            "schedule": self.schedule.to_state(),
        }

    def parse_state(self, entry: SavedEntries) -> MeasurementState:
        norms = entry.rows("norms", self.norms.columns)
        previous = parse_previous(entry, self._params)
        return MeasurementState(previous, norms, MeasuredSteps(*entry.wholes("schedule", 2)))

    def load_state(self, state: MeasurementState) -> None:
        self.clear()
        self.schedule = replace(state.schedule)
        self.norms.load_state(state.norms)
        self.previous.grads = dict(state.previous)
