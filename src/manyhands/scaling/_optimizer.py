"""An optimizer around another one: it multiplies the learning rates in every step.

One step, in order
    backward    the tap (`_tap.py`) measures gradients and sends one small payload
    gain()      the gain with this step's gradients included
    step()      the averages add the step's statistics (`_noise_tracker.py`); the rule returns a
                factor per parameter group; the inner optimizer steps with its learning rates
                multiplied by them
    progress    grows by the gain

A rule holds its parts: the batch, the options and the loss scale from the beginning, and a binding,
a tap and a noise tracker once it has an optimizer. This file binds and steps. What a user sets,
reads and saves is in `_rule_base.py`. The factors come from `_rules.py`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from manyhands._core.arguments import real
from manyhands._core.ranks import RankGroup, rank_group_of
from manyhands._core.state_parts import OptimizerLayers, SavedEntries
from manyhands._core.stop_notice import stop_notice
from manyhands._core.wrappers import (
    SHARED,
    LossScale,
    LossScaler,
    OptimizerWrapper,
    ParamGroup,
    ScalerSignals,
    SharedAttribute,
    YieldingProperty,
    apply_signals,
    find_layer,
    find_prepared,
    report_skip,
)
from manyhands.scaling._binding import (
    Binding,
    check_bindable,
    check_ranks_agree,
    check_says_which_passes,
    overridden,
)
from manyhands.scaling._hooks import NormKind, PlainNorm
from manyhands.scaling._noise import NoiseAverage, ratio_of_squares
from manyhands.scaling._noise_tracker import NoiseTracker, ScheduleWatch, StepCounts
from manyhands.scaling._preconditioned import rescale_second_moments
from manyhands.scaling._settings import (
    Batch,
    GatedAccumulation,
    Options,
    ShortStep,
    accumulation_of,
    check_prepared,
    parse_factors,
)
from manyhands.scaling._step_stats import NO_REPORT, StepObserver
from manyhands.scaling._tap import Averager, GradientTap

T = TypeVar("T")


def rule_of(optimizer: Optimizer) -> ScaledOptimizer | None:
    """Return the rule that is around an optimizer, or bound to it by `AdaptiveDataParallel`."""
    patched_by = vars(optimizer).get("_manyhands_rule", lambda: None)()
    return patched_by or find_layer(optimizer, ScaledOptimizer)


class ScaledOptimizer(OptimizerWrapper):
    """What a rule does with an optimizer: it is bound to one, measures it, and steps it.

    A rule is a subclass of `ScalingRuleBase`, which adds its arguments, readings and state.
    """

    layer = "rule"
    # Shared with the proxies that trainers put around a rule: see `_core/wrappers.py`.
    _factors = SharedAttribute[tuple[float, ...]]()
    _options = SharedAttribute[Options]()
    _observer = SharedAttribute[StepObserver | None]()
    _schedule_counts_progress = SharedAttribute[bool]()  # set by `ProgressScheduler`
    _min_scale = 0.0
    _follows_gain = False  # if not, a schedule in steps may have been made for the large batch
    _norm_kind = "plain"
    _short_step: ShortStep | None = None  # as it was given
    # Under an `AdaptiveDataLoader`: whether more passes of the step follow (`_adaptdl.py`).
    _pass_accumulates: bool | None = None

    def __init__(
        self,
        batch: Batch,
        options: Options,
        *,
        world_size: int | None,
        process_group: dist.ProcessGroup | None,
        grad_scaler: LossScaler | None,
        model: nn.Module | None,
    ) -> None:
        # `Optimizer.__init__` is not called: groups, state and hooks are the inner optimizer's.
        self._inner: Optimizer | None = None
        self._ranks = RankGroup()
        self.adp: Averager | None = None
        self._world_size = world_size
        self._process_group = process_group
        self._loss_scale = LossScale(grad_scaler)
        self._model = model
        self._options = options
        self._batch = batch
        self._counts, self._schedule = StepCounts(), ScheduleWatch()
        self._factors = ()
        self._observer = None
        self._schedule_counts_progress = False

    @property
    def gradient_ranks(self) -> RankGroup:
        """The ranks whose gradients are averaged for a step."""
        return self._ranks

    # -- what a rule may override ------------------------------------------------------------

    def scale_lr(self, scale: float) -> float | Sequence[float]:
        """Return the factor for a batch of `scale` small batches, or one per parameter group."""
        raise NotImplementedError(f"{type(self).__name__} must define scale_lr(scale).")

    def _overrides(self, group: ParamGroup, factor: float) -> Mapping[str, object]:
        """Return the options of a parameter group to change during the step."""
        return {} if factor == 1.0 else {"lr": group["lr"] * factor}

    def _decide_once(self) -> None:
        """Determine options that depend on the first step, from numbers of all ranks.

        Called in `step`, after the ranks' numbers have arrived, so that all ranks decide the same.
        """

    def _apply_options(self) -> None:
        """Pass loaded options on to objects that hold a copy of them."""

    def _make_norm(self, optimizer: Optimizer) -> NormKind:
        """Return the norm that this rule measures."""
        return PlainNorm()

    def _check_optimizer_supports(self, scale: float) -> None:
        """Raise if this rule cannot scale this optimizer that far."""

    # -- binding to an optimizer -------------------------------------------------------------

    def initialize(
        self, adp: Averager | None, optimizer: Optimizer, patch_optimizer: bool = False
    ) -> None:
        """Bind a rule that was made without an optimizer.

        `adp` is the data-parallel module (ours or torch's DDP). Backward passes are then counted:
        those inside its `no_sync()` accumulate, and the sum is divided here. With
        `patch_optimizer`, `optimizer.step`, `.zero_grad`, `.state_dict` and `.load_state_dict`
        become the rule's.
        """
        if self._inner is not None:
            raise RuntimeError("this rule is bound to an optimizer already; make another one.")
        if adp is not None:
            check_says_which_passes(adp)
            if self._batch.accumulation is not None:
                raise TypeError("the passes are counted: leave num_gradients_to_accumulate out.")
            self.adp = adp
            self._batch.counts_passes = True
            every = self._options["measure_every"]
            self._options["measure_every"] = replace(every, default=1)  # as in adaptdl
            self._process_group = self._process_group or getattr(adp, "process_group", None)
            self._model = self._model or _module(adp)
        self._bind(optimizer)
        if patch_optimizer:
            self._binding.patch(self)

    def _bind(self, optimizer: Optimizer) -> None:
        check_bindable(optimizer, type(self).__name__, ScaledOptimizer)
        norms = self._make_norm(optimizer)
        prepared = None if self.adp is not None else find_prepared(optimizer)
        if prepared is not None:
            self._follow_prepared(prepared)
        group = self._process_group or getattr(optimizer, "group", None)  # an OSS has one
        params = [param for g in optimizer.param_groups for param in g["params"]]
        self._ranks = rank_group_of(params, group, self._world_size)
        self._batch.workers = self._ranks.size
        self._inner = optimizer
        self._factors = (1.0,) * len(optimizer.param_groups)
        try:
            scale = self._batch.scale_for(self._batch.passes)
            if not self._batch.counts_passes:  # else the scale is known only at the step
                scale = self._check_own_scale(scale)
            self._check_optimizer_supports(scale)
            check_ranks_agree(optimizer, self._ranks, self._batch, self._options)
            self._start_measuring(norms, NoiseAverage(len(optimizer.param_groups)))
        except BaseException:
            self._inner = None  # so that the mistake can be corrected, and the rule bound again
            raise
        if prepared is optimizer:
            self._binding.patch(self)

    def _follow_prepared(self, prepared: Optimizer) -> None:
        """Take the number of passes and the gradient scaler from an optimizer of Accelerate's.

        Its own methods become the rule's: Accelerate saves, loads and steps that object.
        """
        check_prepared(prepared, type(self).__name__)
        batch = self._batch
        found = accumulation_of(prepared, batch.passes)
        if found is not None:
            batch.accumulation = found
            batch.begin_step()
            if self._short_step is None:
                batch.short_step = "count"
                batch.check_divided()
        if not self._loss_scale.known:
            self._loss_scale.scaler = getattr(prepared, "scaler", None)

    def _start_measuring(self, norms: NormKind, average: NoiseAverage) -> None:
        """Make the parts that a rule has once it has an optimizer."""
        rule = weakref.proxy(self)  # the tap must not keep `self` alive
        groups = self._inner_optimizer.param_groups
        device = next(param.device for group in groups for param in group["params"])
        tap = GradientTap(
            groups,
            self._ranks.with_own_group(device),
            norms,
            self._batch,
            self._loss_scale,
            on_last_pass=lambda: rule._complete_step(),
            averager=self.adp,
            compare_at_scale_1=self._batch.counts_passes,
            model=self._model,
        )
        self._noise_tracker = NoiseTracker(tap, average, self._options)
        self._binding = Binding(self._inner_optimizer)
        self._binding.claim(self)

    @YieldingProperty
    def _inner_optimizer(self) -> Optimizer:
        if self._inner is None:
            name = type(self).__name__
            raise RuntimeError(f"this {name} has no optimizer yet. Give it one: {name}(optimizer).")
        return self._inner

    @YieldingProperty
    def _tracker(self) -> NoiseTracker:
        if self._inner is None:
            _ = self._inner_optimizer  # raises
        return self._noise_tracker

    @YieldingProperty
    def _tap(self) -> GradientTap:
        return self._tracker.tap

    def unhook(self) -> None:
        """Stop measuring the parameters, and give the optimizer back as it was."""
        self._tap.unhook()
        self._binding.release()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters: they are measured from the next backward pass on."""
        self._check_between_steps("add_param_group()")
        self._inner_optimizer.add_param_group(param_group)
        groups = self._inner_optimizer.param_groups
        try:
            self._check_optimizer_supports(self.scale)
        except ValueError:
            groups.pop()
            raise
        self._tap.norms.refresh()
        self._tap.hook(groups)
        self._tracker.average = self._tracker.average.with_groups(len(groups))
        self._factors += (1.0,)

    def _check_parameter_groups(self) -> None:
        if len(self.param_groups) != self._tracker.average.groups:
            raise RuntimeError(
                f"the inner optimizer has {len(self.param_groups)} parameter groups, of which "
                f"{self._tracker.average.groups} are measured. Call the rule's add_param_group()."
            )

    def __deepcopy__(self, memo: dict[int, object]) -> ScaledOptimizer:
        """Return a copy around a copy of the optimizer (and its parameters, if not in `memo`)."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        # Left out: what belongs to the inner optimizer, and is made anew below. `step` is a
        # scheduler's: it leaves a wrapper that is bound to the original optimizer.
        remade = {"_inner", "_binding", "_noise_tracker", "step", "adp"}
        vars(twin).update({k: v for k, v in vars(self).items() if k not in remade})
        vars(twin)[SHARED] = dict(vars(self)[SHARED])
        twin._observer = None  # it observes the original
        twin._inner, twin.adp = copy.deepcopy(self._inner, memo), copy.deepcopy(self.adp, memo)
        twin._model = _module(twin.adp)  # `fully_shard`'s modules cannot be copied
        twin._batch, twin._loss_scale = copy.copy(self._batch), copy.copy(self._loss_scale)
        twin._options, twin._counts = dict(self._options), copy.copy(self._counts)
        twin._schedule = ScheduleWatch()
        if twin._inner is not None:
            twin._start_measuring(twin._make_norm(twin._inner), self._tracker.average)
            twin._tap.load_state(
                twin._tap.parse_state(SavedEntries(self._tap.to_state(), "a rule"))
            )
            twin._tracker.load_state(self._tracker.state)
            if self._binding.patched:
                twin._binding.patch(twin)
        return twin

    def __copy__(self) -> ScaledOptimizer:
        """Return another object with the same attributes: everything is shared."""
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin

    # -- what a step needs to know -----------------------------------------------------------

    @property
    def noise(self) -> NoiseAverage:
        """The averaged statistics, this step's gradients included."""
        return self._tracker.current

    @property
    def scale(self) -> float:
        """Size of the whole batch in small batches."""
        return self._batch.scale_for(self.passes)

    @property
    def passes(self) -> int:
        """Backward passes of a step: declared, or counted in the step under way.

        After a step that had fewer passes than declared, they are those of that step.
        """
        if self._batch.counts_passes and self._inner is not None:
            return self._tap.step.passes or self._batch.passes
        return self._batch.short or self._batch.passes

    def _check_between_steps(self, what: str) -> None:
        if self._inner is not None:
            self._tap.check_between_steps(what)

    def _check_own_scale(self, scale: float) -> float:
        why = f"It is {type(self).__name__}'s whole batch, in small batches."
        if self._min_scale:
            return real("scale", scale, least=self._min_scale, why=why)
        return real("scale", scale, above=0.0, why=why)

    def _check_batch(self, batch: Batch, passes: int) -> float:
        """Return the scale of a step of so many passes, if rule and optimizer support it."""
        scale = self._check_own_scale(batch.scale_for(passes))
        if self._inner is not None:
            self._check_optimizer_supports(scale)
        return scale

    # -- the optimizer's methods -------------------------------------------------------------

    def step(self, closure: Callable[[], object] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with its learning rates multiplied by the rule's factors.

        A `closure` is run once before the step, so that the factors include its gradients; its
        loss is returned. Other arguments are passed on.
        """
        if self._in_mid_step:
            return None
        inner, tracker, tap = self._inner_optimizer, self._tracker, self._tap
        binding, batch = self._binding, self._batch
        self._check_parameter_groups()
        if closure is not None:
            closure = self._in_step(closure)
            with torch.enable_grad():
                closure = tap.hooks.replay(closure(), closure)
        elif tap.step.passes == 0 and binding.is_initializing_state():
            return binding.step(*args, **kwargs)
        tap.division.check_divided(tap.step)
        signals = ScalerSignals.read_from(self, inner)
        if batch.counts_passes:  # only now is their number final
            self._check_batch(batch, self.passes)
            batch.passes = self.passes
        elif batch.accumulation is not None:  # it may have changed the number
            self._check_batch(batch, batch.passes)
        if tracker.complete(inner):
            self._counts.short += 1
        tracker.measures_every_step = self._observer is not None
        outcome = tracker.finish_step(signals, self.scale)
        self._decide_once()
        self._counts.steps += 1
        if not (signals.present or self._loss_scale.known):
            tracker.check_not_stuck()  # a scaler skips steps that overflow, and they do no harm
        if outcome.skipped:
            self._counts.skipped += 1
            report_skip(self)
            return self._end_step(None)
        scale = self.scale
        factors = self.scale_lr(scale)
        self._factors = parse_factors(factors, len(inner.param_groups), type(self).__name__)
        pairs = zip(inner.param_groups, self._factors, strict=True)
        overrides = [self._overrides(group, factor) for group, factor in pairs]
        positional = () if closure is None else (closure,)
        unscaled = apply_signals(signals, inner, binding.supports_amp)
        with overridden(inner.param_groups, overrides), unscaled:
            result = binding.step(*positional, *args, **kwargs)
        # torch's schedulers warn unless they find this on the optimizer they were made for
        vars(inner)["_opt_called"] = True
        if getattr(inner, "step_was_skipped", False):  # by Accelerate's scaler, inside
            self._counts.skipped += 1
            return self._end_step(result)
        tap.norms.optimizer_stepped()
        self._counts.progress += outcome.gain
        if self._watches_schedule:
            self._schedule.see(self, outcome.gain, self._counts.steps)
        return self._end_step(result)

    # torch wraps the `step` of every subclass to run step hooks, unless it has this attribute. The
    # hooks are the inner optimizer's, and its own `step` runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _follow_batch(self, before: float, now: float) -> bool:
        """Let Adam's second moments be those of scale `now`; return whether the noise is known.

        Call it between two steps, on every rank.
        """
        average = self._tracker.average
        if not average.measured:
            return False
        ratio = ratio_of_squares(average.sqr_of(), average.var_of(), before, now)
        rescale_second_moments(OptimizerLayers.of(self).plain, ratio)
        # Also on a rank whose shard is empty: sharded moments are collected anew from all ranks.
        self._tap.norms.moments_changed()
        return True

    @YieldingProperty
    def _watches_schedule(self) -> bool:
        """Whether a schedule that counts steps would be a mistake."""
        if self._schedule_counts_progress:
            return False
        return self._follows_gain or self._observer is not None

    def _end_step(self, result: T) -> T:
        """Let the observer act between two steps, and return the step's result."""
        reports = self._tracker.take_reports()
        if self._observer is not None:
            self._observer.after_step(reports)
        return result

    def _after_sync(self, seconds: float) -> None:
        if self._observer is not None:
            self._observer.after_sync(seconds)

    def _complete_step(self) -> None:
        """Let the tap send the step's numbers: this rank has run its backward passes."""
        tap = self._tap
        if tap.step.too_many:
            raise RuntimeError(tap.describe_excess())
        report = NO_REPORT if self._observer is None else self._observer.report()
        micro_batch = float(getattr(self.adp, "leading_dimension", None) or 0)
        stop = float(stop_notice.received)
        report = report._replace(micro_batch=micro_batch, stop=stop)
        tap.complete(checksum=self._checksum(), report=report)

    def stop_agreed(self) -> bool:
        return any(report.stop for report in self._tracker.reports)

    def _checksum(self) -> float:
        """Return a number that differs between ranks if their statistics or factors do."""
        average = self._tracker.average
        factors = sum(self._factors)
        return self._counts.progress + sum(average.raw_sqr) + sum(average.raw_var) + factors

    # Accelerate looks for `set_to_none` in the signature.
    def zero_grad(self, set_to_none: bool = True, **kwargs: Any) -> None:
        """Clear the gradients, and their measurements."""
        if self._keeps_gradients():
            return
        self._tracker.forget()
        self._binding.zero_grad(set_to_none, **kwargs)

    @YieldingProperty
    def _in_mid_step(self) -> bool:
        """Whether a loop that steps after every pass says that its step goes on."""
        if self._pass_accumulates:
            return True
        accumulation = self._batch.accumulation
        return isinstance(accumulation, GatedAccumulation) and not accumulation.sync_gradients

    def _keeps_gradients(self) -> bool:
        """Whether a loop that clears in every pass is in mid-step."""
        if self._pass_accumulates is not None:  # it may clear before a step's first pass, too
            return self._tap.step.passes > 0
        return self._in_mid_step

    def forget_gradients(self) -> None:
        """Drop the measurements of gradients that were cleared in a way that cannot be detected."""
        self._tracker.forget()

    def one_sample(self) -> AbstractContextManager[None]:
        """Treat the backward passes inside as one, because they are of the same samples.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> first, second = model(torch.ones(3, 2)).mean(dim=0)
        >>> with optimizer.one_sample():
        ...     first.backward(retain_graph=True)
        ...     second.backward()
        >>> optimizer.step()

        While the block is open, a copy of the gradient is held.
        """
        return self._tap.one_sample()

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the gradients by the number of passes, with `is_scaled_loss=False`."""
        self._tap.division.divide_for_user(self._tap.step)


def _module(averager: Averager | None) -> nn.Module | None:
    return averager if isinstance(averager, nn.Module) else None
