"""Measure a step: its passes, their norms, and who divides its gradient.

`Batch` says how many passes a step has, and how large the whole batch is. `Measurement` is told
when backward passes begin and end (`_tensors/backward.py`). It adds each pass's squared norms
(`_hooks.py`) to the `Step` under way. After the step's last pass, when the gradients have been
averaged, |G|^2 is taken once (`_mean_gradient.py`), and everything is sent in one small collective
(`_payload.py`). What comes back is read by whoever steps: a rule or a `NoiseScale`.

Tensors held, and when
    hooks.norms      |g| by parameter, of the pass under way
    step.squares     sum of |g_i|^2 per group, over the passes of this step so far
    step.sent        the step's numbers, from its last pass until `clear`
    previous.grads   the gradient of the last step, if consecutive ones are compared

**Passes.** A step has passes, and one of them is its last. A `Loop` knows which:

    Loop             the pass of a declared number: the user's, a `Ramp`'s, or an adapter's
    CountingLoop     the first pass that a data-parallel module averages, outside of `no_sync()`
    FollowingLoop    the pass of which an `Accumulation` says so: a trainer, while it runs

Trainers take the last step of an epoch with the passes that are left:

    N     passes of a whole step; trainers divide every pass's loss by it
    m     passes of a short step, m < N; its gradient is then m / N times the mean of m passes

**Who divides the gradient, and by what?** The gradient of a step is to be the mean over its N
passes. Either the user divides each loss, or the gradient after the last pass, or it is divided
here. A short step of m < N passes, whose losses were divided by N, has m / N of their mean: it is
multiplied by N / m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._arguments import whole
from manyhands._optimizers.foreign import PreparedOptimizer
from manyhands._optimizers.modules import ParallelModules
from manyhands._optimizers.state_parts import SavedEntries
from manyhands._optimizers.wrappers import LossScale, ParamGroup, params_of, unwrap
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.backward import BackwardPasses
from manyhands._tensors.flat import local_shard
from manyhands.scaling._hooks import (
    GradientHooks,
    GradientVersion,
    Norm,
    PlainNorm,
    any_values,
    find_unaveraged_gradients,
    unsharded_parameters,
)
from manyhands.scaling._mean_gradient import (
    MeanGradient,
    PreviousGradient,
    StepFacts,
    parse_previous,
)
from manyhands.scaling._noise import MeasuredSteps
from manyhands.scaling._payload import (
    NO_BACKWARD,
    NOT_AVERAGED,
    PATIENCE,
    GradientAnomaly,
    RankReport,
    SentStep,
    StepExchange,
    describe_missing,
)
from manyhands.scaling._settings import (
    PASSES,
    PER_STEP,
    Accumulation,
    OptionMismatch,
    ShortStep,
    check_smoothing,
)

NO_REPORT = RankReport()

# -- who knows the passes --------------------------------------------------------------------------


class Averager(Protocol):
    """A data-parallel module that averages the gradients of some passes."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether it averages those of the next one."""


class Loop:
    """Who knows how many passes a step has, and which is its last: here, a declared number."""

    counts = False  # whether the number is known only after the last pass
    decides = False  # whether a loop sets the number, and may end a step before it
    module: Averager | None = None  # whose averaged passes are counted
    # What an adapter has said of the pass under way: is it the last? None: nothing. If it says so,
    # its loop calls `step()` and `zero_grad()` in every pass.
    said: bool | None = None

    def passes(self) -> int | None:
        """Return the passes of the step that begins; None: those that were declared."""
        return None

    def is_last(self) -> bool | None:
        """Return whether the pass that ends is the last; None: if it has the declared number."""
        return self.said

    @property
    def in_mid_step(self) -> bool:
        """Whether a loop that calls `step()` in every pass says that its step goes on."""
        return self.said is False


