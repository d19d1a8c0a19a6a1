"""A scaling rule as a user meets it: its arguments, what it says about itself, and its state.

How it steps is in `_optimizer.py`, and what the rules answer is in `_rules.py`.

A rule's state dict is its inner optimizer's with one entry added, under `KEY`. The batch, the
options, the noise tracker and the tap each write their part of the entry and parse it. All of it is
parsed and checked before anything is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._core.arguments import explained, flag, one_of, real, whole
from manyhands._core.state_parts import SavedEntries, SavedState, plain_optimizer
from manyhands._core.wrappers import LossScaler, unwrap
from manyhands.scaling._binding import KEY
from manyhands.scaling._noise import VAR_FLOOR
from manyhands.scaling._noise_tracker import NoiseTracker, StepCounts, TrackerState
from manyhands.scaling._optimizer import ScaledOptimizer
from manyhands.scaling._settings import (
    PASSES,
    PER_STEP,
    Accumulation,
    Batch,
    Option,
    OptionMismatch,
    Options,
    ShortStep,
    describe_mismatches,
    load_options,
    passes_and_loop,
    save_options,
)
from manyhands.scaling._tap import TapState

VERSION = 2  # of the entry's format
_EVERY = partial(whole, "measure_every", least=1)
_DEBIAS = partial(flag, "debias_ewma")


class ScalingRuleBase(ScaledOptimizer):
    """Base of the scaling rules, and of your own: define `scale_lr(scale)`.

    Wrap an optimizer directly, `Rule(optimizer)`, or make the rule first and bind it with
    `AdaptiveDataParallel(model, optimizer, rule)` or `initialize`. Then use the rule in place of
    the optimizer:

    >>> import torch, manyhands as mh
    >>> from manyhands.scaling import ScalingRuleBase
    >>> class Cautious(ScalingRuleBase):
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
        num_gradients_to_accumulate: backward passes before each step; or the loop that decides
            it, such as Accelerate's `Accelerator` (see `Accumulation`). It is found around an
            optimizer that `accelerator.prepare` has returned.
        is_scaled_loss: whether each pass's loss is divided by that number. If not, call
            `scale_grad_by_num_grads_to_accum()` before `step`.
        debias_ewma: True for moving averages like Adam's; False for those of the AdaScale paper's
            appendix B.3. A state dict of a run with False continues with False.
        process_group: the workers that share gradients; all, by default.
        grad_scaler: the `torch.amp.GradScaler` in use. It is required if you call its `unscale_`
            or read `gain()` before `step()`; otherwise `scaler.step(optimizer)` passes on the
            loss scale.
        var_floor: the smallest noise that an average can have, 1e-6 by default. Gradients whose
            squared norms are nearly as small seem to be pure noise: lower the floor for them, or
            multiply the loss.
        measure_every: 4, the default, measures one step in four, once the averages have seen as
            many steps as they look back over. 1 measures every step, as is done under a `Ramp` and
            on one worker with one pass, and is the default in `AdaptiveDataParallel`. More steps
            are measured where the averages would hold less than 100 small batches or four steps.
        short_step: what a step with fewer passes does, as at the end of an epoch. "error", the
            default where passes are declared, says how to declare a shorter step. "count", the
            default where the loop decides about passes, is for losses that are divided by the
            passes of a whole step even there: it multiplies the gradient, so that it is the mean
            of the passes that there were, and takes a smaller step, of their scale.
        model: the module that `fully_shard` was called on; needed only after `gc.freeze()`.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer | None = None,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int | Accumulation = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: LossScaler | None = None,
        var_floor: float | None = None,
        measure_every: int | None = None,
        short_step: ShortStep | None = None,
        model: nn.Module | None = None,
    ) -> None:
        options = {
            "debias_ewma": Option(True, None if _DEBIAS(debias_ewma) else False, check=_DEBIAS),
            "var_floor": Option(VAR_FLOOR, var_floor, check=partial(real, "var_floor", least=0.0)),
            "measure_every": Option(4, measure_every, check=_EVERY),
            **self._extra_options(),
        }
        passes, accumulation = passes_and_loop(num_gradients_to_accumulate)
        policy: ShortStep = short_step or ("error" if accumulation is None else "count")
        one_of("short_step", policy, get_args(ShortStep))
        batch = Batch(
            passes=passes,
            accumulation=accumulation,
            short_step=policy,
            loss_is_divided=is_scaled_loss,
        )
        batch.check_divided()
        batch.set_smoothing(smoothing)
        if scale is not None:
            batch.set_scale(scale=self._check_own_scale(scale))
        super().__init__(
            batch,
            options,
            world_size=world_size,
            process_group=process_group,
            grad_scaler=grad_scaler,
            model=model,
        )
        self._short_step = short_step
        if optimizer is not None:
            self._bind(optimizer)

    def _extra_options(self) -> Options:
        """Return the options that this rule adds; they are saved and loaded with the others."""
        return {}

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
        self._counts.progress = real("progress", progress, least=0.0)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors that the learning rates were multiplied by in the last step, by group."""
        return self._factors

    def snapshot(self) -> dict[str, object]:
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
            "short": self._counts.short,
            "nonfinite": self._tracker.nonfinite,
            **(self.optimizer.snapshot() if hasattr(self.optimizer, "snapshot") else {}),
        }

    def __repr__(self) -> str:
        if self._inner is None:
            return f"{type(self).__name__}()"
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})\n{self._inner!r}"

    def _settings(self) -> dict[str, object]:
        """Return the settings that `repr` shows."""
        return {
            "scale": f"{self.scale:g}",
            "workers": self._batch.workers,
            "passes": "counted" if self._batch.counts_passes else self._batch.passes,
            "smoothing": f"{self.smoothing:g}",
        }

    # -- scale, accumulation, smoothing ------------------------------------------------------

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
        changed.set_scale(per_pass=real("scale", scale, above=0.0))
        # if passes are counted, the scale is known, and checked, only at the step
        if self._inner is not None and not self._batch.counts_passes:
            self._check_batch(changed, self._batch.passes)
        self._batch.set_scale(per_pass=changed.scale_per_pass)

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
            raise RuntimeError("AdaptiveDataParallel counts the passes: there is no number to set.")
        if self._batch.accumulation is not None:
            raise RuntimeError("the loop decides how many passes a step has: change it there.")
        passes = whole(PASSES, num_gradients_to_accumulate, least=1, why=PER_STEP)
        self._check_between_steps("set_num_gradients_to_accumulate()")
        if self._inner is not None:
            # a scale that was set explicitly stays, whatever the passes
            scale = self._check_batch(replace(self._batch, passes=passes), passes)
            self._tap.exchange.announce(passes, scale, self._checksum())
        self._batch.set_smoothing(None if update_smoothing else self.smoothing)
        self._batch.set_passes(passes)

    # -- saving and loading ------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        """Return the inner optimizer's state dict, with one entry added under "manyhands".

        Between the backward passes of a step, the state is that before the step. Arguments are
        passed to the inner optimizer (OSS has `all_ranks`).
        """
        _ = self._inner_optimizer  # raises if there is none
        state: StateDict = self._binding.state_dict(*args, **kwargs)
        state[KEY] = self.scaling_state_dict()
        return state

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue from a `state_dict`, perhaps of another number of workers or passes.

        Options that were set in this run, by arguments or `set_scale`, stay; a warning names those
        that differ from the state dict's. All other options are taken from the state dict. The
        default scale becomes this run's workers x passes. A scale that was set in the saved run
        keeps its proportion to workers x passes, as the micro-batch stays the same.
        """
        if KEY not in state_dict:
            raise ValueError(f"no {KEY!r} entry: a bare optimizer's? Then load it before wrapping.")
        # parsed first: a state dict that does not fit changes nothing
        state = self.check_scaling_state(state_dict[KEY])
        self._binding.load_state_dict(dict(state_dict))
        self.take_scaling_state(state)

    def scaling_state_dict(self) -> StateDict:
        """Return the state of the scaling alone: statistics, progress, scale.

        Use it if the optimizer's state is saved in another way, as by
        torch.distributed.checkpoint, which is given `.optimizer`.
        """
        return {
            **_describe_origin(self._norm_kind, self._inner_optimizer),
            **self._counts.to_state(),
            **self._tracker.to_state(),
            **self._tap.to_state(),
            "batch": self._batch.to_state(),
            "options": save_options(self._options),
        }

    def load_scaling_state_dict(self, state_dict: SavedState) -> None:
        """Continue from a `scaling_state_dict`; the optimizer's own state stays as it is."""
        self.take_scaling_state(self.check_scaling_state(state_dict))

    def check_scaling_state(self, entry: SavedState) -> ScalingState:
        """Return the scaling entry of a state dict, checked against this wrapper."""
        self._check_between_steps("load_state_dict()")
        origin = _describe_origin(self._norm_kind, self._inner_optimizer)
        state = _parse_entry(entry, origin, self._tracker, self._options)
        scale = self._check_own_scale(state.batch.scale_for(state.batch.passes))
        # the check reads the options, so it sees the loaded ones for a moment
        own_options, self._options = self._options, state.options
        try:
            self._check_optimizer_supports(scale)
        finally:
            self._options = own_options
        return state

    def take_scaling_state(self, state: ScalingState) -> None:
        """Take over a parsed state."""
        self._batch.load_state(state.batch)
        self._options.update(state.options)  # in place: a trainer's proxy holds this dict
        self._apply_options()
        self._tap.load_state(state.tap)
        self._tracker.load_state(state.tracker)
        self._counts.load_state(state.counts)
        if self._observer is not None:
            self._observer.after_load()
        if state.mismatches:
            message = describe_mismatches(state.mismatches, type(self).__name__)
            warnings.warn(message, stacklevel=3)


