"""The optimizer wrapper: measure the gradients, ask the rule, step.

One step, in order
    backward    the tap (`_tap.py`) measures gradients and sends one small payload
    gain()      the gain with this step's gradients included
    step()      the averages add the step's statistics (`_noise_tracker.py`); the rule returns a
                factor per parameter group; the inner optimizer steps with its learning rates
                multiplied by them (`_binding.py`)
    progress    grows by the gain

A rule holds its parts: the batch, the options and the loss scale from the beginning, and a binding,
a tap and a noise tracker once it has an optimizer.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands._core import amp as _amp
from manyhands._core.ranks import RankGroup, rank_group_of
from manyhands._core.wrappers import SHARED, OptimizerWrapper, SharedAttribute, YieldingProperty
from manyhands.scaling import _state
from manyhands.scaling._averages import NoiseAverage
from manyhands.scaling._batch import Batch, check_scale, parse_passes
from manyhands.scaling._binding import Binding, check_bindable, check_ranks_agree
from manyhands.scaling._noise import VAR_FLOOR, check_var_floor
from manyhands.scaling._noise_tracker import NoiseTracker, StepCounts, StepOutcome, check_progress
from manyhands.scaling._norm_kinds import NormKind, PlainNorm
from manyhands.scaling._options import Option, Options, describe_mismatches
from manyhands.scaling._step_stats import NO_REPORT, StepObserver
from manyhands.scaling._tap import GradientTap


class ScalingRuleBase(OptimizerWrapper):
    """Base of the scaling rules, and of your own: define `scale_lr(scale)`.

    Wrap an optimizer directly, `Rule(optimizer)`, or make the rule first and bind it with
    `AdaptiveDataParallel(model, optimizer, rule)` or `initialize`. Then use the rule in place of
    the optimizer:

    >>> import torch, manyhands as mh
    >>> class Cautious(mh.ScalingRuleBase):
    ...     def scale_lr(self, scale):
    ...         return scale**0.25
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = Cautious(optimizer, num_gradients_to_accumulate=16)
    >>> for _ in range(16):
    ...     (model(torch.ones(1, 2)).sum() / 16).backward()
    >>> optimizer.step()
    >>> optimizer.factors
    (2.0,)

    `lr` stays the small batch's rate, for schedulers and logs; the factor is applied only
    inside `step`. End training on `progress`, which counts the small batch's steps, not on the
    number of calls. The loss must be the mean over a batch, so that the expected gradient is the
    same for batches of any size.

    Args:
        optimizer: the optimizer to wrap; without it the rule waits for `initialize`.
        world_size: number of workers, by default the size of the process group. Inside a larger
            group, 1 lets each worker train on its own.
        scale: size of the whole batch (all workers and passes) in small batches. By default
            workers x passes: each micro-batch is a small batch.
        smoothing: weight of the past in the moving averages. By default
            `max(1 - n / 1000, 0)` with n = workers x passes, and `0.999 ** scale` in
            `AdaptiveDataParallel`.
        num_gradients_to_accumulate: backward passes before each step.
        is_scaled_loss: whether each pass's loss is divided by that number. If not, call
            `scale_grad_by_num_grads_to_accum()` before `step`.
        debias_ewma: True, the default, for moving averages like Adam's; False for those of the
            AdaScale paper's appendix B.3.
        process_group: the workers that share gradients; all, by default.
        grad_scaler: the `torch.amp.GradScaler` in use. It is required if you call its `unscale_`
            or read `gain()` before `step()`; otherwise `scaler.step(optimizer)` passes on the
            loss scale.
        delayed: use the statistics up to the previous step, so that `step` never waits for a
            GPU. `gain()` and `progress` are then one step behind.
        floor_each_step: apply fairscale's floors to every step's estimate, for comparisons. This
            biases the gain. By default only the averages have floors.
        var_floor: the smallest noise that an average can have, 1e-6 by default. Gradients whose
            squared norms are nearly as small seem to be pure noise: lower the floor for them, or
            multiply the loss.
        model: the module that `fully_shard` was called on. It is needed only after `gc.freeze()`;
            otherwise it is found.
    """

    layer = "rule"
    # Shared with the proxies that trainers put around a rule: see `_core/wrappers.py`.
    _factors = SharedAttribute[tuple[float, ...]]()
    _options = SharedAttribute[Options]()
    _observer = SharedAttribute[StepObserver | None]()
    _min_scale = 0.0
    _norm_kind = "plain"
    # Under an `AdaptiveDataLoader`: whether more passes of the step follow (`_adaptdl.py`).
    _pass_accumulates: bool | None = None

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool | None = None,
        *,
        process_group: Any = None,
        grad_scaler: Any = None,
        delayed: bool = False,
        floor_each_step: bool | None = None,
        var_floor: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        # `Optimizer.__init__` is not called: groups, state and hooks are the inner optimizer's.
        self._inner: Optimizer | None = None
        self._ranks = RankGroup()
        self.adp: Any = None
        self._world_size = world_size
        self._process_group = process_group
        self._loss_scale = _amp.LossScale(grad_scaler)
        self._model = model
        self._delayed = delayed
        self._options = {
            "debias_ewma": Option(True, debias_ewma, check=bool),
            "floor_each_step": Option(False, floor_each_step, check=bool),
            "var_floor": Option(VAR_FLOOR, var_floor, check=check_var_floor),
            **self._extra_options(),
        }
        passes = parse_passes(num_gradients_to_accumulate)
        self._batch = Batch(passes=passes, loss_is_divided=is_scaled_loss)
        self._batch.set_smoothing(smoothing)
        if scale is not None:
            self._batch.set_scale(scale=self._check_own_scale(scale))
        self._counts = StepCounts()
        self._factors = ()
        self._observer = None
        if optimizer is not None:
            self._bind(optimizer)

    # -- what a rule may override ------------------------------------------------------------

    def scale_lr(self, scale: float) -> float | Sequence[float]:
        """Return the factor for a batch of `scale` small batches, or one per parameter group."""
        raise NotImplementedError(f"{type(self).__name__} must define scale_lr(scale).")

    def _overrides(self, group: dict[str, Any], factor: float) -> dict[str, Any]:
        """Return the options of a parameter group to change during the step."""
        return {} if factor == 1.0 else {"lr": group["lr"] * factor}

    def _decide_once(self) -> None:
        """Determine options that depend on the first step, from numbers of all ranks.

        Called in `step`, after the ranks' numbers have arrived, so that all ranks decide the same.
        """

    def _extra_options(self) -> Options:
        """Return the options that this rule adds; they are saved and loaded with the others."""
        return {}

    def _apply_options(self) -> None:
        """Pass loaded options on to objects that hold a copy of them."""

    def _make_norm(self, optimizer: Optimizer) -> NormKind:
        """Return the norm that this rule measures."""
        return PlainNorm()

    def _check_optimizer_supports(self, scale: float) -> None:
        """Raise if this rule cannot scale this optimizer that far."""

    # -- binding to an optimizer -------------------------------------------------------------

    def initialize(self, adp: Any, optimizer: Optimizer, patch_optimizer: bool = False) -> None:
        """Bind a rule that was made without an optimizer.

        `adp` is the data-parallel module (ours or torch's DDP). Backward passes are then counted:
        those inside its `no_sync()` accumulate, and the sum is divided here. With
        `patch_optimizer`, `optimizer.step`, `.zero_grad`, `.state_dict` and `.load_state_dict`
        become the rule's.
        """
        if self._inner is not None:
            raise RuntimeError("this rule is bound to an optimizer already; make another one.")
        if adp is not None:
            if not hasattr(adp, "require_backward_grad_sync"):
                raise TypeError(
                    f"{type(adp).__name__} does not say which passes are inside no_sync(), which "
                    "is needed to count them. Write AdaptiveDataParallel(model, optimizer, rule)."
                )
            self.adp = adp
            self._batch.counts_passes = True
            self._process_group = self._process_group or getattr(adp, "process_group", None)
            self._model = self._model or adp
        self._bind(optimizer)
        if patch_optimizer:
            self._binding.patch(self)

    def _bind(self, optimizer: Optimizer) -> None:
        check_bindable(optimizer, type(self).__name__, ScalingRuleBase)
        norms = self._make_norm(optimizer)
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
        self._noise_tracker = NoiseTracker(tap, average, self._options, delayed=self._delayed)
        self._binding = Binding(self._inner_optimizer)
        self._binding.claim(self)

    @YieldingProperty
    def _inner_optimizer(self) -> Optimizer:
        if self._inner is None:
            raise RuntimeError(
                f"this {type(self).__name__} has no optimizer yet. Give it one, "
                f"{type(self).__name__}(optimizer), or bind it with "
                "AdaptiveDataParallel(model, optimizer, rule) or rule.initialize(...)."
            )
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
        self._tap.hooks.remove()
        self._binding.release()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
                f"{self._tracker.average.groups} are measured. Add groups through the wrapper: "
                f"{type(self).__name__}.add_param_group(...)."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingRuleBase:
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
        twin._model = twin.adp  # only fully_shard's modules are searched, and none can be copied
        twin._batch, twin._loss_scale = copy.copy(self._batch), copy.copy(self._loss_scale)
        twin._options, twin._counts = dict(self._options), copy.copy(self._counts)
        if twin._inner is not None:
            twin._start_measuring(twin._make_norm(twin._inner), self._tracker.average)
            twin._tap.load_state(twin._tap.parse_state(self._tap.to_state()))
            twin._tracker.load_state(self._tracker.state)
            if self._binding.patched:
                twin._binding.patch(twin)
        return twin

    def __copy__(self) -> ScalingRuleBase:
        """Return another object with the same attributes: everything is shared."""
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin

    # -- reading the statistics --------------------------------------------------------------

    def gain(self, pg_idx: int | None = None) -> float:
        """Return how many small-batch steps a step at this scale is worth (r in AdaScale's paper).

        `pg_idx` selects one parameter group; by default all count together. Between `backward` and
        `step` this step's gradients are included. Under every rule this is the measured gain,
        which need not be the rule's factor.
        """
        groups = len(self.param_groups)
        if pg_idx is not None and not 0 <= pg_idx < groups:
            raise IndexError(f"pg_idx={pg_idx}, but there are {groups} parameter groups.")
        return self._tracker.current.gain(self.scale, pg_idx)

    @property
    def progress(self) -> float:
        """Small-batch steps done so far: the sum of the gains of all steps taken."""
        return self._counts.progress

    def set_progress(self, progress: float) -> None:
        """Set the progress, after a phase that was trained without the rule."""
        self._counts.progress = check_progress(progress)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors that the learning rates were multiplied by in the last step, by group."""
        return self._factors

    @property
    def noise(self) -> NoiseAverage:
        """The averaged statistics, this step's gradients included."""
        return self._tracker.current

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the scaling in plain numbers, for logs and `Record`.

        If blocks are inside, their numbers are included, and "step" and "workers" are theirs.
        """
        noise, groups = self._tracker.average, range(len(self.param_groups))
        return {
            "step": self._counts.steps,
            "progress": self._counts.progress,
            "scale": self.scale,
            "workers": self._batch.workers,
            "passes": self.passes,
            "gain": noise.gain(self.scale),
            "lr": [float(group["lr"]) for group in self.param_groups],
            "factor": list(self._factors),
            "sqr": [noise.sqr_of(i) if noise.measured else None for i in groups],
            "var": [noise.var_of(i) if noise.measured else None for i in groups],
            "noise_scale": [noise.noise_scale(i) for i in groups],
            "skipped": self._counts.skipped,
            "nonfinite": self._tracker.nonfinite,
            **(self.optimizer.snapshot() if hasattr(self.optimizer, "snapshot") else {}),
        }

    def __repr__(self) -> str:
        if self._inner is None:
            return f"{type(self).__name__}()"
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})\n{self._inner!r}"

    def _settings(self) -> dict[str, Any]:
        """Return the settings that `repr` shows."""
        return {
            "scale": f"{self.scale:g}",
            "workers": self._batch.workers,
            "passes": "counted" if self._batch.counts_passes else self._batch.passes,
            "smoothing": f"{self.smoothing:g}",
        }

    # -- scale, accumulation, smoothing ------------------------------------------------------

    @property
    def scale(self) -> float:
        """Size of the whole batch in small batches."""
        return self._batch.scale_for(self.passes)

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Set the size of the whole batch to `scale` small batches.

        The noise is kept at scale 1, so the gain is right at once. `update_estimate` has no
        effect; it is accepted for code that was written for fairscale.
        """
        self._check_between_steps("set_scale()")
        scale = self._check_own_scale(scale)
        if self._inner is not None:
            self._check_optimizer_supports(scale)
        self._batch.set_scale(scale=scale)

    def set_scale_per_pass(self, scale: float) -> None:
        """Set the size of one pass, on all workers together, in small batches.

        The scale is then this number times the passes of each step. One pass may be less than a
        small batch. A whole step may not, if the rule requires that.
        """
        self._check_between_steps("set_scale_per_pass()")
        changed = replace(self._batch)  # checked before anything is changed
        changed.set_scale(per_pass=check_scale(scale, 0.0, "one pass"))
        # if passes are counted, the scale is known, and checked, only at the step
        if self._inner is not None and not self._batch.counts_passes:
            self._check_batch(changed, self._batch.passes)
        self._batch.set_scale(per_pass=changed.scale_per_pass)

    @property
    def passes(self) -> int:
        """Backward passes of a step: declared, or counted in the step under way."""
        if self._batch.counts_passes and self._inner is not None:
            return self._tap.step.passes or self._batch.passes
        return self._batch.passes

    @property
    def smoothing(self) -> float:
        """The weight of the past in the averages."""
        return self._batch.smoothing_for(self.scale)

    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Set how many backward passes make a step from now on. Call it on every worker.

        The default scale follows. A scale that was set explicitly stays; if it is to change, call
        `set_scale` too. The smoothing becomes the default for the new number, unless
        `update_smoothing=False`.
        """
        if self._batch.counts_passes:
            raise RuntimeError(
                "with a data-parallel module the passes are counted, not declared: run all but "
                "the step's last one inside its no_sync()."
            )
        passes = parse_passes(num_gradients_to_accumulate)
        self._check_between_steps("set_num_gradients_to_accumulate()")
        if self._inner is not None:
            scale = self._check_batch(self._batch, passes)
            self._tap.exchange.announce(passes, scale, self._checksum())
        self._batch.set_smoothing(None if update_smoothing else self.smoothing)
        self._batch.passes = passes

    def _check_between_steps(self, what: str) -> None:
        if self._inner is not None:
            self._tap.check_between_steps(what)

    def _check_own_scale(self, scale: float, details: str = "") -> float:
        return check_scale(scale, self._min_scale, type(self).__name__, details)

    def _check_batch(self, batch: Batch, passes: int) -> float:
        """Return the scale of a step of so many passes, if rule and optimizer support it."""
        per_pass = batch.scale_per_pass
        details = "" if per_pass is None else f" ({passes} pass(es) of {per_pass})"
        scale = self._check_own_scale(batch.scale_for(passes), details)
        if self._inner is not None:
            self._check_optimizer_supports(scale)
        return scale

    # -- the optimizer's methods -------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with its learning rates multiplied by the rule's factors.

        A `closure` is run once before the step, so that the factors include its gradients; its
        loss is returned. Other arguments are passed on.
        """
        if self._pass_accumulates:
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
        tap.check_divided()
        signals = _amp.ScalerSignals.read_from(self, inner)
        if batch.counts_passes:  # only now is their number final
            self._check_batch(batch, self.passes)
        batch.passes = self.passes
        outcome = tracker.finish_step(inner, signals, self.scale)
        self._decide_once()
        self._counts.steps += 1
        self._count_outcome(outcome)
        if not (signals.present or self._loss_scale.known):
            tracker.check_not_stuck()  # a scaler skips steps that overflow, and they do no harm
        if self._delayed:
            # `outcome` is the previous step's. Reading `found_inf` waits for the device, so it is
            # left to an optimizer that reads it there.
            reads_found_inf = signals.found_inf is not None and not binding.supports_amp
            skipped = reads_found_inf and bool(signals.found_inf)
        else:
            skipped = outcome is not None and outcome.skipped
        if skipped:
            return self._end_step(None)
        self._factors = self._parse_factors(self.scale_lr(self.scale))
        pairs = zip(inner.param_groups, self._factors, strict=True)
        overrides = [self._overrides(group, factor) for group, factor in pairs]
        positional = () if closure is None else (closure,)
        unscaled = _amp.apply_signals(signals, inner, binding.supports_amp)
        with binding.overridden(overrides), unscaled:
            result = binding.step(*positional, *args, **kwargs)
        tap.norms.optimizer_stepped()
        # torch's schedulers warn unless they find this on the optimizer they were made for
        vars(inner)["_opt_called"] = True
        if outcome is not None and not self._delayed:
            self._counts.progress += outcome.gain
        return self._end_step(result)

    # torch wraps the `step` of every subclass to run step hooks, unless it has this attribute. The
    # hooks are the inner optimizer's, and its own `step` runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _end_step(self, result: Any) -> Any:
        """Let the observer act between two steps, and return the step's result."""
        if self._observer is not None:
            self._observer.after_step(self._tracker.reports)
        return result

    def _complete_step(self) -> None:
        """Let the tap send the step's numbers: this rank has run its backward passes."""
        tap = self._tap
        if tap.step.too_many:
            raise RuntimeError(tap.describe_excess())
        report = NO_REPORT if self._observer is None else self._observer.report()
        micro_batch = float(getattr(self.adp, "leading_dimension", None) or 0)
        report = report._replace(micro_batch=micro_batch)
        tap.complete(checksum=self._checksum(), report=report)

    def _checksum(self) -> float:
        """Return a number that differs between ranks if their statistics or factors do."""
        average = self._tracker.average
        factors = sum(self._factors)
        return self._counts.progress + sum(average.raw_sqr) + sum(average.raw_var) + factors

    def _count_outcome(self, outcome: StepOutcome | None) -> None:
        """Count a skipped step, or, if delayed, the previous step's progress."""
        if outcome is not None and outcome.skipped:
            self._counts.skipped += 1
        elif outcome is not None and self._delayed:
            self._counts.progress += outcome.gain

    def _parse_factors(self, factors: Any) -> tuple[float, ...]:
        """Return what `scale_lr` returned as one float per parameter group, or raise."""
        groups = len(self.param_groups)
        if hasattr(factors, "tolist"):  # a tensor or an array
            factors = factors.tolist()
        each = factors if hasattr(factors, "__len__") else [factors] * groups
        values = tuple(map(float, each))
        if len(values) != groups or not all(math.isfinite(v) and v >= 0.0 for v in values):
            raise ValueError(
                f"scale_lr must return one factor, or one for each of the {groups} parameter "
                f"groups, finite and not negative; {type(self).__name__}.scale_lr({self.scale:g}) "
                f"returned {values}."
            )
        return values

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and their measurements."""
        if self._keeps_gradients:
            return
        self._tracker.forget()
        self._binding.zero_grad(*args, **kwargs)

    @property
    def _keeps_gradients(self) -> bool:
        """Whether a loop that clears after every pass is in mid-step."""
        return self._pass_accumulates is not None and self._tap.step.passes > 0

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
        self._tap.divide_by_passes()

    # -- saving and loading ------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with one entry added under "manyhands".

        Between the backward passes of a step, the state is that before the step. Arguments are
        passed to the inner optimizer (OSS has `all_ranks`).
        """
        _ = self._inner_optimizer  # raises if there is none
        state: dict[str, Any] = self._binding.state_dict(*args, **kwargs)
        state[_state.KEY] = self.scaling_state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, perhaps of another number of workers or passes.

        Options that were set in this run, by arguments or `set_scale`, stay; a warning names those
        that differ from the state dict's. All other options are taken from the state dict. The
        default scale becomes this run's workers x passes. A scale that was set in the saved run
        keeps its proportion to workers x passes, as the micro-batch stays the same.
        """
        # parsed first: a state dict that does not fit changes nothing
        state = self.check_scaling_state(_state.get_entry(state_dict, type(self).__name__))
        self._binding.load_state_dict(dict(state_dict))
        self.take_scaling_state(state)

    def _load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict through the patched optimizer's `load_state_dict`.

        A state dict without our entry (of a bare run, or from torch.distributed.checkpoint) is
        loaded into the optimizer alone: statistics and progress stay as they are.
        """
        if _state.KEY in state_dict:
            self.load_state_dict(state_dict)
        else:
            self._binding.load_state_dict(dict(state_dict))

    def scaling_state_dict(self) -> dict[str, Any]:
        """Return the state of the scaling alone: statistics, progress, scale.

        Use it if the optimizer's state is saved in another way, as by
        torch.distributed.checkpoint, which is given `.optimizer`.
        """
        # statistics still on their way to the host would be lost
        self._count_outcome(self._tracker.finish_in_flight())
        return {
            **_state.describe_origin(self._norm_kind, self._inner_optimizer),
            **_state.save_parts(self._tracker, self._options, self._counts),
        }

    def load_scaling_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `scaling_state_dict`; the optimizer's own state stays as it is."""
        self.take_scaling_state(self.check_scaling_state(state_dict))

    def check_scaling_state(self, entry: Mapping[str, Any]) -> _state.ScalingState:
        """Return the scaling entry of a state dict, checked against this wrapper."""
        self._check_between_steps("load_state_dict()")
        origin = _state.describe_origin(self._norm_kind, self._inner_optimizer)
        state = _state.parse_entry(entry, origin, self._tracker, self._options)
        scale = self._check_own_scale(state.batch.scale_for(state.batch.passes))
        # the check reads the options, so it sees the loaded ones for a moment
        own_options, self._options = self._options, state.options
        try:
            self._check_optimizer_supports(scale)
        finally:
            self._options = own_options
        return state

    def take_scaling_state(self, state: _state.ScalingState) -> None:
        """Take over a parsed state."""
        self._batch.load_state(state.batch)
        self._options.update(state.options)  # in place: a trainer's proxy holds this dict
        self._apply_options()
        self._tap.load_state(state.tap)
        self._tracker.load_state(state.tracker)
        self._counts.load_state(state.counts)
        if state.mismatches:
            message = describe_mismatches(state.mismatches, type(self).__name__)
            warnings.warn(message, stacklevel=3)
