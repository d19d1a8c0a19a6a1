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
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._core.state_parts import SavedState, plain_optimizer
from manyhands._core.wrappers import LossScaler, unwrap
from manyhands.scaling._binding import KEY
from manyhands.scaling._example_squares import Examples
from manyhands.scaling._examples import Coverage
from manyhands.scaling._measured_steps import parse_measure_every
from manyhands.scaling._noise import VAR_FLOOR
from manyhands.scaling._noise_tracker import NoiseTracker, TrackerState
from manyhands.scaling._optimizer import ScaledOptimizer
from manyhands.scaling._rotation import default_share, parse_measured
from manyhands.scaling._settings import (
    Accumulation,
    Batch,
    Option,
    OptionMismatch,
    Options,
    ShortStep,
    check_divided,
    check_scale,
    check_var_floor,
    describe_mismatches,
    load_options,
    parse_accumulation,
    parse_passes,
    parse_short_step,
    save_options,
)
from manyhands.scaling._step_counts import StepCounts, check_progress
from manyhands.scaling._tap import TapState

VERSION = 2  # of the entry's format


class ScalingRuleBase(ScaledOptimizer):
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
        num_gradients_to_accumulate: backward passes before each step; or the loop that decides
            it, such as Accelerate's `Accelerator` (see `Accumulation`). It is found around an
            optimizer that `accelerator.prepare` has returned.
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
        measured: the share of each long gradient that a step measures. 1/8, the default,
            measures an eighth in each step, and all of it in eight: less work, for a small
            error. 1 measures all of it, as is done with `examples`. Tensors below 131,072
            elements are measured whole, and so are gradients that are compared with those of the
            step before.
        measure_every: 1, the default, measures every step. 4 measures one step in four, once the
            averages have seen as many steps as they look back over, and fewer only if at least 100
            measured steps are left in them: at scale 2 one in four, at scale 8 and above all. In
            the steps between nothing is measured or sent. The gain is then a little noisier, and
            a mistake of one rank is reported at the next measured step. Every step is measured
            under a `Ramp`, in `AdaptiveDataParallel`, with `examples`, where a loop decides about
            passes, with another `short_step` than "error", and on one worker with one pass.
        short_step: what a step with fewer passes does, as at the end of an epoch: "count" divides
            the gradient by the passes that there were, and takes a smaller step, of their scale;
            "drop" throws the gradient away; "error" raises one. "count" is the default where the
            loop decides about passes, "error" where they are declared.
        model: the model whose layers measure examples, and the module that `fully_shard` was
            called on. Without examples it is needed only after `gc.freeze()`.
        examples: True, or an `Examples`, to compare the gradients of single examples in the layers
            that allow it. Without it, one worker with one pass compares consecutive gradients.
            AdamScale does not have it: the norms are those of plain gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int | Accumulation = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: LossScaler | None = None,
        delayed: bool = False,
        floor_each_step: bool | None = None,
        var_floor: float | None = None,
        measured: float | None = None,
        measure_every: int | None = None,
        short_step: ShortStep | None = None,
        model: nn.Module | None = None,
        examples: bool | Examples = False,
    ) -> None:
        options = {
            "debias_ewma": Option(True, debias_ewma, check=bool),
            "floor_each_step": Option(False, floor_each_step, check=bool),
            "var_floor": Option(VAR_FLOOR, var_floor, check=check_var_floor),
            "measured": Option(default_share(examples), measured, check=parse_measured),
            "measure_every": Option(1, measure_every, check=parse_measure_every),
            **self._extra_options(),
        }
        declared, accumulation = parse_accumulation(num_gradients_to_accumulate)
        batch = Batch(
            passes=parse_passes(declared),
            accumulation=accumulation,
            short_step=parse_short_step(short_step, accumulation is not None),
            loss_is_divided=is_scaled_loss,
        )
        check_divided(batch)
        batch.set_smoothing(smoothing)
        if scale is not None:
            batch.set_scale(scale=self._check_own_scale(scale))
        super().__init__(
            batch,
            options,
            world_size=world_size,
            process_group=process_group,
            grad_scaler=grad_scaler,
            delayed=delayed,
            model=model,
            examples=examples,
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
        self._counts.progress = check_progress(progress)

    @property
    def coverage(self) -> Coverage | None:
        """Which layers measure examples, and which do not; None without `examples`."""
        return None if self._tap.examples is None else self._tap.examples.coverage

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
        changed.set_scale(per_pass=check_scale(scale, 0.0, "one pass"))
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
            raise RuntimeError(
                "with a data-parallel module the passes are counted, not declared: run all but "
                "the step's last one inside its no_sync()."
            )
        if self._batch.accumulation is not None:
            raise RuntimeError(
                "the loop decides how many passes a step has, and a number that is set here would "
                f"not last: it is asked before each step. Change it there: "
                f"{type(self._batch.accumulation).__name__}.gradient_accumulation_steps."
            )
        passes = parse_passes(num_gradients_to_accumulate)
        self._check_between_steps("set_num_gradients_to_accumulate()")
        if self._inner is not None:
            # a scale that was set explicitly stays, whatever the passes
            scale = self._check_batch(replace(self._batch, passes=passes), passes)
            self._tap.exchange.announce(passes, scale, self._checksum())
        self._batch.set_smoothing(None if update_smoothing else self.smoothing)
        self._batch.set_passes(passes)

    def _continue_batch(self) -> int:
        """Let steps have the batch of the run that was loaded, and return their passes."""
        batch = self._batch
        if batch.scale is not None:  # of the whole batch, whose passes may change now
            self.set_scale_per_pass(batch.scale / batch.passes)
        if batch.saved_scale is not None:
            passes = max(1, round(batch.saved_scale / batch.scale_for(1)))
            self.set_num_gradients_to_accumulate(passes, update_smoothing=False)
        return batch.passes

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
            raise ValueError(
                f"this state dict has no {KEY!r} entry: it is a bare optimizer's, or from another "
                "library. To continue a bare run under a scaling rule, load it before wrapping: "
                f"optimizer.load_state_dict(...), then mh.{type(self).__name__}(optimizer)."
            )
        # parsed first: a state dict that does not fit changes nothing
        state = self.check_scaling_state(state_dict[KEY])
        self._binding.load_state_dict(dict(state_dict))
        self.take_scaling_state(state)

    def scaling_state_dict(self) -> StateDict:
        """Return the state of the scaling alone: statistics, progress, scale.

        Use it if the optimizer's state is saved in another way, as by
        torch.distributed.checkpoint, which is given `.optimizer`.
        """
        # statistics still on their way to the host would be lost
        self._counts.add(self._tracker.finish_in_flight(), late=self._delayed)
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
        self._tap.measure_share(self._options["measured"].number)
        self._tap.load_state(state.tap)
        self._tracker.load_state(state.tracker)
        self._counts.load_state(state.counts)
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
    entry: SavedState, origin: Mapping[str, object], tracker: NoiseTracker, options: Options
) -> ScalingState:
    """Return the parsed entry; raise a ValueError if it does not fit this wrapper.

    `origin` describes this wrapper; its parts and options have what was set in this run.
    """
    for name, what, advice in (
        ("version", "format version", "Load it with the release that wrote it."),
        ("optimizer", "optimizer", "Build the optimizer that the run was saved with."),
        ("gradients", "kind of gradients", "Wrap with a rule that measures the same kind."),
        ("group_sizes", "numbers of parameters per group", "Build the same parameter groups."),
    ):
        if entry.get(name) != origin[name]:
            raise ValueError(
                f"the state dict's {what} is {entry.get(name)!r}, this wrapper's is "
                f"{origin[name]!r}. {advice}"
            )
    try:
        batch, batch_mismatches = tracker.tap.batch.parse_state(entry["batch"])
        loaded_options, mismatches = load_options(options, entry["options"])
        return ScalingState(
            batch=batch,
            options=loaded_options,
            mismatches=batch_mismatches + mismatches,
            tracker=tracker.parse_state(entry),
            tap=tracker.tap.parse_state(entry),
            counts=StepCounts.parse_state(entry),
        )
    # Whatever a damaged file can provoke: the user gets one kind of error for all of it. A
    # RuntimeError is torch's, for a tensor of several elements where a number is expected.
    except (
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError
    ) as error:  # fmt: skip
        raise ValueError(f"the state dict is damaged: its {KEY!r} entry, {error!r}.") from error
