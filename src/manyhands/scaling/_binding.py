"""How a rule is tied to an optimizer, to a scale and to its ranks.

A bound rule is an optimizer around another one (`_core/wrapper.py`). This base class holds the
inner optimizer, the batch, the options and the noise tracker; `_optimizer.py` adds the step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands._core import amp as _amp
from manyhands._core.agreement import agree, describe_tensors
from manyhands._core.ranks import RankGroup, rank_group_of
from manyhands._core.wrapper import (
    SHARED,
    OptimizerWrapper,
    SharedAttribute,
    YieldingProperty,
    unwrap,
)
from manyhands.scaling._averages import DebiasedAverage, NoiseAverage, PaperAverage, convert_average
from manyhands.scaling._batch import Batch, check_scale, parse_passes
from manyhands.scaling._mean_gradient import StepContext
from manyhands.scaling._noise import VAR_FLOOR, check_var_floor
from manyhands.scaling._noise_tracker import NoiseTracker
from manyhands.scaling._norm_kinds import NormKind, PlainNorm
from manyhands.scaling._options import Option, Options
from manyhands.scaling._tap import Accumulation, GradientTap

PATCHED = ("step", "zero_grad", "state_dict", "load_state_dict", "_step_supports_amp_scaling")


class OptimizerPatch:
    """Makes an optimizer's own methods the rule's, as adaptdl does, until `undo`.

    `optimizer.step()` and `.zero_grad()` become the rule's. So do `state_dict` and
    `load_state_dict`: a loop that steps the optimizer also saves it, and statistics and progress
    belong to what is saved.
    """

    def __init__(self, optimizer: Optimizer, rule: Any) -> None:
        # They become bound methods below: schedulers wrap `optimizer.step.__func__`.
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return rule.step(*args, **kwargs)

        def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            rule.zero_grad(*args, **kwargs)

        def state_dict(_: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return rule.state_dict(*args, **kwargs)

        def load_state_dict(_: Optimizer, state_dict: dict[str, Any]) -> None:
            rule._load_optimizer(state_dict)

        self._attributes = vars(optimizer)
        # a scheduler may have put a `step` of its own on the optimizer before
        self._before = {n: self._attributes[n] for n in PATCHED if n in self._attributes}
        functions = (step, zero_grad, state_dict, load_state_dict)
        methods = (MethodType(function, optimizer) for function in functions)
        self._attributes.update(zip(PATCHED, (*methods, True), strict=True))

    def undo(self) -> None:
        """Give the optimizer its own methods back."""
        for name in PATCHED:
            self._attributes.pop(name, None)
        self._attributes.update(self._before)


class BoundOptimizer(OptimizerWrapper):
    """A rule's ties to the outside. `ScalingRuleBase` documents the arguments."""

    # Shared with the proxies that trainers put around a rule: see `_core/wrapper.py`.
    layer = "rule"
    _progress = SharedAttribute[float]()
    _steps = SharedAttribute[int]()
    _skipped = SharedAttribute[int]()
    _factors = SharedAttribute[tuple[float, ...]]()
    _patch = SharedAttribute[OptimizerPatch | None]()
    _options = SharedAttribute[Options]()
    _min_scale = 0.0
    _norm_kind = "plain"

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
        self._grad_scaler = grad_scaler
        self._model = model
        self._delayed = delayed
        self._options = {
            "debias_ewma": Option(True, debias_ewma, check=bool),
            "floor_each_step": Option(False, floor_each_step, check=bool),
            "var_floor": Option(VAR_FLOOR, var_floor, check=check_var_floor),
            **self._extra_options(),
        }
        passes = parse_passes(num_gradients_to_accumulate)
        self._accumulation = Accumulation(passes, is_scaled_loss)
        self._batch = Batch(passes=passes)
        self._batch.set_smoothing(smoothing)
        if scale is not None:
            self._batch.set_scale(scale=self._check_own_scale(scale))
        self._progress = 0.0
        self._steps = 0
        self._skipped = 0
        self._factors = ()
        self._patch = None
        if optimizer is not None:
            self._bind(optimizer)

    # -- what a rule may override ------------------------------------------------------------

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

    # -- the inner optimizer -----------------------------------------------------------------

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
            self._accumulation = Accumulation(None, False, _averages_next_pass(adp))
            self._batch.counts_passes = True
            self._process_group = self._process_group or getattr(adp, "process_group", None)
            self._model = self._model or adp
        self._bind(optimizer)
        if patch_optimizer:
            self._patch = OptimizerPatch(optimizer, self)

    def _bind(self, optimizer: Optimizer) -> None:
        self._check_bindable(optimizer)
        norms = self._make_norm(optimizer)
        group = self._process_group or getattr(optimizer, "group", None)  # an OSS has one
        params = [param for g in optimizer.param_groups for param in g["params"]]
        self._ranks = rank_group_of(params, group, self._world_size)
        self._batch.workers = self._ranks.size
        self._inner = optimizer
        # These are kept because the optimizer's attributes may be patched to call the rule.
        self._step_inner: Callable[..., Any] = optimizer.step
        self._clear_inner: Callable[..., None] = optimizer.zero_grad
        self._save_inner: Callable[..., dict[str, Any]] = optimizer.state_dict
        self._load_inner: Callable[..., None] = optimizer.load_state_dict
        self._inner_supports_amp = _amp.supports_amp(optimizer)
        self._factors = (1.0,) * len(optimizer.param_groups)
        try:
            scale = self._batch.scale_for(self._batch.passes)
            if not self._batch.counts_passes:  # else the scale is known only at the step
                scale = self._check_own_scale(scale)
            self._check_optimizer_supports(scale)
            self._check_ranks_agree()
            average = NoiseAverage(len(optimizer.param_groups))
            self._start_measuring(norms, self._configure_average(average))
        except BaseException:
            self._inner = None  # so that the mistake can be corrected, and the rule bound again
            raise
        # Found by the next rule that is made around this optimizer. Weak: no cycle.
        vars(optimizer)["_manyhands_rule"] = weakref.ref(self)

    def _check_bindable(self, optimizer: Optimizer) -> None:
        """Raise if this is no optimizer, or one that another rule wraps already."""
        rule = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{rule} wraps a torch.optim.Optimizer, got {type(optimizer).__name__}: write "
                f"{rule}(SGD(parameters, lr=...))."
            )
        for each in unwrap(optimizer):
            if isinstance(each, BoundOptimizer):
                raise TypeError(
                    f"{rule} got an optimizer that {type(each).__name__} wraps already. One rule "
                    "decides the learning rate: wrap the bare optimizer once."
                )
        other = vars(optimizer).get("_manyhands_rule", lambda: None)()
        if other is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} is wrapped by a {type(other).__name__} already. "
                "Use that one, or call its unhook() first."
            )

    def _configure_average(self, average: NoiseAverage) -> NoiseAverage:
        """Return the average with the settings that the options ask for."""
        value = {name: option.value for name, option in self._options.items()}
        kind = DebiasedAverage if value["debias_ewma"] else PaperAverage
        smoothing = self._batch.smoothing_for(self._batch.scale_for(self._batch.passes))
        return replace(
            average,
            sqr=convert_average(average.sqr, kind, smoothing),
            var=convert_average(average.var, kind, smoothing),
            floor_each_step=value["floor_each_step"],
            mix_norm_kinds=self._batch.counts_passes,  # adaptdl mixes them
            var_floor=value["var_floor"],
        )

    def _start_measuring(self, norms: NormKind, average: NoiseAverage) -> None:
        rule = weakref.proxy(self)  # the tap must not keep `self` alive
        device = next(p.device for g in self._inner_optimizer.param_groups for p in g["params"])
        tap = GradientTap(
            self._inner_optimizer.param_groups,
            self._ranks.with_own_group(device),
            norms,
            self._accumulation,
            context=lambda passes: rule._step_context(passes),
            join_averaging=getattr(self._inner_optimizer, "join_in", lambda: None),
            compare_at_scale_1=self._batch.counts_passes,
            model=self._model,
        )
        self._noise_tracker = NoiseTracker(
            tap,
            average,
            smoothing=self._batch.smoothing_for,
            scaler_known=self._grad_scaler is not None,
            delayed=self._delayed,
        )

    def _step_context(self, passes: int) -> StepContext:
        """Return what the tap cannot know about a step of so many passes."""
        return StepContext(
            scale=self._batch.scale_for(passes),
            checksum=self._checksum(),
            micro_batch=float(getattr(self.adp, "leading_dimension", None) or 0),
            loss_scale=_amp.loss_scale_of(self._grad_scaler),
        )

    def _checksum(self) -> float:
        """Return a number that differs between ranks if their statistics or factors do."""
        average = self._tracker.average
        factors = sum(self._factors)
        return self._progress + sum(average.raw_sqr) + sum(average.raw_var) + factors

    def _check_ranks_agree(self) -> None:
        groups = self._inner_optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        scale = self._batch.scale_for(self._batch.passes)
        claims = {
            "num_gradients_to_accumulate": float(self._accumulation.declared or 0),
            "scale": scale,
            "smoothing": self._batch.smoothing_for(scale),
            **{
                name: -1.0 if option.value is None else float(option.value)
                for name, option in self._options.items()
            },
            "number of parameter groups": float(len(groups)),
            "number of parameters": float(len(params)),
            "number of elements": float(sum(param.numel() for param in params)),
        }
        if not params:
            raise ValueError("the optimizer has no parameters: every group is empty.")
        facts = {**claims, "parameters": describe_tensors(params)}
        agree(self._ranks, facts, "Build the same model, optimizer and rule on every rank.")

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

    def unhook(self) -> None:
        """Stop measuring the parameters, and give the optimizer back as it was."""
        optimizer = self._inner_optimizer
        self._tracker.tap.unhook()
        vars(optimizer).pop("_manyhands_rule", None)
        if self._patch is not None:
            self._patch.undo()
            self._patch = None

    # -- as an Optimizer ---------------------------------------------------------------------

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
        self._tracker.tap.norms.refresh()
        self._tracker.tap.hook(groups)
        self._tracker.average = self._tracker.average.with_groups(len(groups))
        self._factors += (1.0,)

    def _check_parameter_groups(self) -> None:
        if len(self.param_groups) != self._tracker.average.groups:
            raise RuntimeError(
                f"the inner optimizer has {len(self.param_groups)} parameter groups, of which "
                f"{self._tracker.average.groups} are measured. Add groups through the wrapper: "
                f"{type(self).__name__}.add_param_group(...)."
            )

    def __repr__(self) -> str:
        if self._inner is None:
            return f"{type(self).__name__}()"
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})\n{self._inner!r}"

    def _settings(self) -> dict[str, Any]:
        """Return the settings that `repr` shows."""
        return {
            "scale": f"{self.scale:g}",
            "workers": self._ranks.size,
            "passes": self._accumulation.declared or "counted",
            "smoothing": f"{self.smoothing:g}",
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundOptimizer:
        """Return a copy around a copy of the optimizer (and its parameters, if not in `memo`)."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        # Left out: what belongs to the inner optimizer or the tap, and is made anew below. `step`
        # is a scheduler's: it leaves a wrapper that is bound to the original optimizer.
        remade = {"_inner", "_noise_tracker", "_step_inner", "_clear_inner", "step", "adp"}
        remade |= {"_save_inner", "_load_inner"}
        vars(twin).update({k: v for k, v in vars(self).items() if k not in remade})
        vars(twin)[SHARED] = dict(vars(self)[SHARED])
        twin._inner, twin.adp = copy.deepcopy(self._inner, memo), copy.deepcopy(self.adp, memo)
        twin._model = twin.adp  # only fully_shard's modules are searched, and none can be copied
        twin._accumulation, twin._batch = copy.copy(self._accumulation), copy.copy(self._batch)
        twin._options = dict(self._options)
        if twin.adp is not None:
            twin._accumulation.averages_next_pass = _averages_next_pass(twin.adp)
        if twin._inner is not None:
            twin._step_inner, twin._clear_inner = twin._inner.step, twin._inner.zero_grad
            twin._save_inner = twin._inner.state_dict
            twin._load_inner = twin._inner.load_state_dict
            twin._start_measuring(twin._make_norm(twin._inner), self._tracker.average)
            twin._tracker.copy_from(self._tracker)
            vars(twin._inner)["_manyhands_rule"] = weakref.ref(twin)
            if self._patch is not None:
                twin._patch = OptimizerPatch(twin._inner, twin)
        return twin

    def __copy__(self) -> BoundOptimizer:
        """Return another object with the same attributes: everything is shared."""
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin

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
            return self._tracker.tap.step.passes or self._batch.passes
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
            self._tracker.tap.mean.announce(passes, scale, self._checksum())
        self._batch.set_smoothing(None if update_smoothing else self.smoothing)
        self._accumulation.declared = self._batch.passes = passes

    def _check_between_steps(self, what: str) -> None:
        if self._inner is not None:
            self._tracker.tap.check_between_steps(what)

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


def _averages_next_pass(adp: Any) -> Callable[[], bool]:
    """Return a function that says whether the module averages the gradients of a pass now."""
    return lambda: bool(adp.require_backward_grad_sync)
