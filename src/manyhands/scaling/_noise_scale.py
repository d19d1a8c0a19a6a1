"""Measure the noise scale of any training loop, and change nothing in it."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core import amp as _amp
from manyhands._core.agreement import check_same_tensors
from manyhands._core.ranks import rank_group_of
from manyhands.scaling._averages import is_finite
from manyhands.scaling._batch import checked_passes, checked_smoothing
from manyhands.scaling._noise import estimate
from manyhands.scaling._norm_kinds import Plain
from manyhands.scaling._options import Option, Options, explained, saved, with_found
from manyhands.scaling._state import fitting
from manyhands.scaling._step_stats import StepStats
from manyhands.scaling._tap import Accumulation, GradientTap

VERSION = 1


@dataclass(frozen=True)
class _Moments:
    """Weighted means of (sqr, var), of their squares and product, and of the weights' squares."""

    weight: float = 0.0
    squared_weight: float = 0.0
    sqr: float = 0.0
    var: float = 0.0
    sqr_sqr: float = 0.0
    var_var: float = 0.0
    sqr_var: float = 0.0

    def after(self, sqr: float, var: float, smoothing: float) -> _Moments:
        new = 1.0 - smoothing

        def mix(old: float, value: float) -> float:
            return smoothing * old + new * value

        return _Moments(
            mix(self.weight, 1.0),
            smoothing**2 * self.squared_weight + new**2,
            mix(self.sqr, sqr),
            mix(self.var, var),
            mix(self.sqr_sqr, sqr * sqr),
            mix(self.var_var, var * var),
            mix(self.sqr_var, sqr * var),
        )

    def of_batches(self, factor: float) -> _Moments:
        """The same measurement with the noise of batches `factor` times as large."""
        return replace(
            self,
            var=self.var / factor,
            var_var=self.var_var / factor**2,
            sqr_var=self.sqr_var / factor,
        )


class NoiseScale:
    """The gradient noise scale of a training loop: how large a batch would still pay.

    Add one line; the loop stays as it is. Works with any optimizer, alone or under DDP:

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> noise = mh.NoiseScale(optimizer, batch_size=16)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     x = torch.randn(16, 4)
    ...     (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
    ...     optimizer.step()
    >>> noise.noise_scale > 0 and noise.standard_error > 0
    True

    `noise_scale` is trace(covariance) / |gradient|^2 (McCandlish et al. 2018, "simple noise
    scale"): the batch size, in samples, at which noise and signal are equal. Well below it a
    larger batch saves steps almost in proportion; well above it saves nothing. With one worker
    and no accumulation consecutive gradients are compared, at the price of a copy of the
    gradient; the estimate then takes the change of the parameters between them for noise.

    Args:
        parameters: an optimizer, whose steps are then watched (with closures, too), or the
            parameters to measure, of which every backward pass is taken to be followed by a step.
        batch_size: samples in one worker's backward pass; the unit is that batch if left out.
        num_gradients_to_accumulate: backward passes before each step, each of a loss divided
            by that number (`is_scaled_loss=False`: not divided). With more or fewer passes, a
            warning says so and the step is left out.
        smoothing: weight of the past, 0.99 by default.
        process_group: the workers that share gradients; all, by default. Make one on each.
        grad_scaler: the `GradScaler` in use: needed if its scale changes.
        model: the module that `fully_shard` was called on. It is found without, except after
            `gc.freeze()`.
    """

    def __init__(
        self,
        parameters: Optimizer | Iterable[Tensor],
        *,
        batch_size: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        smoothing: float | None = None,
        process_group: Any = None,
        grad_scaler: Any = None,
        model: nn.Module | None = None,
    ) -> None:
        self._options: Options = {
            "batch_size": Option(None, batch_size, check=_checked_batch_size),
            "smoothing": Option(0.99, smoothing, check=checked_smoothing),
        }
        passes = checked_passes(num_gradients_to_accumulate)
        optimizer = parameters if isinstance(parameters, Optimizer) else None
        groups = optimizer.param_groups if optimizer else [{"params": list(parameters)}]  # type: ignore[arg-type]
        params = [param for group in groups for param in group["params"]]
        if not params:
            raise ValueError("no parameters to measure: the iterable was empty.")
        self._params = params
        self._moments = _Moments()
        self._differenced = False  # whether the moments are of consecutive gradients
        self._flight: StepStats | None = None
        self._steps = 0
        self._nonfinite = 0
        self._warned = False
        self._stop_watching: Callable[[], Any] | None = None
        workers = rank_group_of(params, process_group or getattr(optimizer, "group", None))
        mine = {"num_gradients_to_accumulate": passes, "number of parameters": len(params)}
        workers.check_equal("NoiseScale", mine, workers.any_device)
        check_same_tensors("NoiseScale", workers, {"parameter": params})
        self._workers = workers
        me, watched = weakref.proxy(self), optimizer is not None
        self._tap = GradientTap(
            groups,
            workers.with_own_group(params[0].device),
            Plain(),
            Accumulation(passes, is_scaled_loss),
            scale=lambda passes: float(passes * workers.size),
            loss_scale=lambda: _amp.loss_scale_of(grad_scaler),
            on_sample=lambda sample: None if watched else me._receive(sample),
            on_excess=lambda message: me._spoilt(message),
            join_in=getattr(optimizer, "join_in", lambda: None),
            model=model,
        )
        if optimizer is not None:  # a backward that no step follows then leaves no trace
            hook = optimizer.register_step_pre_hook(lambda *call: me._about_to_step(*call))
            self._stop_watching = weakref.finalize(self, hook.remove)

    def _about_to_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's `step` was called with these arguments, itself the first of them.

        A closure makes the gradients inside it, as Lightning's does: it is replaced by itself
        with a look at what it has made.
        """
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._observed(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._observed(args[1]), *args[2:]), kwargs
        self._step()
        return None

    def _observed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, of which the first call makes the step's gradients."""
        mine, first = weakref.ref(self), True

        def observed() -> Any:
            nonlocal first
            me = mine()
            if me is None:
                return closure()
            if first:
                first = False
                result = closure()
                me._step()
                return result
            me._tap.paused = True  # LBFGS evaluates again: these are not new samples
            try:
                return closure()
            finally:
                me._tap.paused = False

        return observed

    def _step(self) -> None:
        """The optimizer is about to step along the gradients that were measured."""
        tap = self._tap
        if tap.sample is None and self._workers.size > 1 and tap.hooked:
            tap.complete_now()  # the others may have used parameters that we did not
        elif tap.sample is None and tap.passes > 0:
            self._say(_too_few(tap.passes, tap.accumulation.declared))
        if tap.passes == 0 and not self._warned and tap.moved:
            self._say("parameters were moved or converted. Make a NoiseScale after that.")
        if tap.problem is not None:
            self._spoilt(tap.problem)
        if tap.sample is not None:
            self._receive(tap.sample)
        tap.stepped()

    def _spoilt(self, problem: str) -> None:
        """Leave out the step under way."""
        self._tap.clear()
        self._say(problem)

    def _say(self, problem: str) -> None:
        """Measuring must not stop a training run: say it once."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"NoiseScale leaves a step out: {problem}", stacklevel=2)

    def _receive(self, sample: StepStats) -> None:
        """Take in the last step's numbers, which have arrived long since; these are next."""
        self._land()
        sample.start_copy()
        self._flight = sample
        self._tap.mean.difference.remember()

    def _land(self) -> None:
        sample, self._flight = self._flight, None
        reading = sample.read()[0] if sample is not None else None
        if sample is None:
            return
        if sample.nobody_ready and sample.seen:
            self._say(_too_few(int(sample.seen), sample.passes))
        if reading is None or sample.nobody_ready:
            return
        if not is_finite(reading):
            self._nonfinite += 1
            return
        if self._differenced and not reading.differenced:  # a better measure: start anew
            self._moments, self._steps = _Moments(), 0
        self._differenced = reading.differenced
        new, smoothing = estimate(reading), self._options["smoothing"].value
        self._moments = self._moments.after(sum(new.sqr), sum(new.var), smoothing)
        self._steps += 1

    @property
    def _batch_size(self) -> float:
        return float(self._options["batch_size"].value or 1.0)

    @property
    def steps(self) -> int:
        """Steps measured."""
        self._land()
        return self._steps

    @property
    def nonfinite(self) -> int:
        """Steps left out because a gradient was not finite."""
        self._land()
        return self._nonfinite

    @property
    def squared_norm(self) -> float:
        """|true gradient|^2; NaN before the first measurement."""
        return self._moments.sqr / self._moments.weight if self.steps else math.nan

    @property
    def variance(self) -> float:
        """Trace of the covariance of one worker's micro-batch gradient."""
        return self._moments.var / self._moments.weight if self.steps else math.nan

    @property
    def noise_scale(self) -> float:
        """variance / |gradient|^2 in samples; infinite where no signal shows, NaN before."""
        sqr, var = self.squared_norm, self.variance
        if math.isnan(sqr):
            return math.nan
        return self._batch_size * max(var, 0.0) / sqr if sqr > 0.0 else math.inf

    @property
    def standard_error(self) -> float:
        """Of `noise_scale`, from the scatter of the steps' estimates (taken as independent)."""
        sqr, var, moments = self.squared_norm, self.variance, self._moments
        if self.steps < 2 or not sqr > 0.0:
            return math.nan if self.steps < 2 else math.inf
        w = moments.weight
        ratio = var / sqr
        scatter = (
            moments.var_var / w
            - var * var
            - 2.0 * ratio * (moments.sqr_var / w - sqr * var)
            + ratio * ratio * (moments.sqr_sqr / w - sqr * sqr)
        )
        effective = w * w / moments.squared_weight
        return self._batch_size * math.sqrt(max(scatter, 0.0) / max(effective - 1.0, 1e-9)) / sqr

    def one_sample(self) -> AbstractContextManager[None]:
        """Several backward passes inside are of the same samples (see `AdaScale.one_sample`)."""
        return self._tap.one_sample()

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int) -> None:
        """Say how many backward passes make a step from now on.

        To be called on every worker, between two steps.
        """
        passes = checked_passes(num_gradients_to_accumulate)
        self._tap.check_between_steps("set_num_gradients_to_accumulate()")
        self._tap.mean.announce(passes, float(passes * self._workers.size), 0.0)
        self._tap.accumulation.declared = passes

    def state_dict(self) -> dict[str, Any]:
        """The measurement so far, for `load_state_dict` or `mh.save(path, noise=noise)`."""
        self._land()
        return {
            "version": VERSION,
            "shapes": [list(param.shape) for param in self._params],
            "options": saved(self._options),
            "moments": asdict(self._moments),
            "differenced": self._differenced,
            "steps": self._steps,
            "nonfinite": self._nonfinite,
            "previous": list(self._tap.mean.difference.previous),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; on every worker, of which there may be another number.

        `batch_size` and `smoothing` are taken from it unless they were given; where they were and
        differ, a warning says so.
        """
        self._tap.check_between_steps("load_state_dict()")
        shapes = [list(param.shape) for param in self._params]
        if state_dict.get("version") != VERSION or state_dict.get("shapes") != shapes:
            raise ValueError(
                "the state dict is of other parameters, or not of a NoiseScale of version "
                f"{VERSION}. Make the NoiseScale around the same ones."
            )
        try:
            options, changes = with_found(self._options, state_dict["options"])
            moments = _Moments(**{k: float(v) for k, v in state_dict["moments"].items()})
            differenced = bool(state_dict["differenced"])
            steps, nonfinite = int(state_dict["steps"]), int(state_dict["nonfinite"])
            previous = fitting(state_dict["previous"], self._params)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the state dict is damaged: {error!r}.") from error
        here, there = options["batch_size"].value, options["batch_size"].found
        if there is not None:
            moments = moments.of_batches(here / there)
        self._tap.clear()
        self._flight = None
        self._tap.mean.difference.previous = self._tap.placed(previous)
        self._options, self._moments, self._differenced = options, moments, differenced
        self._steps, self._nonfinite = steps, nonfinite
        if changes:
            warnings.warn(explained(changes, "NoiseScale"), stacklevel=2)

    def snapshot(self) -> dict[str, Any]:
        """The measurement in plain numbers, for `Record`."""
        scale, error = self.noise_scale, self.standard_error
        return {
            "simple_noise_scale": scale if math.isfinite(scale) else None,
            "simple_noise_scale_error": error if math.isfinite(error) else None,
        }

    def unhook(self) -> None:
        """Stop measuring."""
        self._tap.unhook()
        if self._stop_watching is not None:
            self._stop_watching()

    def __repr__(self) -> str:
        known = self._options["batch_size"].value is not None
        unit = "samples" if known else "small batches"
        return (
            f"NoiseScale({self.noise_scale:.4g} ± {self.standard_error:.2g} {unit}, "
            f"{self.steps} steps)"
        )


def _too_few(passes: int, declared: int | None) -> str:
    return (
        f"step() after {passes} of {declared} backward passes. Where every step has so many, say "
        f"so: num_gradients_to_accumulate={passes}, or set_num_gradients_to_accumulate({passes})."
    )


def _checked_batch_size(batch_size: float) -> float:
    if not batch_size > 0:
        raise ValueError(f"batch_size must be above 0, got {batch_size}.")
    return batch_size