class CountingLoop(Loop):
    """Passes are counted until the module averages one. Their sum is divided here."""

    counts = True

    def __init__(self, module: Averager) -> None:
        if not hasattr(module, "require_backward_grad_sync"):
            why = "does not say which passes it averages: use AdaptiveDataParallel."
            raise TypeError(f"{type(module).__name__} {why}")
        self.module: Averager = module

    def is_last(self) -> bool:
        return self.module.require_backward_grad_sync


class FollowingLoop(Loop):
    """The passes are those of an `Accumulation`. Some loops call `step()` in every pass."""

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
    """Return the loop of a prepared optimizer, or None if it does not decide about passes.

    If it does not accumulate, and a number of passes was declared, the user's loop accumulates by
    itself. The declared number counts then.
    """
    passes = prepared.loop.gradient_accumulation_steps
    if declared not in (1, passes):
        if passes == 1:
            return None
        raise ValueError(
            f"{PASSES}={declared}, but the trainer's loop accumulates {passes} passes. "
            "Leave the argument out."
        )
    return FollowingLoop(prepared.loop, in_every_pass=True)


def passes_and_loop(passes: SupportsIndex | Accumulation) -> tuple[int, Loop]:
    """Return how many passes a step has at present, and who knows it."""
    if isinstance(passes, Accumulation):
        return passes.gradient_accumulation_steps, FollowingLoop(passes)
    return whole(PASSES, passes, least=1, why=PER_STEP), Loop()


# -- the size of a step ----------------------------------------------------------------------------


