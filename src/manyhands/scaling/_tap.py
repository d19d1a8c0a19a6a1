"""From gradients to norms: one `StepStats` for each step's backward passes.

A hook on every parameter takes |g|^2 when autograd has computed the gradient: before it is added
to `.grad`, and before any reduction over the ranks (`_hooks.py`). After the step's last backward
pass, when the gradients have been averaged, |G|^2 is taken once (`_mean_gradient.py`). Both travel
in one `StepStats` (`_step_stats.py`).

Tensors held, and when
    hooks.norms      |g| by parameter, of the pass under way (`_hooks.py`)
    step.squares     sum of |g_i|^2 per group, over the passes of this step so far
    step.stats       the finished numbers, from the step's last pass until `clear`
    previous.grads   the gradient of the last step, if consecutive ones are compared

In a step that is not measured (`_step_in_progress.py`) no norm is taken. The ranks still exchange
their claims, so it has a `StepStats` too.

The tap counts passes and makes no decisions. It has a *holder*, a rule or a `NoiseScale`, of which
it knows only a function to call after a step's last pass. The holder then calls `complete`, which
returns the `StepStats`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.backward import BackwardPasses
from manyhands._core.ranks import RankGroup
from manyhands._core.state_parts import SavedEntries
from manyhands._core.wrappers import LossScale, ParamGroup, unwrap
from manyhands.scaling._hooks import (
    GradientHooks,
    GradientVersion,
    NormKind,
    any_values,
    find_unaveraged_gradients,
    unsharded_parameters,
)
from manyhands.scaling._mean_gradient import MeanGradient, PreviousGradient, parse_previous
from manyhands.scaling._settings import PASSES, Batch
from manyhands.scaling._step_in_progress import (
    GradientDivision,
    MeasuredSteps,
    NoSync,
    PassWeight,
    StepInProgress,
)
from manyhands.scaling._step_stats import (
    NO_BACKWARD,
    NO_REPORT,
    NOT_AVERAGED,
    PATIENCE,
    GradientAnomaly,
    Norm,
    RankReport,
    StepExchange,
    StepFacts,
    StepStats,
    describe_missing,
)


class Averager(Protocol):
    """A data-parallel module that averages the gradients of some passes."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether it averages those of the next one."""


@dataclass(frozen=True)
class TapState:
    """The tap's part of a state dict, parsed."""

    previous: list[Tensor | None]  # the last step's gradient, by parameter
    norms: list[list[float]]  # of the norm kind: see `NormKind.to_state`
    schedule: MeasuredSteps = field(default_factory=MeasuredSteps)


