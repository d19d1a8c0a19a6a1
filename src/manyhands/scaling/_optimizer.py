"""The optimizer wrapper: measure the gradients, ask the rule, step.

One step, in order
    backward    the tap (`_tap.py`) measures gradients and sends one small vector
    gain()      what the statistics will be with this step's gradients in them
    step()      statistics take the reading in; the rule gives a factor per parameter group;
                the inner optimizer steps with its learning rates multiplied by them
    progress    grows by the gain

How a rule is tied to an optimizer is in `_binding.py`.
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
from manyhands.scaling._noise_tracker import Taken

NONFINITE_LIMIT = 10


class ScalingRuleBase(BoundOptimizer):
    """Base of the scaling rules, and of your own: define `scale_lr(scale)`.

    A rule is wrapped around an optimizer at once, `Rule(optimizer)`, or made first and bound
    by `AdaptiveDataParallel(model, optimizer, rule)` or `initialize`. It is then used in the
    optimizer's place:

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
    number of calls. The loss is to be the mean over a batch, so that gradients of batches of
    any size have the same expectation.

    Args:
        optimizer: what to wrap; without it the rule waits for `initialize`.
        world_size: number of workers, from the process group by default; 1 inside a larger
            group lets each worker train on its own.
        scale: size of the whole batch (all workers and passes) in small batches. By default
            workers x passes: each micro-batch is a small batch.
        smoothing: weight of the past in the moving averages. By default
            `max(1 - n / 1000, 0)` with n = workers x passes, and `0.999 ** scale` in
            `AdaptiveDataParallel`.
        num_gradients_to_accumulate: backward passes before each step.
        is_scaled_loss: whether each pass's loss is divided by that number. If not, call
            `scale_grad_by_num_grads_to_accum()` before `step`.
        debias_ewma: moving averages as Adam's (True, the default), or the AdaScale paper's
            appendix B.3.
        process_group: the workers that share gradients; all, by default.
        grad_scaler: the `torch.amp.GradScaler` in use. Needed if you call its `unscale_`
            or read `gain()` before `step()`; otherwise `scaler.step(optimizer)` tells us.
        delayed: use the statistics up to the previous step, so that `step` never waits for a
            GPU. `gain()` and `progress` are then one step behind.
        floor_each_step: apply fairscale's floors to every step's estimate (for comparisons:
            it biases the gain; by default only the averages are floored).
        var_floor: the least noise that an average can show, 1e-6 by default. Gradients whose
            squared norms come near it seem all noise: lower it for them, or scale the loss up.
        model: the module that `fully_shard` was called on. It is found without, except after
            `gc.freeze()`.
    """

    def scale_lr(self, scale: float) -> float | Sequence[float]:
        """The factor for a batch of `scale` small batches: one, or one per parameter group."""
        raise NotImplementedError(f"{type(self).__name__} must define scale_lr(scale).")

    def _overrides(self, group: dict[str, Any], factor: float) -> dict[str, Any]:
        """What to change in a parameter group for the length of a step."""
        return {} if factor == 1.0 else {"lr": group["lr"] * factor}

    def _learn(self) -> None:
        """Work out what this rule decides once, from what the ranks have said of a step.

        Called in `step`, when their numbers are there, so that all decide the same.
        """

    # -- what is known -----------------------------------------------------------------------

    def gain(self, pg_idx: int | None = None) -> float:
        """How many small-batch steps a step at this scale is worth (r in the AdaScale paper).

        For one parameter group, or for all together. Between `backward` and `step` it counts
        this step's gradients in. Under every rule it is the statistics' gain, not the factor.
        """
        groups = len(self.param_groups)
        if pg_idx is not None and not 0 <= pg_idx < groups:
            raise IndexError(f"pg_idx={pg_idx}, but there are {groups} parameter groups.")
        return self._meter.current.gain(self.scale, pg_idx)

    @property
    def progress(self) -> float:
        """Small-batch steps done so far: the sum of the gains of all steps taken."""
        return self._progress

    def set_progress(self, progress: float) -> None:
        """Say how many small-batch steps have been done, after a phase trained otherwise."""
        if not (math.isfinite(progress) and progress >= 0.0):
            raise ValueError(f"progress must be finite and not negative, got {progress}.")
        self._progress = float(progress)

    @property
    def factors(self) -> tuple[float, ...]:
        """What the learning rate of each parameter group was multiplied with last."""
        return self._factors

    @property
    def noise(self) -> NoiseAverage:
        """The averaged statistics, this step's gradients included."""
        return self._meter.current

    def snapshot(self) -> dict[str, Any]:
        """The state of the scaling in plain numbers, for logs and `Record`.

        Of blocks inside as well: "step" and "workers" are then theirs.
        """
        noise, groups = self._meter.average, range(len(self.param_groups))
        return {
            "step": self._steps,
            "progress": self._progress,
            "scale": self.scale,
            "workers": self._workers.size,
            "passes": self.passes,
            "gain": noise.gain(self.scale),
            "lr": [float(group["lr"]) for group in self.param_groups],
            "factor": list(self._factors),
            "sqr": [noise.sqr_of(i) if noise.measured else None for i in groups],
            "var": [noise.var_of(i) if noise.measured else None for i in groups],
            "noise_scale": [noise.noise_scale(i) for i in groups],
            "skipped": self._skipped,
            "nonfinite": self._meter.nonfinite,
            **(self.optimizer.snapshot() if hasattr(self.optimizer, "snapshot") else {}),
        }

    # -- the optimizer's methods -------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with its learning rates multiplied by the rule's factors.

        A `closure` is run once first, so that the factors know its gradients; its loss is
        returned. Other arguments are passed on.
        """
        inner, meter = self._inner_optimizer, self._meter
        self._check_parameter_groups()
        if closure is not None:
            closure = self._replayed(self._in_step(closure))
        elif self._only_initialises():
            return self._step_inner(*args, **kwargs)
        self._check_gradient_was_divided()
        news = _amp.ScalerSignals.read_from(self, inner)
        if self._batch.counted:  # so many passes are known of only now
            self._check_scale(self._batch, self.passes)
        self._batch.passes = self.passes
        taken = meter.take(news, self.scale)
        self._learn()
        self._steps += 1
        self._note(taken)
        self._check_not_stuck(news)
        if self._delayed:  # `taken` is the previous step's
            asked = news.found_inf is not None and not self._inner_heeds_scaler
            skipped = asked and bool(news.found_inf)
        else:
            skipped = taken is not None and taken.skipped
        if skipped:
            return None
        self._factors = self._checked_factors(self.scale_lr(self.scale))
        positional = () if closure is None else (closure,)
        told = _amp.apply_signals(news, inner, self._inner_heeds_scaler)
        with self._overridden(), told:
            result = self._step_inner(*positional, *args, **kwargs)
        meter.tap.norms.stepped()
        vars(inner)["_opt_called"] = True  # a scheduler made for the inner optimizer asks for it
        if taken is not None and not self._delayed:
            self._progress += taken.gain
        return result

    # torch would wrap a subclass's step to run hooks; they run in the inner optimizer's.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and what was measured of them."""
        self._meter.forget()
        self._clear_inner(*args, **kwargs)

    def forget_gradients(self) -> None:
        """Say that the gradients were cleared, in a way that cannot be seen from here."""
        self._meter.forget()

    def one_sample(self) -> AbstractContextManager[None]:
        """Several backward passes inside are of the same samples, as one backward of the sum.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> first, second = model(torch.ones(3, 2)).mean(dim=0)
        >>> with optimizer.one_sample():
        ...     first.backward(retain_graph=True)
        ...     second.backward()
        >>> optimizer.step()

        Costs a copy of the gradient while it is open.
        """
        return self._meter.tap.one_sample()

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the gradients by the number of passes, with `is_scaled_loss=False`."""
        accumulation = self._accumulation
        if accumulation.declared is None or accumulation.loss_is_divided:
            raise RuntimeError(
                "the gradients are divided already: scale_grad_by_num_grads_to_accum() is for "
                "is_scaled_loss=False, where the loss of each pass is not."
            )
        tap = self._meter.tap
        if tap.sample is None or not tap.gradient_untouched:
            raise RuntimeError(
                "call scale_grad_by_num_grads_to_accum() once, after the step's last backward() "
                "and before anything else changes the gradients (clipping, for one)."
            )
        tap.multiply_gradients(1 / accumulation.declared)

    # -- one step's parts --------------------------------------------------------------------

    def _note(self, taken: Taken | None) -> None:
        """Count what became of a step (the previous one, if delayed)."""
        if taken is not None and taken.skipped:
            self._skipped += 1
        elif taken is not None and self._delayed:
            self._progress += taken.gain

    def _check_not_stuck(self, news: _amp.ScalerSignals) -> None:
        has_scaler = news.present or self._grad_scaler is not None
        if not has_scaler and self._meter.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise RuntimeError(
                f"the gradients of the last {NONFINITE_LIMIT} steps were not finite. With AMP, "
                "use a torch.amp.GradScaler, which skips such steps; otherwise the parameters "
                "are probably NaN by now: lower the learning rate, clip the gradients, or "
                "continue from a checkpoint."
            )

    def _only_initialises(self) -> bool:
        """Whether torch.distributed.checkpoint is making an optimizer fill in its empty state.

        It does so with a step at learning rate 0 along gradients that it sets to zero.
        """
        if self.state or self._meter.tap.passes > 0:
            return False
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        at_rest = all(float(group["lr"]) == 0.0 for group in self.param_groups)
        return at_rest and all(p.grad is not None for p in trained)

    def _replayed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Run the closure now; an optimizer that asks gets this result first."""
        with torch.enable_grad():
            results = [closure()]

        def replay() -> Any:
            if results:
                return results.pop()
            self._meter.tap.paused = True  # LBFGS evaluates again: these are not new samples
            try:
                return closure()
            finally:
                self._meter.tap.paused = False

        return replay

    @contextmanager
    def _overridden(self) -> Iterator[None]:
        """The parameter groups as the rule wants them, for the length of a step."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for group, factor in zip(self.param_groups, self._factors, strict=True):
                for name, value in self._overrides(group, factor).items():
                    old = group[name]
                    if isinstance(old, Tensor):  # the optimizer may hold on to this tensor
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

    def _checked_factors(self, factors: Any) -> tuple[float, ...]:
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
        accumulation, tap = self._accumulation, self._meter.tap
        passes = accumulation.declared
        if passes is None or passes == 1 or accumulation.loss_is_divided or tap.sample is None:
            return
        if tap.gradient_untouched:
            raise RuntimeError(
                f"is_scaled_loss=False, and the sum of {passes} passes' gradients has not been "
                "divided. Call scale_grad_by_num_grads_to_accum() before step(), or divide each "
                f"pass's loss by {passes} and leave is_scaled_loss=True."
            )

    # -- saving and loading ------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The inner optimizer's state dict, with the scaling's own under "manyhands".

        Between backward passes of a step, it is that of before the step. Arguments are the inner
        optimizer's (OSS has `all_ranks`).
        """
        _ = self._inner_optimizer  # raises where there is none
        state: dict[str, Any] = self._save_inner(*args, **kwargs)
        state[_state.KEY] = self.scaling_state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, perhaps of another number of workers or passes.

        What was said in this run, by arguments or `set_scale`, stays; a warning names what the
        state dict says instead. What was not said is taken from it. The default scale
        becomes workers x passes of this run, and a scale that was given to the saved run keeps
        its proportion to them (the micro-batch stays the same).
        """
        ours = self._parsed(_state.part_of(state_dict, type(self).__name__))
        self._load_inner(dict(state_dict))
        self._continue_from(ours)

    def _load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """The patched optimizer's `load_state_dict`.

        A state dict without our entry (of a bare run, or from torch.distributed.checkpoint) is
        the optimizer's own alone: statistics and progress stay as they are.
        """
        if _state.KEY in state_dict:
            self.load_state_dict(state_dict)
        else:
            self._load_inner(state_dict)

    def scaling_state_dict(self) -> dict[str, Any]:
        """The scaling's part alone: statistics, progress, scale.

        For checkpoints in which the optimizer's state is saved otherwise (as by
        torch.distributed.checkpoint, which takes `.optimizer`).
        """
        self._note(self._meter.land())
        return {
            **_state.identity(self._gradients, self._inner_optimizer),
            **self._meter.saved(),
            "batch": self._batch.saved(),
            "options": _options.saved(self._options),
            "progress": self._progress,
            "steps": self._steps,
            "skipped": self._skipped,
        }

    def load_scaling_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `scaling_state_dict`; the optimizer's own state is left as it is."""
        self._continue_from(self._parsed(state_dict))

    def _parsed(self, ours: Mapping[str, Any]) -> _state.ScalingState:
        self._check_between_steps("load_state_dict()")
        state = _state.parsed(
            ours,
            self._gradients,
            self._inner_optimizer,
            self._meter.average,
            self._batch,
            self._options,
        )
        scale = self._checked_scale(state.batch.scale_of(state.batch.passes))
        mine, self._options = self._options, state.options
        try:
            self._check_optimizer_takes(scale)
        finally:
            self._options = mine
        return state

    def _continue_from(self, state: _state.ScalingState) -> None:
        vars(self._batch).update(vars(state.batch))
        self._options.update(state.options)  # in place: a trainer's proxy has the same dict
        self._use_options()
        self._meter.load(
            self._started(state.average),
            state.previous,
            state.loss_scale,
            state.nonfinite,
            state.nonfinite_in_a_row,
            state.norms,
        )
        self._progress, self._steps, self._skipped = state.progress, state.steps, state.skipped
        if state.changes:
            warnings.warn(_options.explained(state.changes, type(self).__name__), stacklevel=3)
