"""Make, bind, read, set and save a scaling rule: the interface of every rule.

How it steps is in `_optimizer.py`, and what the rules answer is in `_rules.py`.

A rule's state dict is its inner optimizer's with one entry added, under `KEY`. The batch, the
options, the history and the measurement each write their part of the entry and parse it. All of it
is parsed and checked before anything is changed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._arguments import explained, flag, one_of, real, whole
from manyhands._optimizers.foreign import find_prepared
from manyhands._optimizers.state_parts import (
    SQUARES,
    OptimizerLayers,
    SavedEntries,
    SavedState,
    plain_optimizer,
)
from manyhands._optimizers.wrappers import (
    LossScale,
    LossScaler,
    ParamGroup,
    find_layer,
    params_of,
    unwrap,
)
from manyhands._ranks.ranks import rank_group_of
from manyhands._warn import warn
from manyhands.scaling._binding import KEY, check_bindable, check_ranks_agree, claimed_by
from manyhands.scaling._noise import VAR_FLOOR, History, NoiseAverage, ratio_of_squares
from manyhands.scaling._optimizer import RuleCore, ScaledOptimizer
from manyhands.scaling._payload import StepObserver
from manyhands.scaling._preconditioned import rescale_second_moments
from manyhands.scaling._settings import (
    PASSES,
    PER_STEP,
    Accumulation,
    Option,
    OptionMismatch,
    Options,
    ShortStep,
    describe_mismatches,
    load_options,
    save_options,
)
from manyhands.scaling._step import (
    Averager,
    Batch,
    CountingLoop,
    FollowingLoop,
    Loop,
    MeasurementState,
    PassWeight,
    passes_and_loop,
    prepared_loop,
)

VERSION = 2  # of the entry's format
_EVERY = partial(whole, "measure_every", least=1)
_DEBIAS = partial(flag, "debias_ewma")


def rule_of(optimizer: Optimizer) -> ScalingRuleBase | None:
    """Return the rule that is around an optimizer, or bound to it by `AdaptiveDataParallel`."""
    around = find_layer(optimizer, ScalingRuleBase)
    rule = claimed_by(optimizer)
    if isinstance(rule, ScalingRuleBase):
        return rule
    return around


class LoopPort:
    """What a loop that is not the user's tells a rule, and what it may ask: `rule.port`.

    `Ramp`, `WeightedMean`, `AdaptiveDataParallel` and the trainers' adapters use it. A loop of your
    own does not need it: declare the passes (`num_gradients_to_accumulate`), or give an
    `Accumulation`.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> for passes in (1, 3):  # a trainer that knows the passes when a step begins
    ...     rule.port.begin_step(passes)
    ...     for _ in range(passes):
    ...         (model(torch.randn(8, 2)).mean() / rule.port.divide_by).backward()
    ...     rule.step()
    ...     rule.zero_grad()
    >>> rule.scale, rule.port.steps
    (3.0, 2)
    """

    def __init__(self, rule: ScalingRuleBase, core: RuleCore) -> None:
        self._rule = rule
        self._core = core
        self.batch = core.batch
        """The size of a step. Read it; the methods change it."""
        self.history = core.history
        """What the rule's steps have come to, without the gradients of a step under way."""
        self.loss_scale = core.loss_scale
        """What gradients are multiplied by: set its `scaler`, or an object with `get_scale()`."""

    # -- tell --------------------------------------------------------------------------------

    def begin_step(self, passes: int, *, scale_per_pass: float | None = None) -> None:
        """Declare the passes of the next steps, on every rank and between two steps.

        `scale_per_pass` is the size of a pass in small batches, on all ranks together, if it has
        changed. In `AdaptiveDataParallel` the passes are counted, and this sets the size only.
        """
        self.check_between_steps("port.begin_step()")
        batch = self._core.batch
        if scale_per_pass is not None:
            batch.scale_per_pass = scale_per_pass
        if not batch.loop.counts:
            batch.set_passes(passes)

    def end_pass(self, last: bool | None) -> None:
        """Say whether the pass under way is its step's last; None: as in a loop without a port.

        `step()` and `zero_grad()` do nothing while it is not. To end a step early, see `follow`.
        """
        self._core.batch.loop.said = last

    def skip(self) -> None:
        """Drop the passes so far, as the rule's `zero_grad()` does: no step follows."""
        self._rule.forget_gradients()

    def follow(self, accumulation: Accumulation | None) -> None:
        """Let a loop decide about passes from now on; None: those count that are declared.

        It divides losses by `gradient_accumulation_steps`; steps that end early are corrected.
        """
        self.check_between_steps("port.follow()")
        loop = Loop()
        if accumulation is not None:
            loop = FollowingLoop(accumulation)
        self._rule._follow(loop)

    def weigh_pass(self, squares: float, small_batches: int, passes: int) -> None:
        """Count the squared norm of the next pass so many times (`WeightedMean`).

        The step has so many small batches, on all ranks, and so many passes on this one.
        """
        self._core.measurement.next_weight = PassWeight(squares, small_batches, passes)

    def set_scale_of_passes(self) -> None:
        """Turn a scale of the whole batch into one of each pass: the number of passes changes."""
        batch = self._core.batch
        if batch.scale is not None:
            batch.scale_per_pass = batch.scale / batch.passes
            batch.scale = None

    def set_memory(self, small_batches: float) -> None:
        """Let the averages look back so many small batches, unless a smoothing was set."""
        self._core.batch.memory = small_batches

    def restart_averages(self) -> NoiseAverage:
        """Forget the averages, and return the new one."""
        history = self._core.history
        history.average = history.average.restarted()
        return history.average

    def follow_batch(self, before: float, now: float) -> bool:
        """Let Adam's second moments be those of scale `now`; return whether the noise is known.

        Call it between two steps, on every rank.
        """
        average = self._core.history.average
        if not average.measured:
            return False
        ratio = ratio_of_squares(average.sqr_of(), average.var_of(), before, now)
        rescale_second_moments(OptimizerLayers.of(self._rule).plain, ratio)
        # Also on a rank whose shard is empty: sharded moments are collected anew from all ranks.
        self._core.measurement.norms.moments_changed()
        return True

    @property
    def observer(self) -> StepObserver | None:
        """Who reports and learns something at every step, such as a `Ramp`."""
        return self._core.observer

    @observer.setter
    def observer(self, observer: StepObserver) -> None:
        self._core.observer = observer

    # -- ask ---------------------------------------------------------------------------------

    def check_step(self, passes: int, scale_per_pass: float) -> None:
        """Raise if the rule could not scale the optimizer for so many passes of this size."""
        self._rule._check_batch(replace(self._core.batch, scale_per_pass=scale_per_pass), passes)

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step, where `what` is not possible."""
        self._rule._check_between_steps(what)

    @property
    def divide_by(self) -> int:
        """What each pass's loss is to be divided by, at present."""
        batch = self._core.batch
        if batch.passes_divided_by_user:
            return batch.passes
        return 1

    @property
    def steps(self) -> int:
        """The steps so far."""
        return self._core.history.steps

    @property
    def keeps_gradients(self) -> bool:
        """Whether `zero_grad()` does nothing at present: the loop is in the middle of a step."""
        return self._core.keeps_gradients


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
            it (see `Accumulation`). It is found around an optimizer that a trainer has prepared,
            if `manyhands.integrations` knows the trainer.
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
        passes, loop = passes_and_loop(num_gradients_to_accumulate)
        policy: ShortStep = short_step or ("count" if loop.decides else "error")
        one_of("short_step", policy, get_args(ShortStep))
        batch = Batch(1, passes, None, loop, policy, loss_is_divided=is_scaled_loss)
        batch.check_divided()
        batch.set_smoothing(smoothing)
        if scale is not None:
            batch.set_scale(scale=self._check_own_scale(scale))
        self._short_step = short_step
        self._core = RuleCore(
            batch,
            options,
            world_size=world_size,
            process_group=process_group,
            loss_scale=LossScale(grad_scaler),
            model=model,
        )
        if optimizer is not None:
            self._bind(optimizer)

    def _extra_options(self) -> Options:
        """Return the options that this rule adds; they are saved and loaded with the others."""
        return {}

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
        core = self._core
        if core.inner is not None:
            raise RuntimeError("this rule is bound to an optimizer already; make another one.")
        if adp is not None:
            if core.batch.loop.decides:
                raise TypeError("the passes are counted: leave num_gradients_to_accumulate out.")
            core.batch.loop = CountingLoop(adp)
            every = core.options["measure_every"]
            core.options["measure_every"] = replace(every, default=1)  # as in adaptdl
            core.process_group = core.process_group or getattr(adp, "process_group", None)
            core.model = core.model or _module(adp)
        self._bind(optimizer)
        if patch_optimizer:
            core.binding.patch(self)

    def _bind(self, optimizer: Optimizer) -> None:
        """Tie the rule to an optimizer: find the ranks, check that they agree, start to measure."""
        core = self._core
        batch = self._core.batch
        check_bindable(optimizer, type(self).__name__, ScaledOptimizer)
        norms = self._make_norm(optimizer)
        prepared = None
        if not batch.loop.counts:
            prepared = find_prepared(optimizer)
        if prepared is not None:
            # Its own methods become the rule's: the trainer saves, loads and steps that object.
            if prepared.unseen is not None:
                why = f"cannot measure gradients under {prepared.unseen}. Use DDP, FSDP2 or OSS."
                raise TypeError(f"{type(self).__name__} {why}")
            loop = prepared_loop(prepared, batch.passes)
            if loop is not None:
                self._follow(loop)
            if not core.loss_scale.known:
                core.loss_scale.scaler = prepared.scaler
        group = core.process_group or getattr(optimizer, "group", None)  # an OSS has one
        params = params_of(optimizer.param_groups)
        core.ranks = rank_group_of(params, group, core.world_size)
        batch.workers = core.ranks.size
        core.inner = optimizer
        core.history.factors = (1.0,) * len(optimizer.param_groups)
        try:
            scale = batch.scale_for(batch.passes)
            if not batch.loop.counts:  # else the scale is known only at the step
                scale = self._check_own_scale(scale)
            self._check_optimizer_supports(scale)
            check_ranks_agree(optimizer, core.ranks, batch, core.options)
            core.start(optimizer, norms, NoiseAverage(len(optimizer.param_groups)))
        except BaseException:
            core.inner = None  # so that the mistake can be corrected, and the rule bound again
            raise
        core.binding.claim(self)
        if prepared is not None and prepared.optimizer is optimizer:
            core.binding.patch(self)

    def _follow(self, loop: Loop) -> None:
        """Let this loop say from now on which passes make a step; short steps follow from it."""
        batch = self._core.batch
        batch.loop = loop
        batch.begin_step()
        if self._short_step is None:
            batch.short_step = "count" if loop.decides else "error"
            batch.check_divided()

    @property
    def adp(self) -> Averager | None:
        """The data-parallel module that was given to `initialize`."""
        return self._core.batch.loop.module

    def unhook(self) -> None:
        """Stop measuring the parameters, and give the optimizer back as it was."""
        self._inner_optimizer()  # raises if there is none
        self._core.measurement.hooks.remove()
        self._core.binding.release()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters: they are measured from the next backward pass on."""
        self._check_between_steps("add_param_group()")
        inner = self._inner_optimizer()
        core = self._core
        inner.add_param_group(param_group)
        groups = inner.param_groups
        try:
            self._check_optimizer_supports(self.scale)
        except ValueError:
            groups.pop()
            raise
        core.measurement.norms.refresh()
        core.measurement.hook(groups)
        core.history.average = replace(core.history.average, groups=len(groups))
        core.history.factors += (1.0,)

    def __deepcopy__(self, memo: dict[int, object]) -> ScaledOptimizer:
        """Return a copy around a copy of the optimizer (and its parameters, if not in `memo`)."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        old = self._core
        twin.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original optimizer
        loop = copy.copy(old.batch.loop)
        loop.module = copy.deepcopy(loop.module, memo)
        core = replace(
            old,
            batch=replace(old.batch, loop=loop),
            options=dict(old.options),
            loss_scale=copy.copy(old.loss_scale),
            model=_module(loop.module),  # `fully_shard`'s modules cannot be copied
            history=copy.copy(old.history),
            inner=None,
            _previewed=None,
        )
        twin._core = core
        if old.inner is not None:
            inner = copy.deepcopy(old.inner, memo)
            core.start(inner, twin._make_norm(inner), core.history.average)
            core.binding.claim(twin)
            state = old.measurement.to_state()
            core.measurement.load_state(
                core.measurement.parse_state(SavedEntries(state, type(self).__name__))
            )
            if old.binding.patched:
                core.binding.patch(twin)
        return twin

    def __copy__(self) -> ScaledOptimizer:
        """Return another face of the same rule."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)  # the rule may be a user's, with any attributes
        return twin

    @property
    def port(self) -> LoopPort:
        """What a loop that is not the user's tells the rule, and what it may ask."""
        return LoopPort(self, self._core)

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
        return self.noise.gain(self.scale, pg_idx)

    @property
    def progress(self) -> float:
        """Small-batch steps done so far: the sum of the gains of all steps taken."""
        return self._core.history.progress

    def set_progress(self, progress: float) -> None:
        """Set the progress, after a phase that was trained without the rule."""
        self._core.history.progress = real("progress", progress, least=0.0)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors that the learning rates were multiplied by in the last step, by group."""
        return self._core.history.factors

    def snapshot(self) -> dict[str, object]:
        """Return the state of the scaling in plain numbers, for logs and `Record`.

        If blocks are inside, their numbers are included, and "step" and "workers" are theirs.
        """
        inner = self._inner_optimizer()
        core = self._core
        history = core.history
        noise = core.history.average
        groups = range(len(self.param_groups))
        sqr: list[float | None] = [None] * len(groups)
        var: list[float | None] = [None] * len(groups)
        if noise.measured:
            sqr = [noise.sqr_of(group) for group in groups]
            var = [noise.var_of(group) for group in groups]
        snapshot: dict[str, object] = {
            "step": history.steps,
            "progress": history.progress,
            "scale": self.scale,
            "workers": self._core.batch.workers,
            "passes": self.passes,
            "gain": noise.gain(self.scale),
            "lr": [float(group["lr"]) for group in self.param_groups],
            "factor": list(history.factors),
            "sqr": sqr,
            "var": var,
            "noise_scale": [noise.noise_scale(group) for group in groups],
            "skipped": history.skipped,
            "short": history.short,
            "nonfinite": history.nonfinite,
        }
        if hasattr(inner, "snapshot"):
            snapshot.update(inner.snapshot())
        return snapshot

    def __repr__(self) -> str:
        if self._core.inner is None:
            return f"{type(self).__name__}()"
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})\n{self._core.inner!r}"

    def _settings(self) -> dict[str, object]:
        """Return the settings that `repr` shows."""
        batch = self._core.batch
        return {
            "scale": f"{self.scale:g}",
            "workers": batch.workers,
            "passes": "counted" if batch.loop.counts else batch.passes,
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
        if self._core.inner is not None:
            self._check_optimizer_supports(scale)
        self._core.batch.set_scale(scale=scale)

    def set_scale_per_pass(self, scale: float) -> None:
        """Set the size of one pass, on all workers together, in small batches.

        The scale is then this number times the passes of each step. One pass may be less than a
        small batch. A whole step may not, if the rule requires that.
        """
        self._check_between_steps("set_scale_per_pass()")
        batch = self._core.batch
        changed = replace(batch)  # checked before anything is changed
        changed.set_scale(per_pass=real("scale", scale, above=0.0))
        # if passes are counted, the scale is known, and checked, only at the step
        if self._core.inner is not None and not batch.loop.counts:
            self._check_batch(changed, batch.passes)
        batch.set_scale(per_pass=changed.scale_per_pass)

    @property
    def smoothing(self) -> float:
        """The weight of the past in the averages."""
        return self._core.batch.smoothing_for(self.scale)

    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Set how many backward passes make a step from now on. Call it on every worker.

        The default scale follows. A scale that was set explicitly stays; if it is to change, call
        `set_scale` too. The smoothing becomes the default for the new number, unless
        `update_smoothing=False`.
        """
        core = self._core
        batch = self._core.batch
        if batch.loop.counts:
            raise RuntimeError("AdaptiveDataParallel counts the passes: there is no number to set.")
        if batch.loop.decides:
            raise RuntimeError("the loop decides how many passes a step has: change it there.")
        passes = whole(PASSES, num_gradients_to_accumulate, least=1, why=PER_STEP)
        self._check_between_steps("set_num_gradients_to_accumulate()")
        if core.inner is not None:
            # a scale that was set explicitly stays, whatever the passes
            scale = self._check_batch(replace(batch, passes=passes), passes)
            core.measurement.exchange.announce(passes, scale, core.history.checksum)
        batch.set_smoothing(None if update_smoothing else self.smoothing)
        batch.set_passes(passes)

    # -- saving and loading ------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        """Return the inner optimizer's state dict, with one entry added under "manyhands".

        Between the backward passes of a step, the state is that before the step. Arguments are
        passed to the inner optimizer (OSS has `all_ranks`).
        """
        self._inner_optimizer()  # raises if there is none
        state: StateDict = self._core.binding.state_dict(*args, **kwargs)
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
        self._core.binding.load_state_dict(dict(state_dict))
        self.take_scaling_state(state)

    def scaling_state_dict(self) -> StateDict:
        """Return the state of the scaling alone: statistics, progress, scale.

        Use it if the optimizer's state is saved in another way, as by
        torch.distributed.checkpoint, which is given `.optimizer`.
        """
        inner = self._inner_optimizer()
        core = self._core
        return {
            **_describe_origin(self._norm_kind, inner),
            **core.history.to_state(),
            **core.measurement.to_state(),
            "loss_scale": core.loss_scale.last,
            "batch": core.batch.to_state(),
            "options": save_options(core.options),
        }

    def load_scaling_state_dict(self, state_dict: SavedState) -> None:
        """Continue from a `scaling_state_dict`; the optimizer's own state stays as it is."""
        self.take_scaling_state(self.check_scaling_state(state_dict))

    def check_scaling_state(self, saved: SavedState) -> ScalingState:
        """Return the scaling entry of a state dict, checked against this wrapper."""
        self._check_between_steps("load_state_dict()")
        core = self._core
        entry = SavedEntries(saved, "a scaling rule")
        entry.expect(_describe_origin(self._norm_kind, self._inner_optimizer()))
        batch, batch_mismatches = core.batch.parse_state(entry.part("batch"))
        options, mismatches = load_options(core.options, entry.part("options").plain)
        loss_scale = None
        if entry.has("loss_scale"):
            loss_scale = entry.real("loss_scale", above=0.0, below=SQUARES)
        state = ScalingState(
            batch=batch,
            options=options,
            mismatches=batch_mismatches + mismatches,
            history=core.history.parse_state(entry),
            measurement=core.measurement.parse_state(entry),
            loss_scale=loss_scale,
        )
        scale = self._check_own_scale(batch.scale_for(batch.passes))
        loaded = copy.copy(self)  # the check reads the options, here the loaded ones
        loaded._core = copy.copy(core)
        loaded._core.options = options
        loaded._check_optimizer_supports(scale)
        return state

    def take_scaling_state(self, state: ScalingState) -> None:
        """Take over a parsed state."""
        core = self._core
        core.batch.load_state(state.batch)
        core.options = state.options
        self._apply_options()
        core.measurement.load_state(state.measurement)
        core.loss_scale.last = state.loss_scale
        core.continue_from(state.history)
        if core.observer is not None:
            core.observer.after_load()
        if state.mismatches:
            message = describe_mismatches(state.mismatches, type(self).__name__)
            warn(message)


@dataclass(frozen=True)
class ScalingState:
    """The scaling entry of a state dict, parsed and found to fit."""

    batch: Batch
    options: Options
    mismatches: list[OptionMismatch]
    history: History
    measurement: MeasurementState
    loss_scale: float | None


def _describe_origin(norm_kind: str, optimizer: Optimizer) -> dict[str, object]:
    """Return what a state dict records about the wrapper that it is from."""
    inner = unwrap(optimizer)[-1]  # the same name with and without blocks around it
    return {
        "version": VERSION,
        "gradients": norm_kind,
        "optimizer": type(plain_optimizer(inner)).__name__,  # with and without sharding
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def _module(averager: Averager | None) -> nn.Module | None:
    return averager if isinstance(averager, nn.Module) else None
