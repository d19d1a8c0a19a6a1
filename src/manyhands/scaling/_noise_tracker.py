"""Keeps the noise average up to date: one reading a step, taken when the step is.

Between `backward` and `step` a finished sample is *pending*: `current` shows the average with
it, and nothing is kept until `take`. A sample that no step follows leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands._core.amp import ScalerSignals
from manyhands.scaling._averages import NoiseAverage, is_finite
from manyhands.scaling._noise import Reading
from manyhands.scaling._step_stats import StepStats
from manyhands.scaling._tap import GradientTap


@dataclass(frozen=True)
class Taken:
    """What became of a step's reading."""

    gain: float  # of the average with it, at the scale of its step
    skipped: bool  # the gradient scaler found infinities, and no step was made


@dataclass(frozen=True)
class _Pending:
    """A sample that was looked at before its step."""

    sample: StepStats
    reading: Reading | None
    average: NoiseAverage


@dataclass(frozen=True)
class _Flight:
    """A sample on its way to the host, and what its step knew."""

    sample: StepStats
    scale: float
    scale_is_late: bool  # the loss scale comes with the sample
    scaler_decides: bool  # a step along infinities is not made


class NoiseTracker:
    """Joins the tap's samples to the average.

    `smoothing(scale)` is the weight of the past; `scaler_known` whether the tap divides the
    loss scale out by itself. With `delayed`, a reading is joined one step after it was taken,
    when its copy to the host has long arrived.
    """

    def __init__(
        self,
        tap: GradientTap,
        average: NoiseAverage,
        *,
        smoothing: Callable[[float], float],
        scaler_known: bool,
        delayed: bool,
    ) -> None:
        self.tap = tap
        self.average = average
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0
        self._smoothing = smoothing
        self._scaler_known = scaler_known
        self._delayed = delayed
        self._pending: _Pending | None = None
        self._flight: _Flight | None = None
        self._landed: Taken | None = None
        self._last: StepStats | None = None
        self._loss_scale: float | None = None

    @property
    def current(self) -> NoiseAverage:
        """The average, with the gradients of a backward that no step has followed yet."""
        sample = self.tap.sample
        if sample is None:
            return self.average
        if self._delayed:
            self._landed = self._landed or self._land()
            return self.average
        if self._pending is None or self._pending.sample is not sample:
            reading, _ = sample.read()
            self._pending = _Pending(sample, reading, self._after(reading))
        return self._pending.average

    @property
    def micro_batch(self) -> float:
        """Samples in one rank's first training input, on average over the ranks; 0: unknown.

        As they came with the step under way or the last one, for which this waits if need be.
        """
        sample = self.tap.sample or self._last
        if sample is None:
            return 0.0
        sample.read()
        return sample.micro_batch

    def take(self, news: ScalerSignals, scale: float) -> Taken | None:
        """Join this step's reading (the previous step's, if delayed; None: there was none)."""
        sample = self.tap.sample
        if sample is None:
            sample = self._incomplete()
        if self.tap.problem is not None:
            raise RuntimeError(self.tap.problem)
        if news.present and not self._scaler_known:
            self._check_scale_can_be_known(news, sample)
        late_scale = None if self._scaler_known else news.grad_scale
        if self._delayed:
            taken = self.land()
            sample.start_copy([] if late_scale is None else [late_scale])
            scaler_decides = news.present or self._scaler_known
            self._flight = _Flight(sample, scale, late_scale is not None, scaler_decides)
        else:
            taken = self._take_now(sample, news, scale, late_scale is not None)
        self._pending, self._last = None, sample
        self.tap.stepped()
        return taken

    def land(self) -> Taken | None:
        """Join a reading whose copy is under way."""
        taken, self._landed = self._landed or self._land(), None
        return taken

    def _land(self) -> Taken | None:
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        reading, told = flight.sample.read()
        reading = self._without(reading, told[0] if flight.scale_is_late else None)
        finite = reading is None or is_finite(reading)
        return self._join(reading, flight.scale, skipped=flight.scaler_decides and not finite)

    def forget(self) -> None:
        """Gradients were cleared: a step begins anew."""
        self._pending = None
        self.tap.clear()

    def _take_now(
        self, sample: StepStats, news: ScalerSignals, scale: float, scale_is_late: bool
    ) -> Taken:
        extras = [x for x in (news.found_inf, news.grad_scale) if x is not None]
        if self._pending is not None and self._pending.sample is sample:
            reading, told = self._pending.reading, [float(extra) for extra in extras]
        else:
            reading, told = sample.read(extras)
        reading = self._without(reading, told[1] if scale_is_late else None)
        return self._join(reading, scale, skipped=bool(told and told[0]))

    def _without(self, reading: Reading | None, loss_scale: float | None) -> Reading | None:
        if reading is None or loss_scale is None:
            return reading
        changed = loss_scale != self._loss_scale
        self._loss_scale = loss_scale
        if reading.differenced and changed:
            return None  # the two gradients that were compared have different scales
        return reading.divided_by(loss_scale)

    def _join(self, reading: Reading | None, scale: float, *, skipped: bool) -> Taken:
        if skipped or not (reading is None or is_finite(reading)):
            self.nonfinite += 1
            self.nonfinite_in_a_row += 1
        else:
            self.nonfinite_in_a_row = 0
            self.average = self._after(reading)
        return Taken(self.average.gain(scale), skipped)

    def _after(self, reading: Reading | None) -> NoiseAverage:
        if reading is None or not is_finite(reading):
            return self.average
        return self.average.after(reading, self._smoothing(reading.scale))

    def _check_scale_can_be_known(self, news: ScalerSignals, sample: StepStats) -> None:
        advice = "Pass it when wrapping: grad_scaler=scaler."
        if news.grad_scale is None:
            raise RuntimeError(
                "scaler.unscale_() has divided the gradients after they were measured, so the "
                f"statistics cannot know the loss scale. {advice}"
            )
        if self._pending is not None and self._pending.sample is sample:
            raise RuntimeError(
                "gain() was read before scaler.step() told the loss scale, so it was a wrong "
                f"one. {advice} Or read gain() after the step."
            )

    def _incomplete(self) -> StepStats:
        """`step` without all of its backward passes: on every worker, an error."""
        tap = self.tap
        if not tap.hooked:
            raise RuntimeError("unhook() was called, so gradients are not measured any more.")
        if tap.joined:
            raise RuntimeError("step() inside one_sample(): leave the `with` block first.")
        if tap.in_backward:
            raise RuntimeError(
                "step() while backward() is running. A scaling rule needs the whole gradient "
                "first: step after backward() has returned."
            )
        declared, passes = tap.accumulation.declared, tap.passes
        sample = tap.complete_now()
        sample.read()  # raises where other workers have come further
        if sample.workers > 1 and sample.passes > 0 and not sample.nobody_ready:
            return sample  # the others have gradients, of which this worker's losses had no part
        self.forget()
        if passes == 0:
            raise RuntimeError(
                "step() without a backward() before it: there is no gradient to step along. "
                "(A backward pass counts if it reached a parameter of this optimizer.)"
                + (" Parameters were moved or converted: wrap after that." if tap.moved else "")
            )
        if declared is None:
            raise RuntimeError(
                f"step() inside no_sync(), after {passes} backward pass(es): the gradients are "
                "not averaged over the workers yet. Run the step's last backward outside it."
            )
        raise RuntimeError(
            f"step() after {passes} of {declared} backward passes. Run the others first. If the "
            "data has run out, as at the end of an epoch, leave the step out and call "
            f"zero_grad(); or call set_num_gradients_to_accumulate({passes}) before the first "
            "backward() of the shorter step."
        )

    def saved(self) -> dict[str, Any]:
        return {
            "average": self.average.saved(),
            "previous": list(self.tap.mean.difference.previous),
            "norms": self.tap.norms.saved(),
            "loss_scale": self._loss_scale,
            "nonfinite": self.nonfinite,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def continue_from(self, other: NoiseTracker) -> None:
        """Take over what another meter of the same parameters (copied) knows."""
        self.load(
            other.average,
            [None if g is None else g.clone() for g in other.tap.mean.difference.previous],
            other._loss_scale,
            other.nonfinite,
            other.nonfinite_in_a_row,
            other.tap.norms.saved(),
        )

    def load(
        self,
        average: NoiseAverage,
        previous: list[Tensor | None],
        loss_scale: float | None,
        nonfinite: int,
        nonfinite_in_a_row: int,
        norms: list[Any],
    ) -> None:
        """Continue from there: what is under way is dropped."""
        self.forget()
        self._flight = self._landed = self._last = None
        self.average = average
        self.tap.norms.load(norms)
        self.tap.mean.difference.previous = self.tap.placed(previous)
        self._loss_scale = loss_scale
        self.nonfinite, self.nonfinite_in_a_row = nonfinite, nonfinite_in_a_row