@dataclass
class Batch:
    """The size of the whole batch: all workers, all passes. The owner of the number of passes.

    The scale is workers x passes (each micro-batch is a small batch), unless `scale` or
    `scale_per_pass` is set.

    The `loop` knows which pass is a step's last. The user divides: each loss (`loss_is_divided`),
    or the gradient after the last pass. The default smoothing follows the number of small
    gradients, as fairscale's does. Or, if the loop counts passes, `Measurement` divides their sum,
    and the default smoothing follows the scale, as adaptdl's.

    A step may end before all passes have run. `short_step` is what such a short step does: see
    `SentStep.share`.
    """

    workers: int = 1
    passes: int = 1  # of a whole step: declared, or counted in the last step
    short: int | None = None  # passes of the last step, if it had fewer and was counted
    loop: Loop = field(default_factory=Loop)
    short_step: ShortStep = "error"
    scale: float | None = None
    scale_per_pass: float | None = None
    smoothing: float | None = None
    memory: float = 1000.0  # how many small batches the averages look back by default
    loss_is_divided: bool = True
    set_by_user: frozenset[str] = frozenset()  # "scale" and "smoothing", if set in this run

    def scale_for(self, passes: int) -> float:
        """Return the scale of a batch with this number of passes."""
        if self.scale is not None:
            if self.loop.counts:
                return self.scale
            return self.scale * (passes / self.passes)
        if self.scale_per_pass is not None:
            return self.scale_per_pass * passes
        return float(self.workers * passes)

    def begin_step(self) -> None:
        """Begin a step, before its first pass; it has as many passes as the loop says now."""
        self.set_passes(self.loop.passes() or self.passes)

    def set_passes(self, passes: int) -> None:
        """Set the number of passes of whole steps from now on."""
        self.passes = passes
        self.short = None

    @property
    def passes_divided_by_user(self) -> bool:
        """Whether the loss of each pass is divided by the number of passes."""
        return self.loss_is_divided and not self.loop.counts

    def smoothing_for(self, scale: float) -> float:
        """Return the weight of the past when a batch of this scale is added to the averages."""
        if self.smoothing is not None:
            return self.smoothing
        if self.loop.counts:
            return float((1.0 - 1.0 / self.memory) ** scale)
        return max(1.0 - self.workers * (self.short or self.passes) / self.memory, 0.0)

    def set_scale(self, *, scale: float | None = None, per_pass: float | None = None) -> None:
        """Set the scale of the whole batch or of one pass, as the user asked."""
        self.scale = scale
        self.scale_per_pass = per_pass
        self.set_by_user |= {"scale"}

    def set_smoothing(self, smoothing: float | None) -> None:
        """Set the smoothing as the user asked; None restores the default."""
        if smoothing is None:
            self.smoothing = None
            self.set_by_user -= {"smoothing"}
        else:
            self.smoothing = check_smoothing(smoothing)
            self.set_by_user |= {"smoothing"}

    def to_state(self) -> dict[str, float | None]:
        """Return the numbers for a state dict."""
        return {
            "scale": self.scale,
            "scale_per_pass": self.scale_per_pass,
            "smoothing": self.smoothing,
            "workers": self.workers,
            "passes": self.passes,
        }

    def parse_state(self, state: SavedEntries) -> tuple[Batch, list[OptionMismatch]]:
        """Return this run's batch with the saved settings, and where the two runs disagree.

        Workers and passes are this run's. A saved scale keeps its proportion to workers x passes.
        """
        saved_passes = state.whole("passes", 1)
        passes = self.passes
        if self.loop.counts:
            passes = saved_passes
        growth = self.workers * passes / (state.whole("workers", 1) * saved_passes)
        ours = replace(self, passes=passes, short=None)
        loaded = replace(ours, scale=None, scale_per_pass=None, smoothing=None)
        if state.has("scale"):
            loaded.scale = state.real("scale", above=0.0) * growth
        if state.has("scale_per_pass"):
            loaded.scale_per_pass = state.real("scale_per_pass", above=0.0)
        if state.has("smoothing"):
            loaded.smoothing = check_smoothing(state["smoothing"])
        mismatches = []
        if "scale" in self.set_by_user:
            mismatches.append(
                OptionMismatch("scale", ours.scale_for(passes), loaded.scale_for(passes))
            )
            loaded.scale = self.scale
            loaded.scale_per_pass = self.scale_per_pass
        if "smoothing" in self.set_by_user:
            # the default smoothing may depend on the scale: compare both at the final scale
            scale = loaded.scale_for(passes)
            mismatches.append(
                OptionMismatch("smoothing", ours.smoothing_for(scale), loaded.smoothing_for(scale))
            )
            loaded.smoothing = self.smoothing
        return loaded, [each for each in mismatches if each.here != each.in_state_dict]

    def check_divided(self) -> None:
        """Raise if the gradient of a short step could not be made the mean of its passes."""
        if self.short_step == "count" and not self.loss_is_divided:
            raise ValueError("short_step='count' needs losses that are divided by the passes.")

    def describe_short(self, passes: int, but: str = "") -> str:
        """Return the error message for a step of fewer passes, and how a loop declares one."""
        call = f"call set_num_gradients_to_accumulate({passes}) on every worker"
        if self.loop.decides:
            call = f"let the loop's gradient_accumulation_steps be {passes}"
        return (
            f"step() after {passes} of {self.passes} backward passes{but}. Before the first pass "
            f"of a shorter step, {call}, and divide its losses by {passes}. (short_step='count' is "
            f"for loops that divide every loss by {self.passes}, and change no gradient before "
            "step().)"
        )

    def load_state(self, loaded: Batch) -> None:
        """Become `loaded`, in place: rule and measurement hold this object."""
        self.passes = loaded.passes
        self.short = loaded.short
        self.scale = loaded.scale
        self.scale_per_pass = loaded.scale_per_pass
        self.smoothing = loaded.smoothing


@dataclass(frozen=True)
class PassWeight:
    """The weight of a pass's gradient if micro-batches differ in size (`_weighted_mean.py`)."""

    squares: float  # its squared norm counts so many times
    small_batches: int  # of the whole step, on all ranks: those that are not empty
    passes: int  # that this rank's step is to have


@dataclass
class Step:
    """What is known of the step whose backward passes are under way."""

    passes: int = 0  # seen so far; `Batch.passes` is how many the step has
    too_many: bool = False  # whether the last pass was one more than that, and is not counted
    complete: bool = False  # whether the last pass is over
    sent: SentStep | None = None  # once it is complete
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

    @property
    def lacks_last_pass(self) -> bool:
        """Whether passes were measured and the last one is still to come."""
        return self.passes > 0 and not self.complete


