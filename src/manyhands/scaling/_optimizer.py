"""The optimizer wrapper: measure the gradients, ask the rule, step.

One step, in order
    backward    the tap (`_tap.py`) measures gradients and sends one small payload
    gain()      the gain with this step's gradients included
    step()      the averages add the step's statistics; the rule returns a factor per parameter
                group; the inner optimizer steps with its learning rates multiplied by them
    progress    grows by the gain

`_binding.py` ties a rule to an optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from manyhands._core import amp as _amp
from manyhands.scaling import _options, _state
from manyhands.scaling._averages import NoiseAverage
from manyhands.scaling._binding import BoundOptimizer
from manyhands.scaling._noise_tracker import StepOutcome

NONFINITE_LIMIT = 10


class ScalingRuleBase(BoundOptimizer):
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
        return self._progress

    def set_progress(self, progress: float) -> None:
        """Set the progress, after a phase that was trained without the rule."""
        if not (math.isfinite(progress) and progress >= 0.0):
            raise ValueError(f"progress must be finite and not negative, got {progress}.")
        self._progress = float(progress)

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
            "step": self._steps,
            "progress": self._progress,
            "scale": self.scale,
            "workers": self._ranks.size,
            "passes": self.passes,
            "gain": noise.gain(self.scale),
            "lr": [float(group["lr"]) for group in self.param_groups],
            "factor": list(self._factors),
            "sqr": [noise.sqr_of(i) if noise.measured else None for i in groups],
            "var": [noise.var_of(i) if noise.measured else None for i in groups],
            "noise_scale": [noise.noise_scale(i) for i in groups],
            "skipped": self._skipped,
            "nonfinite": self._tracker.nonfinite,
            **(self.optimizer.snapshot() if hasattr(self.optimizer, "snapshot") else {}),
        }

    # -- the optimizer's methods -------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with its learning rates multiplied by the rule's factors.

        A `closure` is run once before the step, so that the factors include its gradients; its
        loss is returned. Other arguments are passed on.
        """
        inner, tracker = self._inner_optimizer, self._tracker
        self._check_parameter_groups()
        if closure is not None:
            closure = self._run_closure(self._in_step(closure))
        elif self._is_state_initialization():
            return self._step_inner(*args, **kwargs)
        self._check_gradient_was_divided()
        signals = _amp.ScalerSignals.read_from(self, inner)
        if self._batch.counts_passes:  # only now is their number final
            self._check_batch(self._batch, self.passes)
        self._batch.passes = self.passes
        outcome = tracker.finish_step(signals, self.scale)
        self._decide_once()
        self._steps += 1
        self._count_outcome(outcome)
        self._check_not_stuck(signals)
        if self._delayed:
            # `outcome` is the previous step's. Reading `found_inf` waits for the device, so it is
            # left to an optimizer that reads it there.
            reads_found_inf = signals.found_inf is not None and not self._inner_supports_amp
            skipped = reads_found_inf and bool(signals.found_inf)
        else:
            skipped = outcome is not None and outcome.skipped
        if skipped:
            return None
        self._factors = self._parse_factors(self.scale_lr(self.scale))
        positional = () if closure is None else (closure,)
        unscaled = _amp.apply_signals(signals, inner, self._inner_supports_amp)
        with self._override_groups(), unscaled:
            result = self._step_inner(*positional, *args, **kwargs)
        tracker.tap.norms.optimizer_stepped()
        # torch's schedulers warn unless they find this on the optimizer they were made for
        vars(inner)["_opt_called"] = True
        if outcome is not None and not self._delayed:
            self._progress += outcome.gain
        return result

    # torch wraps the `step` of every subclass to run step hooks, unless it has this attribute. The
    # hooks are the inner optimizer's, and its own `step` runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and their measurements."""
        self._tracker.forget()
        self._clear_inner(*args, **kwargs)

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
        return self._tracker.tap.one_sample()

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the gradients by the number of passes, with `is_scaled_loss=False`."""
        accumulation = self._accumulation
        if accumulation.declared is None or accumulation.loss_is_divided:
            raise RuntimeError(
                "the gradients are divided already: scale_grad_by_num_grads_to_accum() is for "
                "is_scaled_loss=False, where the losses are not divided."
            )
        tap = self._tracker.tap
        if tap.step.stats is None or not tap.gradient_untouched:
            raise RuntimeError(
                "call scale_grad_by_num_grads_to_accum() once, after the step's last backward() "
                "and before anything else changes the gradients (clipping, for one)."
            )
        tap.multiply_gradients(1 / accumulation.declared)

    # -- the phases of a step ----------------------------------------------------------------

    def _count_outcome(self, outcome: StepOutcome | None) -> None:
        """Count a skipped step, or, if delayed, the previous step's progress."""
        if outcome is not None and outcome.skipped:
            self._skipped += 1
        elif outcome is not None and self._delayed:
            self._progress += outcome.gain

    def _check_not_stuck(self, signals: _amp.ScalerSignals) -> None:
        # with a scaler, steps that overflow are skipped and do no harm
        has_scaler = signals.present or self._grad_scaler is not None
        if not has_scaler and self._tracker.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise RuntimeError(
                f"the gradients of the last {NONFINITE_LIMIT} steps were not finite. With AMP, "
                "use a torch.amp.GradScaler, which skips such steps; otherwise the parameters "
                "are probably NaN by now: lower the learning rate, clip the gradients, or "
                "continue from a checkpoint."
            )

    def _is_state_initialization(self) -> bool:
        """Return whether torch.distributed.checkpoint is making the optimizer create its state.

        It does so with a step at learning rate 0 along gradients that it has set to zero, without
        a backward pass.
        """
        if self.state or self._tracker.tap.step.passes > 0:
            return False
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        at_rest = all(float(group["lr"]) == 0.0 for group in self.param_groups)
        return at_rest and all(p.grad is not None for p in trained)

    def _run_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Run the closure, and return one that gives its result to the optimizer's first call."""
        with torch.enable_grad():
            results = [closure()]

        def replay() -> Any:
            if results:
                return results.pop()
            self._tracker.tap.paused = True  # LBFGS evaluates the same samples again
            try:
                return closure()
            finally:
                self._tracker.tap.paused = False

        return replay

    @contextmanager
    def _override_groups(self) -> Iterator[None]:
        """Change the parameter groups as the rule requires, and restore them after the step."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for group, factor in zip(self.param_groups, self._factors, strict=True):
                for name, value in self._overrides(group, factor).items():
                    old = group[name]
                    if isinstance(old, Tensor):  # in place: the optimizer may hold this tensor
                        before.append((group, name, old.clone()))
                        old.copy_(value)
                    else:
                        before.append((group, name, old))
                        group[name] = value
            yield
        finally:
            for group, name, old in before:
                if isinstance(old, Tensor):
                    group[name].copy_(old)
                else:
                    group[name] = old

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

    def _check_gradient_was_divided(self) -> None:
        accumulation, tap = self._accumulation, self._tracker.tap
        passes = accumulation.declared
        if passes is None or passes == 1 or accumulation.loss_is_divided or tap.step.stats is None:
            return
        if tap.gradient_untouched:
            raise RuntimeError(
                f"is_scaled_loss=False, and the sum of {passes} passes' gradients has not been "
                "divided. Call scale_grad_by_num_grads_to_accum() before step(), or divide each "
                f"pass's loss by {passes} and leave is_scaled_loss=True."
            )

    # -- saving and loading ------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with one entry added under "manyhands".

        Between the backward passes of a step, the state is that before the step. Arguments are
        passed to the inner optimizer (OSS has `all_ranks`).
        """
        _ = self._inner_optimizer  # raises if there is none
        state: dict[str, Any] = self._save_inner(*args, **kwargs)
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
        self._load_inner(dict(state_dict))
        self.take_scaling_state(state)

    def _load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict through the patched optimizer's `load_state_dict`.

        A state dict without our entry (of a bare run, or from torch.distributed.checkpoint) is
        loaded into the optimizer alone: statistics and progress stay as they are.
        """
        if _state.KEY in state_dict:
            self.load_state_dict(state_dict)
        else:
            self._load_inner(state_dict)

    def scaling_state_dict(self) -> dict[str, Any]:
        """Return the state of the scaling alone: statistics, progress, scale.

        Use it if the optimizer's state is saved in another way, as by
        torch.distributed.checkpoint, which is given `.optimizer`.
        """
        # statistics still on their way to the host would be lost
        self._count_outcome(self._tracker.finish_in_flight())
        return {
            **_state.describe_origin(self._norm_kind, self._inner_optimizer),
            **self._tracker.to_state(),
            "batch": self._batch.to_state(),
            "options": _options.save_options(self._options),
            "progress": self._progress,
            "steps": self._steps,
            "skipped": self._skipped,
        }

    def load_scaling_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `scaling_state_dict`; the optimizer's own state stays as it is."""
        self.take_scaling_state(self.check_scaling_state(state_dict))

    def check_scaling_state(self, entry: Mapping[str, Any]) -> _state.ScalingState:
        """Return the scaling entry of a state dict, checked against this wrapper."""
        self._check_between_steps("load_state_dict()")
        state = _state.parse_entry(
            entry,
            self._norm_kind,
            self._inner_optimizer,
            self._tracker.average,
            self._batch,
            self._options,
        )
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
        # in place: the noise tracker holds the batch, and a trainer's proxy the dict of options
        vars(self._batch).update(vars(state.batch))
        self._options.update(state.options)
        self._apply_options()
        self._tracker.load(
            self._configure_average(state.average),
            state.previous,
            state.loss_scale,
            state.nonfinite,
            state.nonfinite_in_a_row,
            state.norms,
        )
        self._progress, self._steps, self._skipped = state.progress, state.steps, state.skipped
        if state.mismatches:
            message = _options.describe_mismatches(state.mismatches, type(self).__name__)
            warnings.warn(message, stacklevel=3)