@dataclass(frozen=True)
class ScalingState:
    """The scaling entry of a state dict, parsed and found to fit."""

    batch: Batch
    options: Options
    mismatches: list[OptionMismatch]
    tracker: TrackerState
    tap: TapState
    counts: StepCounts


def _describe_origin(norm_kind: str, optimizer: Optimizer) -> dict[str, object]:
    """Return what a state dict records about the wrapper that it is from."""
    inner = unwrap(optimizer)[-1]  # the same name with and without blocks around it
    return {
        "version": VERSION,
        "gradients": norm_kind,
        "optimizer": type(plain_optimizer(inner)).__name__,  # with and without sharding
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def _parse_entry(
    saved: SavedState, origin: Mapping[str, object], tracker: NoiseTracker, options: Options
) -> ScalingState:
    """Return the parsed entry; raise a ValueError if it does not fit the wrapper of `origin`."""
    entry = SavedEntries(saved, "a scaling rule")
    entry.expect(origin)
    batch, batch_mismatches = tracker.tap.batch.parse_state(entry.part("batch"))
    loaded_options, mismatches = load_options(options, entry.part("options").plain)
    return ScalingState(
        batch=batch,
        options=loaded_options,
        mismatches=batch_mismatches + mismatches,
        tracker=tracker.parse_state(entry),
        tap=tracker.tap.parse_state(entry),
        counts=StepCounts.parse_state(entry),
    )
