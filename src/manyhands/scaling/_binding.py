"""How a rule is tied to an optimizer, a scale and its workers.

The bound rule is an optimizer around another (`_core/wrapper.py`).
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
from manyhands._core.agreement import check_same_tensors
from manyhands._core.ranks import RankGroup, rank_group_of
from manyhands._core.wrapper import SHARED, OptimizerWrapper, Shared, YieldingProperty, unwrap
from manyhands.scaling._averages import Debiased, NoiseAverage, PaperAverage, converted
from manyhands.scaling._batch import Batch, checked_passes, checked_scale
from manyhands.scaling._noise import VAR_FLOOR, checked_var_floor
from manyhands.scaling._noise_tracker import NoiseTracker
from manyhands.scaling._norm_kinds import Norms, Plain
from manyhands.scaling._options import Option, Options
from manyhands.scaling._tap import Accumulation, GradientTap

NAMES = ("step", "zero_grad", "state_dict", "load_state_dict", "_step_supports_amp_scaling")


class OptimizerPatch:
    """`optimizer.step()` is `rule.step()` from now on, until `undo`."""

    def __init__(self, optimizer: Optimizer, rule: Any) -> None:
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return rule.step(*args, **kwargs)

        def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            rule.zero_grad(*args, **kwargs)

        def state_dict(_: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return rule.state_dict(*args, **kwargs)

        def load_state_dict(_: Optimizer, state_dict: dict[str, Any]) -> None:
            rule._load_optimizer(state_dict)

        self._of = vars(optimizer)
        self._before = {name: self._of[name] for name in NAMES if name in self._of}
        functions = (step, zero_grad, state_dict, load_state_dict)
        patched = (MethodType(function, optimizer) for function in functions)
        self._of.update(zip(NAMES, (*patched, True), strict=True))

    def undo(self) -> None:
        for name in NAMES:
            self._of.pop(name, None)
        self._of.update(self._before)


class BoundOptimizer(OptimizerWrapper):
    """A rule's ties: see `ScalingRuleBase` for the arguments."""

    _progress = Shared[float]()
    _steps = Shared[int]()
    _skipped = Shared[int]()
    _factors = Shared[tuple[float, ...]]()
    _patch = Shared[OptimizerPatch | None]()
    _options = Shared[Options]()
    _smallest_scale = 0.0
    _gradients = "plain"

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
        self._inner: Optimizer | None = None
        self._workers = RankGroup()
        self.adp: Any = None
        self._world_size = world_size
        self._process_group = process_group
        self._grad_scaler = grad_scaler
        self._model = model
        self._delayed = delayed
        self._options = {
            "debias_ewma": Option(True, debias_ewma, check=bool),
            "floor_each_step": Option(False, floor_each_step, check=bool),
            "var_floor": Option(VAR_FLOOR, var_floor, check=checked_var_floor),
            **self._own_options(),
        }
        passes = checked_passes(num_gradients_to_accumulate)
        self._accumulation = Accumulation(passes, is_scaled_loss)
        self._batch = Batch(passes=passes)
        self._batch.say_smoothing(smoothing)
        if scale is not None:
            self._batch.say_scale(scale=self._checked_scale(scale))
        self._progress = 0.0
        self._steps = 0
        self._skipped = 0
        self._factors = ()
        self._patch = None
        if optimizer is not None:
            self._bind(optimizer)

    def _own_options(self) -> Options:
        """The options that this rule adds, to be saved and loaded with the others."""
        return {}

    def _use_options(self) -> None:
        """Options were loaded: hand them to whoever has a copy."""

    def _started(self, average: NoiseAverage) -> NoiseAverage:
        """An average as the options want it."""
        value = {name: option.value for name, option in self._options.items()}
        kind = Debiased if value["debias_ewma"] else PaperAverage
        smoothing = self._batch.smoothing_at(self._batch.scale_of(self._batch.passes))
        return replace(
            average,
            sqr=converted(average.sqr, kind, smoothing),
            var=converted(average.var, kind, smoothing),
            floor_each_step=value["floor_each_step"],
            mix_units=self._batch.counted,  # as adaptdl's averages do
            var_floor=value["var_floor"],
        )

    # -- the inner optimizer -----------------------------------------------------------------

    def initialize(self, adp: Any, optimizer: Optimizer, patch_optimizer: bool = False) -> None:
        """Bind a rule that was made without an optimizer.

        `adp` is the data-parallel module (ours or torch's DDP): backward passes are then
        counted, those inside its `no_sync()` accumulate, and the sum is divided here. With
        `patch_optimizer`, `optimizer.step`, `.zero_grad`, `.state_dict` and `.load_state_dict`
        become the rule's.
        """
        if self._inner is not None:
            raise RuntimeError("this rule is bound to an optimizer already; make another one.")
        if adp is not None:
            if not hasattr(adp, "require_backward_grad_sync"):
                raise TypeError(
                    f"{type(adp).__name__} does not say which passes are inside no_sync(), by "
                    "which they are counted. Write AdaptiveDataParallel(model, optimizer, rule)."
                )
            self.adp = adp
            self._accumulation = Accumulation(None, False, _synchronised(adp))
            self._batch.counted = True
            self._process_group = self._process_group or getattr(adp, "process_group", None)
            self._model = self._model or adp
        self._bind(optimizer)
        if patch_optimizer:
            self._patch = OptimizerPatch(optimizer, self)

    def _bind(self, optimizer: Optimizer) -> None:
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
        norms = self._norms(optimizer)
        group = self._process_group or getattr(optimizer, "group", None)  # an OSS has one
        params = [param for g in optimizer.param_groups for param in g["params"]]
        self._workers = rank_group_of(params, group, self._world_size)
        self._batch.workers = self._workers.size
        self._inner = optimizer
        self._step_inner: Callable[..., Any] = optimizer.step
        self._clear_inner: Callable[..., None] = optimizer.zero_grad
        self._save_inner: Callable[..., dict[str, Any]] = optimizer.state_dict
        self._load_inner: Callable[..., None] = optimizer.load_state_dict
        self._inner_heeds_scaler = _amp.supports_amp(optimizer)
        self._factors = (1.0,) * len(optimizer.param_groups)
        try:
            scale = self._batch.scale_of(self._batch.passes)
            self._check_optimizer_takes(
                scale if self._batch.counted else self._checked_scale(scale)
            )
            self._check_workers_agree()
            self._listen(norms, self._started(NoiseAverage(len(optimizer.param_groups))))
        except BaseException:
            self._inner = None
            raise
        vars(optimizer)["_manyhands_rule"] = weakref.ref(self)

    def _norms(self, optimizer: Optimizer) -> Norms:
        """How this rule measures a gradient."""
        return Plain()

    def _check_optimizer_takes(self, scale: float) -> None:
        """Raise where this rule cannot scale this optimizer that far."""

    def _listen(self, norms: Norms, average: NoiseAverage) -> None:
        scaler, batch = self._grad_scaler, self._batch
        rule = weakref.proxy(self)  # the tap must not keep `self` alive
        device = next(p.device for g in self._inner_optimizer.param_groups for p in g["params"])
        tap = GradientTap(
            self._inner_optimizer.param_groups,
            self._workers.with_own_group(device),
            norms,
            self._accumulation,
            scale=batch.scale_of,
            history=lambda: rule._history(),
            micro_batch=lambda: rule._micro_batch(),
            loss_scale=lambda: _amp.loss_scale_of(scaler),
            difference_at_scale_1=batch.counted,
            join_in=getattr(self._inner_optimizer, "join_in", lambda: None),
            model=self._model,
        )
        self._noise_meter = NoiseTracker(
            tap,
            average,
            smoothing=batch.smoothing_at,
            scaler_known=scaler is not None,
            delayed=self._delayed,
        )

    def _history(self) -> float:
        """A number that differs where workers have different steps behind them."""
        average = self._meter.average
        factors = sum(self._factors)
        return self._progress + sum(average.raw_sqr) + sum(average.raw_var) + factors

    def _micro_batch(self) -> float:
        """The samples in this rank's first training input; 0 where that is not known."""
        return float(getattr(self.adp, "leading_dimension", None) or 0)

    def _check_workers_agree(self) -> None:
        groups = self._inner_optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        scale = self._batch.scale_of(self._batch.passes)
        mine = {
            "num_gradients_to_accumulate": float(self._accumulation.declared or 0),
            "scale": scale,
            "smoothing": self._batch.smoothing_at(scale),
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
        self._workers.check_equal("optimizer and rule", mine, self._workers.any_device)
        check_same_tensors("optimizer and rule", self._workers, {"parameter": params})

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
    def _meter(self) -> NoiseTracker:
        if self._inner is None:
            _ = self._inner_optimizer  # raises
        return self._noise_meter

    def unhook(self) -> None:
        """Stop listening to the parameters, and give the optimizer back as it was."""
        optimizer = self._inner_optimizer
        self._meter.tap.unhook()
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
            self._check_optimizer_takes(self.scale)
        except ValueError:
            groups.pop()
            raise
        self._meter.tap.norms.refresh()
        self._meter.tap.hook(groups)
        self._meter.average = self._meter.average.with_groups(len(groups))
        self._factors += (1.0,)

    def _check_parameter_groups(self) -> None:
        if len(self.param_groups) != self._meter.average.groups:
            raise RuntimeError(
                f"the inner optimizer has {len(self.param_groups)} parameter groups, of which "
                f"{self._meter.average.groups} are measured. Add groups through the wrapper: "
                f"{type(self).__name__}.add_param_group(...)."
            )

    def __repr__(self) -> str:
        if self._inner is None:
            return f"{type(self).__name__}()"
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})\n{self._inner!r}"

    def _settings(self) -> dict[str, Any]:
        """What `repr` shows."""
        return {
            "scale": f"{self.scale:g}",
            "workers": self._workers.size,
            "passes": self._accumulation.declared or "counted",
            "smoothing": f"{self.smoothing:g}",
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundOptimizer:
        """A copy around a copy of the optimizer (and of the parameters, unless in `memo`)."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        # A scheduler leaves a `step` on its optimizer that is bound to it.
        left = {"_inner", "_noise_meter", "_step_inner", "_clear_inner", "step", "adp"}
        left |= {"_save_inner", "_load_inner"}
        vars(twin).update({k: v for k, v in vars(self).items() if k not in left})
        vars(twin)[SHARED] = dict(vars(self)[SHARED])
        twin._inner, twin.adp = copy.deepcopy(self._inner, memo), copy.deepcopy(self.adp, memo)
        twin._model = twin.adp  # only fully_shard's modules are looked for, and none is copied
        twin._accumulation, twin._batch = copy.copy(self._accumulation), copy.copy(self._batch)
        twin._options = dict(self._options)
        if twin.adp is not None:
            twin._accumulation.synchronised = _synchronised(twin.adp)
        if twin._inner is not None:
            twin._step_inner, twin._clear_inner = twin._inner.step, twin._inner.zero_grad
            twin._save_inner, twin._load_inner = (
                twin._inner.state_dict,
                twin._inner.load_state_dict,
            )
            twin._listen(twin._norms(twin._inner), self._meter.average)
            twin._meter.continue_from(self._meter)
            vars(twin._inner)["_manyhands_rule"] = weakref.ref(twin)
            if self._patch is not None:
                twin._patch = OptimizerPatch(twin._inner, twin)
        return twin

    def __copy__(self) -> BoundOptimizer:
        """The same optimizer under another name: everything is shared."""
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin

    # -- scale, accumulation, smoothing ------------------------------------------------------

    @property
    def scale(self) -> float:
        """Size of the whole batch in small batches."""
        return self._batch.scale_of(self.passes)

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Say that the batch is now `scale` small batches.

        The noise is kept at scale 1, so the gain is right at once, whatever
        `update_estimate` says: it is accepted for fairscale's callers.
        """
        self._check_between_steps("set_scale()")
        scale = self._checked_scale(scale)
        if self._inner is not None:
            self._check_optimizer_takes(scale)
        self._batch.say_scale(scale=scale)

    def set_scale_per_pass(self, scale: float) -> None:
        """Say how many small batches one pass is on all workers together.

        The scale is then that times the passes, however many there are in a step. One pass may be
        less than a small batch; a whole step may not, where a rule needs that.
        """
        self._check_between_steps("set_scale_per_pass()")
        whole = replace(self._batch)
        whole.say_scale(per_pass=checked_scale(scale, 0.0, "one pass"))
        if self._inner is not None and not self._batch.counted:  # else `step` knows the passes
            self._check_scale(whole, self._batch.passes)
        self._batch.say_scale(per_pass=whole.scale_per_pass)

    @property
    def passes(self) -> int:
        """Backward passes of a step: declared, or counted in the step under way."""
        if self._batch.counted and self._inner is not None:
            return self._meter.tap.passes or self._batch.passes
        return self._batch.passes

    @property
    def smoothing(self) -> float:
        """The weight of the past in the averages."""
        return self._batch.smoothing_at(self.scale)

    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Say how many backward passes make a step from now on.

        To be called on every worker. The default scale follows. A scale that was given stays:
        `set_scale` it as well.
        The smoothing becomes the default for that number; `update_smoothing=False` keeps it.
        """
        if self._batch.counted:
            raise RuntimeError(
                "with a data-parallel module the passes are counted, not declared: run all but "
                "the step's last one inside its no_sync()."
            )
        passes = checked_passes(num_gradients_to_accumulate)
        self._check_between_steps("set_num_gradients_to_accumulate()")
        if self._inner is not None:
            scale = self._check_scale(self._batch, passes)
            self._meter.tap.mean.announce(passes, scale, self._history())
        self._batch.say_smoothing(None if update_smoothing else self.smoothing)
        self._accumulation.declared = self._batch.passes = passes

    def _check_between_steps(self, what: str) -> None:
        if self._inner is not None:
            self._meter.tap.check_between_steps(what)

    def _checked_scale(self, scale: float, how: str = "") -> float:
        return checked_scale(scale, self._smallest_scale, type(self).__name__, how)

    def _check_scale(self, batch: Batch, passes: int) -> float:
        """The scale of a step of so many passes, if rule and optimizer can work with it."""
        per_pass = batch.scale_per_pass
        how = "" if per_pass is None else f" ({passes} pass(es) of {per_pass})"
        scale = self._checked_scale(batch.scale_of(passes), how)
        if self._inner is not None:
            self._check_optimizer_takes(scale)
        return scale


def _synchronised(adp: Any) -> Callable[[], bool]:
    return lambda: bool(adp.require_backward_grad_sync)