class GradientTap:
    """Turns each step's gradients into a `StepStats`.

    `batch` says how many passes a step has, `loss_scale` what gradients are multiplied by; if
    passes are counted, `averager` says which of them is a step's last.

    `on_last_pass()` is called after a step's last pass, and after a pass that is one too many
    (`step.too_many`). The holder then calls `complete`, with what only it knows.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        ranks: RankGroup,
        norms: NormKind,
        batch: Batch,
        loss_scale: LossScale,
        *,
        on_last_pass: Callable[[], None],
        averager: Averager | None = None,
        compare_at_scale_1: bool = True,
        changes_gradients: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.ranks = ranks
        self.norms = norms
        self.batch = batch
        self.loss_scale = loss_scale
        self.exchange = StepExchange(ranks)
        self.previous = PreviousGradient(norms)
        self.step = StepInProgress()
        self.schedule = MeasuredSteps()
        self.next_weight: PassWeight | None = None  # of the next pass; None: all count the same
        self._on_last_pass = on_last_pass
        self._averager = averager
        self._compare_at_scale_1 = compare_at_scale_1
        self._changes_gradients = changes_gradients  # of a short step, to be their mean
        self._model = model
        # Weak, so that there is no cycle: dropping the optimizer then drops the hooks at once.
        tap = weakref.proxy(self)
        passes = BackwardPasses(lambda: tap._begin_pass(), lambda: tap._end_pass())
        self.hooks = GradientHooks(norms, passes)
        # the gradient along which the last step was made, until the next pass begins
        self._gradient_at_step: GradientVersion | None = None
        self.hook(param_groups)

    def hook(self, param_groups: Sequence[ParamGroup]) -> None:
        """Measure these parameters, and no others."""
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self._mean = MeanGradient(
            param_groups,
            self.ranks,
            self.norms,
            self.previous,
            compare_at_scale_1=self._compare_at_scale_1,
        )
        self.division = GradientDivision(self._params, self.batch)
        self.exchange.set_groups(len(param_groups), self._params[0].device)
        self._in_no_sync = NoSync(self._params)
        self._unsharded = unsharded_parameters(self._params, self._model)
        self.hooks.attach(self._params, self._unsharded)
        self.clear()

    def _begin_step(self) -> None:
        """Find out how many passes this step will have, and choose what it measures.

        The result is the same on every rank, also on a rank without a pass.
        """
        self.batch.begin_step()
        self.hooks.idle = not self.schedule.due

    def measures(self, param_groups: Sequence[ParamGroup]) -> bool:
        """Return whether these are the parameters that are measured."""
        params = [param for group in param_groups for param in group["params"]]
        return all(a is b for a, b in zip(params, self._params, strict=False))

    def unhook(self) -> None:
        """Stop measuring."""
        self.hooks.remove()

    # -- one step ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget what was measured and not used: the gradients were cleared."""
        self.hooks.passes.forget()
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
        return self.step.passes > 0 and not self.step.complete

    def finish_step(self, period: int = 1) -> None:
        """Prepare for the next step: the optimizer is about to step along these gradients.

        The next measured step is to stand for `period` steps.
        """
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
        self.step = StepInProgress()

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step."""
        if self._lacks_last_pass and not self._gradients_cleared():
            raise RuntimeError(
                f"{what} in the middle of a step, after {self.step.passes} of its backward passes. "
                "If no step will follow these, call zero_grad() first."
            )

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
        return not any_values(self._params)

    def _begin_pass(self) -> None:
        """React to a backward pass's first gradient, before it is added to any `.grad`."""
        if self.in_one_sample and self.hooks.partial_sums:
            return  # a further pass over the same samples
        if self._gradients_cleared():
            self._start_over()
        # Now, and not after the pass: DDP's collectives are part of it, and in them the other
        # ranks may be waiting for a pass that this rank will not run.
        self.exchange.check_announcements(patience=0.0 if self.step.passes else PATIENCE)
        if self.step.passes == 0:
            self._begin_step()
        self.hooks.reset()
        if self.step.divided_by != 1:  # what looked like the last pass was not: undo the division
            self.division.multiply(self.step.divided_by)
            self.step.divided_by = 1
        if self.step.passes == 0 and self._gradient_at_step is not None:
            at_step, self._gradient_at_step = self._gradient_at_step, None
            not_cleared = at_step.grad is not None and at_step.unchanged
            if not_cleared and self._unsharded:
                # foreach operations on DTensors do not change their version
                not_cleared = any_values(self._params)
            if not_cleared:
                self.step.problem = (
                    "the gradients of the step before were not cleared, and this step's were "
                    "added to them. Call zero_grad() after every step()."
                )

    def _end_pass(self) -> None:
        """React to the end of a backward pass; DDP has averaged the gradients if it was to."""
        # asked now, because the caller may leave `no_sync()` before the sample is complete
        self._averaged = self._averager is None or self._averager.require_backward_grad_sync
        accumulation = self.batch.accumulation
        self._loop_ends_step = accumulation is not None and accumulation.sync_gradients
        if not self.in_one_sample:
            self._close_pass()

    @property
    def in_one_sample(self) -> bool:
        """Whether all backward passes are of the same samples at present."""
        return self.hooks.sums_gradients

    @contextmanager
    def one_sample(self) -> Iterator[None]:
        """Treat the backward passes inside as one pass over one micro-batch."""
        hooks = self.hooks
        if self.in_one_sample:
            raise RuntimeError("one_sample() is open already; leave it before entering it again.")
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
        """Add the pass's squared norms to the step's; if it was the last, say so."""
        step, batch, hooks = self.step, self.batch, self.hooks
        step.too_many = step.passes >= batch.passes and not batch.counts_passes
        if step.too_many:
            self._on_last_pass()
            return
        step.norms = self._norms_of_pass()
        step.passes += 1
        if self._is_last_pass:
            self._on_last_pass()
            if self._changes_gradients and batch.accumulation is not None:
                self.division.apply_short(step)  # now, before anybody clips the gradient
        if not hooks.idle and (batch.counts_passes or step.passes < batch.passes):
            # Counted passes may go on after one that was averaged, so their sum is always kept.
            squares = self._mean.squares_per_group(step.norms)
            step.squares = squares if step.squares is None else step.squares + squares
        hooks.reset()
        step.norms = {}
        step.last_gradient = GradientVersion(self._params[hooks.first_index])
        if self._unsharded and batch.short_step == "count" and batch.accumulation is None:
            step.last_norm = self.division.norm_of_one()

    def _norms_of_pass(self) -> Mapping[int, Norm]:
        """Return the norms of the pass that has ended; none if its step is not measured."""
        step, hooks = self.step, self.hooks
        norms: Mapping[int, Norm] = hooks.finish_pass()
        if self.next_weight is not None:
            weight, self.next_weight = self.next_weight, None
            norms = hooks.multiply_norms(math.sqrt(weight.squares))
            step.small_batches, step.announced = weight.small_batches, weight.passes
        step.valid = step.valid and hooks.valid
        return norms

    @property
    def _is_last_pass(self) -> bool:
        """Whether the pass that has ended was its step's last."""
        if self.batch.counts_passes:
            return self._averaged
        if self.batch.accumulation is not None:
            return self._loop_ends_step
        return self.step.passes == self.batch.passes

    def _find_unaveraged(self) -> str | None:
        """Return an error message if this rank knows by itself that gradients were not averaged."""
        step, hooks = self.step, self.hooks
        if self._unsharded:
            return find_unaveraged_gradients(self._params, self._unsharded, hooks.norms)
        # In a measured step the ranks compare their gradients.
        if hooks.idle and step.passes and self.ranks.size > 1 and self._in_no_sync():
            return f"{NOT_AVERAGED}."
        return None

    @torch.no_grad()
    def complete(
        self,
        *,
        checksum: float = 0.0,
        report: RankReport = NO_REPORT,
    ) -> StepStats:
        """Measure the mean gradient and send the step's numbers to the other ranks.

        `checksum` and `report` are what the holder of the tap claims: see `RankClaims`.
        """
        step, batch = self.step, self.batch
        passes = step.passes if batch.counts_passes else batch.passes
        by_user = batch.passes_divided_by_user
        if step.passes == 0:
            self._begin_step()
        step.problem = self._find_unaveraged() or step.problem
        small_batches: float | None = step.small_batches
        if small_batches is not None and 0 < step.passes < passes:
            small_batches *= passes / step.passes  # `StepStats.read` takes a short step's share
        facts = StepFacts(
            passes=passes,
            passes_seen=step.passes,
            scale=batch.scale_for(passes),
            loss_scale=self.loss_scale.in_backward(),
            checksum=checksum,
            report=report,
            small_batch_divided_by=passes if by_user else 1,
            mean_multiplied_by=1 if by_user else max(passes, 1),
            valid=step.valid,
            small_batches=small_batches,
            counts_short=batch.short_step == "count",
            # else a rank may have seen fewer, if a loss of its used none of the parameters
            must_see_alike=batch.short_step == "count" and batch.accumulation is not None,
            unmeasured_left=self.schedule.left,
            stands_for=self.schedule.stands_for,
        )
        self.exchange.check_announcements()
        numbers = (
            self._mean.measure(step.squares, step.norms, facts)
            if self.schedule.due
            else self._mean.no_numbers()
        )
        step.stats = self.exchange.send(numbers, facts, self.norms.norm_kind)
        step.stats.anomaly = self._find_anomaly()
        step.complete = True
        if batch.counts_passes and passes > 1:
            self.division.multiply(1 / passes)
            step.divided_by = passes
        return step.stats

    def complete_early(self, optimizer: Optimizer | None) -> StepStats:
        """Complete a step of which this rank has not seen all passes; the holder is called.

        The other ranks may be waiting for these numbers. If the losses of this rank used none of
        the parameters, and DDP gave it the other ranks' gradients, zero is the right number.
        """
        # an OSS takes part in averaging the gradients of passes that this rank did not run
        for layer in [] if optimizer is None else unwrap(optimizer, every_layer=True):
            if hasattr(type(layer), "join_in"):
                layer.join_in()  # type: ignore[attr-defined]
        self.step.too_many = False
        self._on_last_pass()
        assert self.step.stats is not None
        return self.step.stats

    def describe_excess(self) -> str:
        """Return the error message for a pass that is one too many."""
        passes = self.batch.passes
        return (
            f"this is backward pass {passes + 1} since the last step(), and {PASSES}={passes}. If "
            "no step follows the passes before it, call zero_grad(); run several losses of the "
            "same samples inside `with ....one_sample():`."
        )

    def _find_anomaly(self) -> GradientAnomaly | None:
        """Return what is odd about this rank's gradients, if DDP should have averaged them."""
        step, hooks = self.step, self.hooks
        # In a group of our own, only a rank that has not sent can delay the numbers.
        if self.ranks.size == 1 or not self.ranks.own_group or self._unsharded:
            return None
        anomaly = partial(GradientAnomaly, self.ranks.rank, self._params)
        if step.passes == 0:
            has_gradient = any(param.grad is not None for param in self._params)
            return None if has_gradient else anomaly(NO_BACKWARD)
        alone = step.passes == 1 and not hooks.idle and self._mean.not_averaged
        missing = [index for index in hooks.trainable if index not in hooks.norms]
        if missing:
            text = describe_missing(missing, len(hooks.trainable))
            return anomaly(text, may_be_intended=not alone)
        return anomaly(NOT_AVERAGED) if alone else None

    # -- saving and loading ------------------------------------------------------------------

    def to_state(self) -> dict[str, object]:
        """Return the tap's part of a state dict."""
        return {
            "previous": self.previous.to_state(),
            "norms": self.norms.to_state(),
            "schedule": self.schedule.to_state(),
        }

    def parse_state(self, entry: SavedEntries) -> TapState:
        """Return the tap's part of a state dict, or raise; nothing is changed."""
        norms = entry.rows("norms", 5)
        previous = parse_previous(entry, self._params)
        return TapState(previous, norms, MeasuredSteps(*entry.wholes("schedule", 2)))

    def load_state(self, state: TapState) -> None:
        """Continue from a parsed state; measurements under way are dropped."""
        self.clear()
        self.schedule = replace(state.schedule)
        self.norms.load_state(state.norms)
        self.previous.load_state(state.previous, self._params)
