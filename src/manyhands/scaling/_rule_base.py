"""Define the public interface of all scaling rules: arguments, binding, statistics, state.

A rule's state dict is the inner optimizer's with an additional entry, `KEY`, of parts for the
batch, history and measurement. All parts are parsed and checked before any object changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._arguments import explained, flag, real, whole
from manyhands._optimizers.foreign import find_prepared
from manyhands._optimizers.state_parts import (
    SQUARES,
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
from manyhands.scaling._batch import PASSES, PER_STEP, Accumulation, Averager, Batch
from manyhands.scaling._binding import KEY, check_bindable, check_ranks_agree, claimed_by
from manyhands.scaling._noise import (
    VAR_FLOOR,
    DebiasedAverage,
    History,
    NoiseAverage,
    PaperAverage,
)
from manyhands.scaling._optimizer import RuleCore, ScaledOptimizer
from manyhands.scaling._port import CountingLoop, LoopPort, passes_and_loop, prepared_loop
from manyhands.scaling._step import MeasurementState

VERSION = 2


class RuleOptions(TypedDict, total=False):
    """Options that every rule accepts by name; see `ScalingRuleBase`."""

    world_size: int | None
    scale: float | None
    smoothing: float | None
    num_gradients_to_accumulate: int | Accumulation
    is_scaled_loss: bool
    debias_ewma: bool
    process_group: dist.ProcessGroup | None
    grad_scaler: LossScaler | None
    var_floor: float
    measure_every: int | None


def rule_of(optimizer: Optimizer) -> ScalingRuleBase | None:
    around = find_layer(optimizer, ScalingRuleBase)
    rule = claimed_by(optimizer)
    if isinstance(rule, ScalingRuleBase):
        return rule
    return around


class ScalingRuleBase(ScaledOptimizer):
    """Base class of scaling rules. Custom rules define `scale_lr(scale)`.

    Wrap an optimizer with `Rule(optimizer)`, or create the rule first and bind it with
    `AdaptiveDataParallel(model, optimizer, scaling_rule=rule)` or `initialize`. Then use the rule
    in place of the optimizer:

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

    `lr` stays the small batch's rate, for schedulers and logs. End training on `progress`, the
    equivalent number of small-batch steps, instead of the number of calls. The loss must be the
    mean over a batch, so that the expected gradient does not depend on the batch size.

    Args:
        optimizer: the optimizer to wrap. Without it, call `initialize`.
        world_size: number of workers, by default the size of the process group. Inside a larger
            group, 1 trains each worker independently.
        scale: size of the batch of all workers and passes, in small batches. The default is
            workers x passes: each micro-batch is a small batch.
        smoothing: weight of the past in the moving averages. The default is
            `max(1 - n / 1000, 0)` with n = workers x passes, or `0.999 ** scale` in
            `AdaptiveDataParallel`.
        num_gradients_to_accumulate: backward passes per step, or an `Accumulation`. Detected for
            optimizers prepared by a trainer that `manyhands.integrations` supports. A step with
            fewer than the declared passes is an error. A loop with an `Accumulation` divides losses
            by the passes of a full step, even in a shorter step: the rule multiplies the gradient
            to obtain the mean over the actual passes, and uses their scale.
        is_scaled_loss: whether each pass's loss is divided by the number of passes. If not, call
            `scale_grad_by_num_grads_to_accum()` before `step`.
        debias_ewma: True for moving averages like Adam's; False for the averages of the AdaScale
            paper's appendix B.3. A loaded average stays of the saved kind.
        process_group: the workers that average gradients; all by default.
        grad_scaler: the `torch.amp.GradScaler` in use, required with `unscale_` or with `gain()`
            before `step()`. Otherwise, `scaler.step(optimizer)` provides the loss scale.
        var_floor: lower bound of the averaged noise, 1e-6 by default. If squared gradient norms are
            this small, lower the floor or multiply the loss.
        measure_every: steps per measurement once the averages contain their full memory. The
            default is a sixtieth of the memory in steps, from 4 to 8: 8 with two small batches per
            step, 5 with three. 1 measures every step; this is the default in
            `AdaptiveDataParallel`, and always applies with a `Ramp` or with one pass on one worker.
            Measurements are more frequent where the averages would contain less than 100 small
            batches or four steps.
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
        var_floor: float = VAR_FLOOR,
        measure_every: int | None = None,
    ) -> None:
        self._debias_ewma = flag("debias_ewma", debias_ewma)
        self._var_floor = real("var_floor", var_floor, least=0.0)
        self._measure_every = measure_every  # None: the default for the loop
        if measure_every is not None:
            self._measure_every = whole("measure_every", measure_every, least=1)
        passes, loop = passes_and_loop(num_gradients_to_accumulate)
        batch = Batch(1, passes, None, loop, loss_is_divided=is_scaled_loss)
        batch.check_divided()
        batch.set_smoothing(smoothing)
        if scale is not None:
            batch.set_scale(scale=self._check_own_scale(scale))
        self._core = RuleCore(
            batch,
            world_size=world_size,
            process_group=process_group,
            loss_scale=LossScale(grad_scaler),
        )
        if optimizer is not None:
            self._bind(optimizer)

    def _compared_options(self) -> dict[str, float]:
        """Return the options that must be equal on all ranks."""
        batch = self._core.batch
        scale = batch.scale_for(batch.passes)
        return {
            PASSES: 0 if batch.loop.counts else batch.passes,
            "scale": scale,
            "smoothing": batch.smoothing_for(scale),
            "debias_ewma": float(self._debias_ewma),
            "var_floor": self._var_floor,
            "measure_every": float(self._core.measure_every or 0),
            "number of parameter groups": len(self.param_groups),
        }

    # -- binding to an optimizer -------------------------------------------------------------

    def initialize(
        self, adp: Averager | None, optimizer: Optimizer, patch_optimizer: bool = False
    ) -> None:
        """Bind a rule that was created without an optimizer.

        `adp` is the data-parallel module (ours or torch's DDP). The rule then counts backward
        passes: passes inside `adp.no_sync()` accumulate; the rule divides their sum. With
        `patch_optimizer`, the rule replaces `optimizer.step`, `.zero_grad`, `.state_dict` and
        `.load_state_dict`.
        """
        core = self._core
        if core.inner is not None:
            raise RuntimeError("this rule is bound to an optimizer already; create another rule.")
        if adp is not None:
            if core.batch.loop.decides:
                raise TypeError("the passes are counted: omit num_gradients_to_accumulate.")
            core.batch.loop = CountingLoop(adp)
            core.process_group = core.process_group or getattr(adp, "process_group", None)
        self._bind(optimizer)
        if patch_optimizer:
            core.binding.patch(self)

    def _bind(self, optimizer: Optimizer) -> None:
        core = self._core
        batch = self._core.batch
        check_bindable(optimizer, type(self).__name__, ScaledOptimizer)
        norms = self._make_norm(optimizer)
        prepared = None
        if not batch.loop.counts:
            prepared = find_prepared(optimizer)
        if prepared is not None:
            if prepared.unseen is not None:
                why = f"cannot measure gradients under {prepared.unseen}. Use DDP, FSDP2 or OSS."
                raise TypeError(f"{type(self).__name__} {why}")
            loop = prepared_loop(prepared, batch.passes)
            if loop is not None:
                batch.follow(loop)
            if not core.loss_scale.known:
                core.loss_scale.scaler = prepared.scaler
        group = core.process_group or getattr(optimizer, "group", None)  # such as OSS.group
        params = params_of(optimizer.param_groups)
        core.ranks = rank_group_of(params, group, core.world_size)
        batch.workers = core.ranks.size
        core.measure_every = self._measure_every
        if batch.loop.counts and self._measure_every is None:
            core.measure_every = 1
        core.inner = optimizer
        core.history.factors = (1.0,) * len(optimizer.param_groups)
        try:
            scale = batch.scale_for(batch.passes)
            if not batch.loop.counts:  # otherwise the scale is unknown until the step
                scale = self._check_own_scale(scale)
            self._check_optimizer_supports(scale)
            check_ranks_agree(core.ranks, params, self._compared_options(), "rule")
            core.start(optimizer, norms, self._empty_average(len(optimizer.param_groups)))
        except BaseException:
            core.inner = None
            raise
        core.binding.claim(self)
        if prepared is not None and prepared.optimizer is optimizer:
            core.binding.patch(self)

    def _empty_average(self, groups: int) -> NoiseAverage:
        kind = DebiasedAverage if self._debias_ewma else PaperAverage
        return NoiseAverage(
            groups,
            sqr=kind(),
            var=kind(),
            mix_norm_kinds=self._core.batch.loop.counts,  # as in adaptdl
            var_floor=self._var_floor,
        )

    @property
    def adp(self) -> Averager | None:
        return self._core.batch.loop.module

    def unhook(self) -> None:
        """Stop measuring, and restore the optimizer's methods."""
        self._inner_optimizer()  # raises if there is none
        self._core.measurement.hooks.remove()
        self._core.binding.release()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a parameter group. Its measurement starts with the next backward pass."""
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

    @property
    def port(self) -> LoopPort:
        return LoopPort(self, self._core)

    # -- reading the statistics --------------------------------------------------------------

    def gain(self, pg_idx: int | None = None) -> float:
        """Return the number of small-batch steps that a step is worth (r in AdaScale's paper).

        `pg_idx` selects a parameter group; the default combines all groups. Between `backward` and
        `step`, the result includes the current gradients. Not every rule uses the gain as factor.
        """
        groups = len(self.param_groups)
        if pg_idx is not None and not 0 <= pg_idx < groups:
            raise IndexError(f"pg_idx={pg_idx}, but there are {groups} parameter groups.")
        return self.noise.gain(self.scale, pg_idx)

    @property
    def progress(self) -> float:
        """The equivalent number of small-batch steps: the sum of all gains."""
        return self._core.history.progress

    def set_progress(self, progress: float) -> None:
        """Set the progress, for example after a training phase without the rule."""
        self._core.history.progress = real("progress", progress, least=0.0)

    @property
    def factors(self) -> tuple[float, ...]:
        return self._core.history.factors

    def snapshot(self) -> dict[str, object]:
        """Return the state of the scaling as plain numbers, for logs and `Record`.

        If blocks are inside, their snapshot is included and determines "step" and "workers".
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
        batch = self._core.batch
        passes = "counted" if batch.loop.counts else batch.passes
        return (
            f"{type(self).__name__}(scale={self.scale:g}, workers={batch.workers}, "
            f"passes={passes}, smoothing={self.smoothing:g})\n{self._core.inner!r}"
        )

    # -- scale, accumulation, smoothing ------------------------------------------------------

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Set the size of the full batch to `scale` small batches.

        `update_estimate` is fairscale's and has no effect: the noise is stored at scale 1.
        """
        self._check_between_steps("set_scale()")
        scale = self._check_own_scale(scale)
        if self._core.inner is not None:
            self._check_optimizer_supports(scale)
        self._core.batch.set_scale(scale=scale)

    def set_scale_per_pass(self, scale: float) -> None:
        """Set the size of a pass on all workers together, in small batches.

        The scale is then this number times the passes of each step. It may be less than 1, but not
        the scale of a step of a rule that requires at least 1.
        """
        self._check_between_steps("set_scale_per_pass()")
        batch = self._core.batch
        changed = replace(batch)
        changed.set_scale(per_pass=real("scale", scale, above=0.0))
        if self._core.inner is not None and not batch.loop.counts:
            self._check_batch(changed, batch.passes)
        batch.set_scale(per_pass=changed.scale_per_pass)

    @property
    def smoothing(self) -> float:
        return self._core.batch.smoothing_for(self.scale)

    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Set the number of backward passes per step. Call this method on every worker.

        The default scale follows; after an explicit scale, call `set_scale`. The smoothing changes
        to the default for the new number, unless `update_smoothing=False`.
        """
        core = self._core
        batch = self._core.batch
        if batch.loop.counts:
            raise RuntimeError("AdaptiveDataParallel counts the passes: they cannot be set.")
        if batch.loop.decides:
            raise RuntimeError("the loop controls the number of passes: change it in the loop.")
        passes = whole(PASSES, num_gradients_to_accumulate, least=1, why=PER_STEP)
        self._check_between_steps("set_num_gradients_to_accumulate()")
        if core.inner is not None:
            scale = self._check_batch(replace(batch, passes=passes), passes)
            core.measurement.exchange.announce(passes, scale, core.history.checksum)
        batch.set_smoothing(None if update_smoothing else self.smoothing)
        batch.set_passes(passes)

    # -- saving and loading ------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        """Return the inner optimizer's state dict with the additional entry "manyhands".

        Between the backward passes of a step, this is the state before the step. Arguments are
        passed to the inner optimizer (OSS has `all_ranks`).
        """
        self._inner_optimizer()  # raises if there is none
        state: StateDict = self._core.binding.state_dict(*args, **kwargs)
        state[KEY] = self.scaling_state_dict()
        return state

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore a `state_dict`. The number of workers or passes may have changed.

        `scale=`, `smoothing=` and `set_scale` of this run take precedence. A default scale becomes
        this run's workers x passes. An explicit saved scale is multiplied by the change of workers
        x passes, because the micro-batch stays the same.
        """
        if KEY not in state_dict:
            raise ValueError(
                f"the state dict has no {KEY!r} entry. Load the state of a bare optimizer before "
                "wrapping it."
            )
        state = self.check_scaling_state(state_dict[KEY])
        self._core.binding.load_state_dict(dict(state_dict))
        self.take_scaling_state(state)

    def scaling_state_dict(self) -> StateDict:
        """Return the state of the scaling alone: statistics, progress, scale.

        Use this method if torch.distributed.checkpoint saves `.optimizer` separately.
        """
        inner = self._inner_optimizer()
        core = self._core
        return {
            **_describe_origin(self._norm_kind, inner),
            **core.history.to_state(),
            **core.measurement.to_state(),
            "loss_scale": core.loss_scale.last,
            "batch": core.batch.to_state(),
        }

    def load_scaling_state_dict(self, state_dict: SavedState) -> None:
        """Restore a `scaling_state_dict` without the state of the optimizer."""
        self.take_scaling_state(self.check_scaling_state(state_dict))

    def check_scaling_state(self, saved: SavedState) -> ScalingState:
        """Parse and check the scaling entry of a state dict."""
        self._check_between_steps("load_state_dict()")
        core = self._core
        entry = SavedEntries(saved, "a scaling rule")
        entry.expect(_describe_origin(self._norm_kind, self._inner_optimizer()))
        batch = core.batch.parse_state(entry.part("batch"))
        loss_scale = None
        if entry.has("loss_scale"):
            loss_scale = entry.real("loss_scale", above=0.0, below=SQUARES)
        state = ScalingState(
            batch=batch,
            history=core.history.parse_state(entry),
            measurement=core.measurement.parse_state(entry),
            loss_scale=loss_scale,
        )
        self._check_optimizer_supports(self._check_own_scale(batch.scale_for(batch.passes)))
        return state

    def take_scaling_state(self, state: ScalingState) -> None:
        """Continue from a parsed state."""
        core = self._core
        core.batch.load_state(state.batch)
        core.forget()
        core.measurement.load_state(state.measurement)
        core.loss_scale.last = state.loss_scale
        core.history.load(state.history)
        if core.reporter.observer is not None:
            core.reporter.observer.after_load()


@dataclass(frozen=True)
class ScalingState:
    batch: Batch
    history: History
    measurement: MeasurementState
    loss_scale: float | None


def _describe_origin(norm_kind: str, optimizer: Optimizer) -> dict[str, object]:
    inner = unwrap(optimizer)[-1]  # independent of blocks
    return {
        "version": VERSION,
        "gradients": norm_kind,
        "optimizer": type(plain_optimizer(inner)).__name__,  # independent of sharding
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }
