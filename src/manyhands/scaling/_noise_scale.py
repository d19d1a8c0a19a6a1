"""Measure the gradient noise scale of a training loop without changing the training.

The norms are measured as for scaling rules (`_step.py`). The standard error follows from the
averaged squares and product of the estimates of |true gradient|^2 and noise.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from manyhands._arguments import explained, real, whole
from manyhands._optimizers.foreign import find_prepared
from manyhands._optimizers.state_parts import BELOW, SavedEntries, SavedState
from manyhands._optimizers.wrappers import LossScale, LossScaler, params_of, unwrap
from manyhands._ranks.ranks import rank_group_of
from manyhands._warn import warn
from manyhands.scaling._batch import (
    PASSES,
    PER_STEP,
    Accumulation,
    Batch,
    check_smoothing,
)
from manyhands.scaling._binding import check_ranks_agree
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._noise import estimate
from manyhands.scaling._payload import SentStep
from manyhands.scaling._port import passes_and_loop, prepared_loop
from manyhands.scaling._step import Measurement

VERSION = 3  # of the state dict
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class NoiseMoments:
    """Weighted means of sqr, var, their squares and product; sums of the weights."""

    weight: float = 0.0
    squared_weight: float = 0.0
    sqr: float = 0.0
    var: float = 0.0
    sqr_sqr: float = 0.0
    var_var: float = 0.0
    sqr_var: float = 0.0

    @classmethod
    def of_saved(cls, saved: SavedEntries, steps: int) -> NoiseMoments:
        moments = {}
        least = 1e-32 if steps else 0.0
        for each in fields(cls):
            if each.name in ("weight", "squared_weight"):
                moments[each.name] = saved.real(each.name, least, below=1.001)
            else:
                moments[each.name] = saved.real(each.name, -math.inf, below=math.inf)
        return cls(**moments)

    def add(self, sqr: float, var: float, smoothing: float) -> NoiseMoments:
        new = 1.0 - smoothing

        def mix(old: float, value: float) -> float:
            return smoothing * old + new * value

        return NoiseMoments(
            mix(self.weight, 1.0),
            smoothing**2 * self.squared_weight + new**2,
            mix(self.sqr, sqr),
            mix(self.var, var),
            mix(self.sqr_sqr, sqr * sqr),
            mix(self.var_var, var * var),
            mix(self.sqr_var, sqr * var),
        )

    @property
    def ratio_error(self) -> float:
        # Delta method, for independent steps; divided by the effective number of steps.
        w = self.weight
        sqr = self.sqr / w
        var = self.var / w
        ratio = var / sqr
        scatter = (
            self.var_var / w
            - var * var
            - 2.0 * ratio * (self.sqr_var / w - sqr * var)
            + ratio * ratio * (self.sqr_sqr / w - sqr * sqr)
        )
        effective = w * w / self.squared_weight
        return math.sqrt(max(scatter, 0.0) / max(effective - 1.0, 1e-9)) / sqr

    def rescale(self, factor: float) -> NoiseMoments:
        """Return the moments for batches that are `factor` times as large."""
        return replace(
            self,
            var=self.var / factor,
            var_var=self.var_var / factor**2,
            sqr_var=self.sqr_var / factor,
        )


def call_weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that calls a method through a weak reference, or returns None."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        alive = reference()
        if alive is None:
            return None
        return alive(*args, **kwargs)

    return call


class NoiseScale:
    """Measure the gradient noise scale, an estimate of the largest useful batch size.

        noise_scale = batch_size * variance / squared_norm

    S. McCandlish, J. Kaplan, D. Amodei et al., "An Empirical Model of Large-Batch Training", 2018,
    arXiv:1812.06162.

    Add one line to the loop. Any optimizer works, in a single process or under DDP:

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

    `noise_scale` is the paper's "simple noise scale", trace(covariance) / |gradient|^2 per sample:
    the batch size, in samples, at which noise and signal are equal. Well below this size, a
    larger batch saves steps almost in proportion; well above, it saves none. With one worker and no
    accumulation, consecutive gradients are compared. This requires a copy of the gradient, and
    changes of the parameters between steps count as noise.

    Args:
        optimizer: the optimizer to measure at each step, including steps with closures.
        batch_size: samples per backward pass and worker. If omitted, it is the unit of the results.
        num_gradients_to_accumulate: backward passes per step, with each loss divided by this
            number (or not divided, with `is_scaled_loss=False`). Other steps are skipped with a
            warning. With an `Accumulation`, steps with fewer passes are included.
        smoothing: weight of the past, 0.99 by default.
        process_group: the workers that average gradients; all by default. Create a NoiseScale on
            each worker.
        grad_scaler: the `GradScaler` in use; required if the loss scale changes.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        batch_size: float | None = None,
        num_gradients_to_accumulate: int | Accumulation = 1,
        is_scaled_loss: bool = True,
        smoothing: float = 0.99,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: LossScaler | None = None,
    ) -> None:
        self._batch_size = batch_size
        if batch_size is not None:
            self._batch_size = real("batch_size", batch_size, above=0.0, below=BELOW)
        self._unit = "small batches" if batch_size is None else "samples"
        self._smoothing = check_smoothing(smoothing)
        passes, loop = passes_and_loop(num_gradients_to_accumulate)
        loss_scale = LossScale(grad_scaler)
        self._optimizer = optimizer
        self._moments = NoiseMoments()
        self._consecutive = False  # whether the moments are of consecutive gradients
        self._in_flight: SentStep | None = None  # numbers of the last step, not yet on the host
        self._steps = 0
        self._nonfinite = 0
        self._warned = False
        prepared = find_prepared(optimizer)
        watched = optimizer
        if prepared is not None:
            loop = prepared_loop(prepared, passes) or loop
            loss_scale.scaler = grad_scaler or prepared.scaler
            # The outer optimizer may lack hooks. The innermost optimizer steps once per step.
            watched = unwrap(prepared.optimizer, every_layer=True)[-1]
        groups = optimizer.param_groups
        params = params_of(groups)
        ranks = rank_group_of(params, process_group or getattr(optimizer, "group", None))
        check_ranks_agree(ranks, params, {PASSES: passes}, "NoiseScale")
        batch = Batch(ranks.size, passes, None, loop, loss_is_divided=is_scaled_loss)
        batch.smoothing = self._smoothing
        self._measurement = Measurement(
            groups,
            ranks.with_own_group(params[0].device),
            PlainNorm(),
            batch,
            loss_scale,
            call_weakly(self.end_passes),
            changes_gradients=False,
        )
        self._origin = {"version": VERSION, "shapes": [list(param.shape) for param in params]}
        hook = watched.register_step_pre_hook(call_weakly(self._before_step))
        self._stop_watching = weakref.finalize(self, hook.remove)

    def _before_step(
        self, _: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        # `args[0]` is the optimizer.
        closure = kwargs.get("closure")
        if callable(closure):
            return args, {**kwargs, "closure": self._run_once(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._run_once(args[1]), *args[2:]), kwargs
        self._finish_step()
        return None

    def _run_once(self, closure: Callable[[], object]) -> Callable[[], object]:
        """Run the closure for the gradients, and return a function that replays the result."""
        with torch.enable_grad():
            result = closure()
        self._finish_step()
        return self._measurement.hooks.replay(result, closure)

    def end_passes(self, measurement: Measurement) -> None:
        """Handle the last backward pass of a step, or an excess pass."""
        if measurement.step.too_many:
            self._leave_out_step(measurement.describe_excess())
        else:
            measurement.complete()

    def _finish_step(self) -> None:
        measurement = self._measurement
        step = measurement.step
        if step.sent is None:
            if measurement.ranks.size > 1 and measurement.hooks.active:
                # Other ranks may have used parameters that this rank did not use.
                measurement.complete_early(self._optimizer)
            elif step.passes > 0:
                step.problem = _too_few_passes(step.passes, measurement.batch.passes)
            if step.passes == 0 and not self._warned and measurement.hooks.parameters_moved:
                self._warn("parameters were moved or converted. Create the NoiseScale afterwards.")
        if step.problem is not None:
            self._leave_out_step(step.problem)
        elif step.sent is not None:
            # The previous step's copy has finished, so this does not wait for the device.
            self._add_in_flight()
            step.sent.start_copy()
            self._in_flight = step.sent
            measurement.previous.remember()
        measurement.finish_step()

    def _leave_out_step(self, problem: str) -> None:
        self._measurement.clear()
        self._warn(problem)

    def _warn(self, problem: str) -> None:
        # Problems of the measurement must not stop the training.
        if not self._warned:
            self._warned = True
            warn(f"NoiseScale skips a step: {problem}")

    def _add_in_flight(self) -> None:
        sent = self._in_flight
        self._in_flight = None
        if sent is None:
            return
        sent.read()
        sums = sent.sums
        does_not_count = sent.is_short and sent.share == 1.0
        if does_not_count and sent.most_passes_seen:
            self._warn(_too_few_passes(int(sent.most_passes_seen), int(sent.claims.passes)))
        if sums is None or does_not_count:
            return
        if not sums.all_finite:
            self._nonfinite += 1
            return
        if self._consecutive and not sums.consecutive:  # a better measurement: restart the average
            self._moments = NoiseMoments()
            self._steps = 0
        self._consecutive = sums.consecutive
        new = estimate(sums)
        self._moments = self._moments.add(sum(new.sqr), sum(new.var), self._smoothing)
        self._steps += 1

    @property
    def steps(self) -> int:
        """Number of steps measured."""
        self._add_in_flight()
        return self._steps

    @property
    def nonfinite(self) -> int:
        """Number of steps skipped because a gradient was not finite."""
        self._add_in_flight()
        return self._nonfinite

    @property
    def squared_norm(self) -> float:
        """|true gradient|^2; NaN before the first measurement."""
        return self._moments.sqr / self._moments.weight if self.steps else math.nan

    @property
    def variance(self) -> float:
        """Trace of the covariance of a micro-batch gradient."""
        return self._moments.var / self._moments.weight if self.steps else math.nan

    @property
    def noise_scale(self) -> float:
        """variance / |gradient|^2 in samples; infinite if no signal exists, NaN before any step."""
        sqr = self.squared_norm
        var = self.variance
        if math.isnan(sqr):
            return math.nan
        if not sqr > 0.0:
            return math.inf
        return (self._batch_size or 1.0) * max(var, 0.0) / sqr

    @property
    def standard_error(self) -> float:
        """Standard error of `noise_scale`, from the variation between steps.

        Steps are assumed to be independent. Two estimates can share consecutive
        gradients; the true error is then larger.
        """
        sqr = self.squared_norm
        if self.steps < 2:
            return math.nan
        if not sqr > 0.0:
            return math.inf
        return (self._batch_size or 1.0) * self._moments.ratio_error

    def one_sample(self) -> AbstractContextManager[None]:
        """Treat the backward passes in the block as one pass (see `AdaScale.one_sample`)."""
        return self._measurement.one_sample()

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int) -> None:
        """Set the number of backward passes per step.

        Call this method on every worker, between two steps.
        """
        passes = whole(PASSES, num_gradients_to_accumulate, least=1, why=PER_STEP)
        self._measurement.check_between_steps("set_num_gradients_to_accumulate()")
        batch = self._measurement.batch
        self._measurement.exchange.announce(passes, batch.scale_for(passes))
        batch.set_passes(passes)

    def state_dict(self) -> dict[str, object]:
        """Return the state for `load_state_dict` or `mh.save(path, noise=noise)`."""
        self._add_in_flight()
        return {
            **self._origin,
            "batch_size": self._batch_size,
            "moments": asdict(self._moments),
            "consecutive": self._consecutive,
            "steps": self._steps,
            "nonfinite": self._nonfinite,
            **self._measurement.to_state(),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore a `state_dict`, on every worker. The number of workers may have changed.

        If both runs give a batch size, and it differs, the measurement is converted.
        """
        self._measurement.check_between_steps("load_state_dict()")
        entries = SavedEntries(state_dict, "a NoiseScale")
        entries.expect(self._origin)
        factor = 1.0
        if entries["batch_size"] is not None:
            saved_size = entries.real("batch_size", above=0.0)
            factor = (self._batch_size or saved_size) / saved_size
        consecutive = entries.flag("consecutive")
        steps = entries.whole("steps")
        moments = NoiseMoments.of_saved(entries.part("moments"), steps)
        nonfinite = entries.whole("nonfinite")
        measurement = self._measurement.parse_state(entries)
        self._measurement.load_state(measurement)
        self._in_flight = None
        self._moments = moments.rescale(factor)
        self._consecutive = consecutive
        self._steps = steps
        self._nonfinite = nonfinite

    def snapshot(self) -> dict[str, float | None]:
        """Return the measurement as plain numbers, for `Record`."""
        values = {
            "simple_noise_scale": self.noise_scale,
            "simple_noise_scale_error": self.standard_error,
        }
        return {name: v if math.isfinite(v) else None for name, v in values.items()}

    def unhook(self) -> None:
        """Stop measuring."""
        self._measurement.hooks.remove()
        self._stop_watching()

    def __repr__(self) -> str:
        return (
            f"NoiseScale({self.noise_scale:.4g} ± {self.standard_error:.2g} {self._unit}, "
            f"{self.steps} steps)"
        )


def _too_few_passes(passes: int, declared: int) -> str:
    return (
        f"step() after {passes} of {declared} backward passes. If every step has {passes}, pass "
        f"num_gradients_to_accumulate={passes}, or call set_num_gradients_to_accumulate({passes})."
    )