# -- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasurementState:
    """The measurement's part of a state dict, parsed."""

    previous: dict[int, Tensor]  # the last step's gradient, by parameter
    norms: list[list[float]]  # of the norm kind: see `PlainNorm.to_state`
    schedule: MeasuredSteps = field(default_factory=MeasuredSteps)


class Measurement:
    """Turns the gradients of each step's backward passes into one `SentStep`.

    `batch` says how many passes a step has, `loss_scale` what gradients are multiplied by. In a
    step that is not measured (`MeasuredSteps`) no norm is taken. The ranks still exchange their
    reports.

    `end_passes` is called with this object after a step's last pass, and is to call `complete`. It
    is also called after a pass that is one too many: `step.too_many` is set, and the step cannot be
    used. The function must not refer to this object: in a reference cycle the hooks would measure
    and send until the next garbage collection.
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
        model: nn.Module | None = None,
    ) -> None:
        self.ranks = ranks
        self.norms = norms
        self.batch = batch
        self.loss_scale = loss_scale
        self.exchange = StepExchange(ranks)
        self.previous = PreviousGradient(norms)
        self.step = Step()
        self.schedule = MeasuredSteps()
        self.next_weight: PassWeight | None = None  # of the next pass; None: all count the same
        self._end_passes = end_passes
        self._compare_at_scale_1 = compare_at_scale_1
        self._changes_gradients = changes_gradients  # of a short step, to be their mean
        self._model = model
        self.hooks = GradientHooks(norms, BackwardPasses(self))
        # the gradient along which the last step was made, until the next pass begins
        self._gradient_at_step: GradientVersion | None = None
        self.hook(param_groups)

    def hook(self, param_groups: Sequence[ParamGroup]) -> None:
        """Measure these parameters from now on: at the start, and when a group was added."""
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
        self._unsharded = unsharded_parameters(self._params, self._model)
        self.hooks.attach(self._params, self._unsharded)
        self.clear()

    def measures(self, param_groups: Sequence[ParamGroup]) -> bool:
        """Return whether these are the parameters that are measured."""
        pairs = zip(params_of(param_groups), self._params, strict=False)
        return all(a is b for a, b in pairs)

    # -- from pass to pass -------------------------------------------------------------------

    def begin_pass(self) -> None:
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
            self.multiply(self.step.divided_by)
            self.step.divided_by = 1
        if self.step.passes == 0 and self._gradient_at_step is not None:
            at_step = self._gradient_at_step
            self._gradient_at_step = None
            not_cleared = at_step.grad is not None and at_step.unchanged
            if not_cleared and self._unsharded:
                # foreach operations on DTensors do not change their version
                not_cleared = any_values(self._params)
            if not_cleared:
                self.step.problem = (
                    "the gradients of the step before were not cleared, and this step's were "
                    "added to them. Call zero_grad() after every step()."
                )

    def _begin_step(self) -> None:
        """Find out how many passes this step will have, and choose what it measures."""
        # The result is the same on every rank, also on a rank without a pass.
        self.batch.begin_step()
        self.hooks.idle = not self.schedule.due

    def end_pass(self) -> None:
        """React to the end of a backward pass; DDP has averaged the gradients if it was to."""
        # asked now, because the caller may leave `no_sync()` before the sample is complete
        self._is_last = self.batch.loop.is_last()
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
        step.passes += 1
        is_last = self._is_last
        if is_last is None:
            is_last = step.passes == batch.passes
        if is_last:
            self._end_passes(self)
            if self._changes_gradients and batch.loop.decides:
                self._apply_short()  # now, before anybody clips the gradient
        if not hooks.idle and (batch.loop.counts or step.passes < batch.passes):
            # Counted passes may go on after one that was averaged, so their sum is always kept.
            squares = self._mean.squares_per_group(step.norms)
            if step.squares is not None:
                squares = step.squares + squares
            step.squares = squares
        hooks.reset()
        step.norms = {}
        step.last_gradient = GradientVersion(self._params[hooks.first_index])
        if self._unsharded and batch.short_step == "count" and not batch.loop.decides:
            step.last_norm = self._norm_of_one()

    # -- the end of a step -------------------------------------------------------------------

    @torch.no_grad()
    def complete(self, report: RankReport = NO_REPORT) -> SentStep:
        """Measure the mean gradient and send the step's numbers to the other ranks.

        `report` has what this rank says beside what is known here.
        """
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
            local = self._mean.measure(step.squares, step.norms, self._facts(passes))
            local.norm_kind = self.norms.norm_kind
            local.steps = schedule.weight_in_steps
        step.sent = self.exchange.send(
            local,
            claims,
            short_allowed=batch.short_step == "count",
            # else a rank may have seen fewer, if a loss of its used none of the parameters
            same_passes=batch.short_step == "count" and batch.loop.decides,
        )
        step.sent.anomaly = self._find_anomaly()
        step.complete = True
        if batch.loop.counts and passes > 1:
            self.multiply(1 / passes)
            step.divided_by = passes
        return step.sent

    def _facts(self, passes: int) -> StepFacts:
        """Return what has to be undone in the norms: who divided by the passes, the loss scale."""
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
            corrections = (math.nan, math.nan)  # `History` leaves out what is not finite
        small_batches: float | None = step.small_batches
        if small_batches is not None and 0 < step.passes < passes:
            small_batches *= passes / step.passes  # `SentStep.read` takes a short step's share
        return StepFacts(
            passes, batch.scale_for(passes), loss_scale, corrections, step.valid, small_batches
        )

    def complete_early(self, optimizer: Optimizer | None) -> SentStep:
        """Complete a step of which this rank has not seen all passes, with `end_passes`.

        The other ranks may be waiting for these numbers. If the losses of this rank used none of
        the parameters, and DDP gave it the other ranks' gradients, zero is the right number.
        """
        # an OSS takes part in averaging the gradients of passes that this rank did not run
        if optimizer is not None:
            for layer in unwrap(optimizer, every_layer=True):
                if hasattr(type(layer), "join_in"):
                    layer.join_in()  # type: ignore[attr-defined]
        self.step.too_many = False
        self._end_passes(self)
        assert self.step.sent is not None
        return self.step.sent

    def describe_excess(self) -> str:
        """Return the error message for a pass that is one too many."""
        passes = self.batch.passes
        return (
            f"this is backward pass {passes + 1} since the last step(), and {PASSES}={passes}. If "
            "no step follows the passes before it, call zero_grad(); run several losses of the "
            "same samples inside `with ....one_sample():`."
        )

    def _find_unaveraged(self) -> str | None:
        """Return an error message if this rank knows by itself that gradients were not averaged."""
        step = self.step
        hooks = self.hooks
        if self._unsharded:
            return find_unaveraged_gradients(self._params, self._unsharded, hooks.norms)
        # In a measured step the ranks compare their gradients.
        if hooks.idle and step.passes and self.ranks.size > 1 and self._parallel.in_no_sync:
            return f"{NOT_AVERAGED}."
        return None

    def _find_anomaly(self) -> GradientAnomaly | None:
        """Return what is odd about this rank's gradients, if DDP should have averaged them."""
        step = self.step
        hooks = self.hooks
        # In a group of our own, only a rank that has not sent can delay the numbers.
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
            text = describe_missing(missing, len(hooks.trainable))
            return anomaly(text, may_be_intended=not alone)
        if alone:
            return anomaly(NOT_AVERAGED)
        return None

    # -- from step to step -------------------------------------------------------------------

    def clear(self) -> None:
        """Forget what was measured and not used: the gradients were cleared."""
        self.hooks.passes.forget()
        self._gradient_at_step = None
        if self._unsharded and self.step.lacks_last_pass:
            for param in self._unsharded.values():
                # Passes without synchronization leave their sum here, where the zero_grad() of
                # `fully_shard` does not clear it.
                param.grad = None
        self._start_over()

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
        """Begin an empty step: the one under way was taken, or its gradients were cleared."""
        if self.previous.candidates:
            self.previous.forget()
        self.hooks.reset()
        self.step = Step()

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step, where `what`, a call that changes steps, is impossible."""
        if self.step.lacks_last_pass and not self._gradients_cleared():
            raise RuntimeError(
                f"{what} in the middle of a step, after {self.step.passes} of its backward passes. "
                "If no step will follow these, call zero_grad() first."
            )

    def _gradients_cleared(self) -> bool:
        """Return whether the gradients of this step's passes have been cleared."""
        # Values are read only if somebody has touched the gradients.
        last = self.step.last_gradient
        if last is None or last.grad is None or last.unchanged:
            return False
        if last.param.grad is None:
            return True
        # This needs no collective, even if gradients are sharded. All ranks then come to the same
        # answer, unless a shard is zero on one rank alone and was changed without being cleared.
        return not any_values(self._params)

    # -- who divides -------------------------------------------------------------------------

    def multiply(self, factor: float) -> None:
        """Multiply every `.grad` in place: to divide it by the passes, or to undo that."""
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    local_shard(param.grad).mul_(factor)

    def count_short(self) -> None:
        """Make the gradient the mean of a short step's passes, and the batch their size.

        Each loss was divided by the passes of a whole step, and so is the gradient's sum.
        """
        step = self.step
        if step.divided_by != 1:
            return  # it is
        before = step.last_norm
        if not step.gradient_untouched or (
            before is not None and not torch.equal(before, self._norm_of_one())
        ):
            but = ", whose gradient was changed already (clipped, unscaled)"
            raise RuntimeError(self.batch.describe_short(step.passes, but))
        self._apply_short()

    def _norm_of_one(self) -> Tensor:
        """Return the norm of this rank's shard of one gradient."""
        # Clipping DTensors in one foreach operation does not change their versions.
        for param in self._params:
            if param.grad is not None and local_shard(param.grad).numel():
                return torch.linalg.vector_norm(local_shard(param.grad).detach())
        return torch.zeros(())

    def _apply_short(self) -> None:
        """Do what `count_short` does, without asking whether the gradient was changed before."""
        step = self.step
        batch = self.batch
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

    def divide_for_user(self) -> None:
        """Divide the gradients by the number of passes, if that is left to the user."""
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
        """Raise if the user was to divide the gradients by the number of passes, and has not."""
        step = self.step
        batch = self.batch
        left_to_user = not batch.loop.counts and not batch.loss_is_divided and batch.passes > 1
        if left_to_user and step.complete and step.gradient_untouched:
            raise RuntimeError(
                f"is_scaled_loss=False, and the sum of {batch.passes} passes' gradients has not "
                "been divided. Call scale_grad_by_num_grads_to_accum() before step()."
            )

    # -- saving and loading ------------------------------------------------------------------

    def to_state(self) -> dict[str, object]:
        """Return the measurement's part of a state dict."""
        return {
            "previous": self.previous.to_state(),
            "norms": self.norms.to_state(),
            "schedule": self.schedule.to_state(),
        }

    def parse_state(self, entry: SavedEntries) -> MeasurementState:
        """Return the measurement's part of a state dict, or raise; nothing is changed."""
        norms = entry.rows("norms", self.norms.columns)
        previous = parse_previous(entry, self._params)
        return MeasurementState(previous, norms, MeasuredSteps(*entry.wholes("schedule", 2)))

    def load_state(self, state: MeasurementState) -> None:
        """Continue from a parsed state; measurements under way are dropped."""
        self.clear()
        self.schedule = replace(state.schedule)
        self.norms.load_state(state.norms)
        self.previous.grads = dict(state.previous)
