"""Keeps the noise average up to date: one `StepStats` per step, added when the step is taken.

Between `backward` and `step` the finished statistics are only *previewed*: `current` shows the
average with them, and nothing is kept until `finish_step`. Statistics that no step follows leave no
trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.optim import Optimizer

from manyhands._core.state_parts import SavedState
from manyhands._core.wrappers import ScalerSignals
from manyhands.scaling._measured_steps import steps_between
from manyhands.scaling._noise import NoiseAverage, NormSums
from manyhands.scaling._settings import Options
from manyhands.scaling._step_counts import StepOutcome
from manyhands.scaling._step_stats import RankReport, StepStats
from manyhands.scaling._tap import GradientTap

NONFINITE_LIMIT = 10


@dataclass(frozen=True)
class _Preview:
    """Statistics that were looked at before their step."""

    stats: StepStats
    sums: NormSums | None
    average: NoiseAverage


@dataclass(frozen=True)
class _InFlight:
    """Statistics on their way to the host, and what their step knew."""

    stats: StepStats | None  # None: the step was not measured
    scale: float
    has_loss_scale: bool = False  # the loss scale is copied along with the statistics
    scaler_decides: bool = False  # the gradient scaler skips a step whose gradients are not finite
    skipped: bool = False  # by the scaler; for a step in which no norm was taken


@dataclass(frozen=True)
class TrackerState:
    """The noise tracker's part of a state dict, parsed."""

    average: NoiseAverage
    loss_scale: float | None
    nonfinite: int
    nonfinite_in_a_row: int
    uneven_passes: bool


class NoiseTracker:
    """Adds the statistics of the tap's steps to an average.

    `options` are the rule's, of which some say how to average. If `delayed`, statistics are added
    one step after they were taken, when their copy to the host has long arrived.
    """

    def __init__(
        self, tap: GradientTap, average: NoiseAverage, options: Options, *, delayed: bool
    ) -> None:
        self.tap = tap
        self._options = options
        self.average = self._configure(average)
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0
        self.uneven_passes = False  # whether a rank has ever seen fewer passes than a step had
        self.sums: NormSums | None = None  # of the last step that was added, if it has any
        self._delayed = delayed
        self._preview: _Preview | None = None
        self._in_flight: _InFlight | None = None
        # the outcome of a delayed step that `current` has added ahead of time
        self._early_outcome: StepOutcome | None = None
        self._last_stats: StepStats | None = None
        self.reports: Sequence[RankReport] = ()  # of the last step that has sent them
        self._new_reports: Sequence[RankReport] = ()  # the same, until they are taken

    @property
    def current(self) -> NoiseAverage:
        """The average, with the gradients of a backward that no step has followed yet."""
        step = self.tap.step
        if not step.complete:
            return self.average
        if self._delayed:
            self._early_outcome = self._early_outcome or self._add_in_flight()
            return self.average
        stats = step.stats
        if stats is None:  # it is not measured
            return self.average
        # read once: reading waits for the device
        if self._preview is None or self._preview.stats is not stats:
            sums, _ = stats.read()
            self._preview = _Preview(stats, sums, self._average_with(sums))
        return self._preview.average

    @property
    def micro_batch(self) -> float:
        """Samples in a rank's first training input, averaged over the ranks; 0 if unknown.

        The number comes with the statistics of the step under way or the last one, and reading it
        waits for them.
        """
        stats = self.tap.step.stats or self._last_stats
        if stats is None:
            return 0.0
        stats.read()
        return stats.micro_batch

    def steps_to_next(self, *, every_step: bool) -> int:
        """Return how many steps the next measured one is to stand for (`_measured_steps.py`).

        The result is the same on all ranks, or the claims of this step say so. It depends on the
        steps before this one, whose numbers have not arrived yet. Besides measuring, the numbers of
        a step decide whether passes were counted alike, whether a short step counts, and where a
        `Ramp` goes (`every_step`): where that is needed, every step is measured.
        """
        tap, batch = self.tap, self.tap.batch
        needed = (
            every_step
            or batch.counts_passes
            or batch.accumulation is not None
            or batch.short_step != "error"
            or tap.examples is not None
            or batch.passes * batch.workers == 1  # consecutive gradients are compared
            or self.uneven_passes
        )
        if needed or self.nonfinite_in_a_row:
            return 1
        k = int(self._options["measure_every"].number)
        held = self.average.steps_held(batch.smoothing_for(batch.scale_for(batch.passes)))
        return steps_between(k, batch.memory_in_steps, held)

    def take_reports(self) -> Sequence[RankReport]:
        """Return what the ranks reported since the last call."""
        reports, self._new_reports = self._new_reports, ()
        return reports

    def _receive(self, stats: StepStats) -> None:
        """Take note of what the ranks have said in a step, which has been read."""
        self.reports = self._new_reports = stats.reports
        self.uneven_passes |= stats.missed_somewhere

    def complete(self, optimizer: Optimizer) -> bool:
        """Complete the step if that is still to be done; return whether it is short on all ranks.

        A short step that the policy does not allow is an error. If short steps count, the gradient
        is the mean of its passes when this returns.
        """
        tap, policy = self.tap, self.tap.batch.short_step
        if tap.step.complete and tap.step.stats is None:
            return False  # it is not measured, and this rank has seen all passes
        stats = tap.step.stats or self._complete_early(optimizer)
        passes = tap.step.passes
        if passes >= stats.passes:
            return False  # this rank has seen all passes
        stats.read()
        if not stats.incomplete_everywhere:
            return False
        if policy == "error":
            self.forget()
            raise RuntimeError(
                f"step() after {passes} of {stats.passes} backward passes. Run the others first. "
                "If the data has run out, as at the end of an epoch, say what to do when you make "
                "the rule: short_step='count' steps along the mean of the passes that there were, "
                "short_step='drop' leaves the step out."
            )
        self._receive(stats)
        if policy == "count":
            tap.division.count_short(tap.step)
        return True

    def finish_step(self, signals: ScalerSignals, scale: float) -> StepOutcome | None:
        """Add this step's statistics, and return the outcome.

        If delayed, the previous step's are added, and the result is None if there was none.
        """
        tap, loss_scale = self.tap, self.tap.loss_scale
        stats = tap.step.stats
        assert tap.step.complete
        if tap.step.problem is not None:
            raise RuntimeError(tap.step.problem)
        if stats is None:
            outcome = self._finish_unmeasured(signals, scale)
            tap.finish_step()
            return outcome
        if signals.present and not loss_scale.known:
            self._check_loss_scale_known(signals, stats)
        late_loss_scale = loss_scale.at_step(signals)
        if self._delayed:
            outcome = self.finish_in_flight()
            stats.start_copy([] if late_loss_scale is None else [late_loss_scale])
            scaler_decides = signals.present or loss_scale.known
            has_loss_scale = late_loss_scale is not None
            skipped = not stats.measured and _is_skipped(signals)
            flight = _InFlight(stats, scale, has_loss_scale, scaler_decides, skipped)
            self._in_flight = flight
        else:
            outcome = self._add_now(stats, signals, scale, late_loss_scale is not None)
        self._preview, self._last_stats = None, stats
        tap.finish_step()
        return outcome

    def _finish_unmeasured(self, signals: ScalerSignals, scale: float) -> StepOutcome | None:
        skipped = _is_skipped(signals)
        if not self._delayed:
            return self._pass_over(scale, skipped)
        outcome = self.finish_in_flight()
        self._in_flight = _InFlight(None, scale, skipped=skipped)
        return outcome

    def _pass_over(self, scale: float, skipped: bool) -> StepOutcome:
        """Leave the averages as they are, in a step that is not measured."""
        self.nonfinite += skipped
        self.nonfinite_in_a_row += skipped
        return StepOutcome(self.average.gain(scale), skipped)

    def finish_in_flight(self) -> StepOutcome | None:
        """Add statistics whose copy to the host is under way, and return the outcome."""
        outcome, self._early_outcome = self._early_outcome or self._add_in_flight(), None
        return outcome

    def _add_in_flight(self) -> StepOutcome | None:
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return None
        if flight.stats is None:
            return self._pass_over(flight.scale, flight.skipped)
        sums, extras = flight.stats.read()
        self._receive(flight.stats)
        if not flight.stats.measured:
            return self._pass_over(flight.scale, flight.skipped)
        sums = self._unscale(sums, extras[0] if flight.has_loss_scale else None)
        finite = sums is None or sums.all_finite
        return self._add(sums, flight.scale, skipped=flight.scaler_decides and not finite)

    def forget(self) -> None:
        """Drop the statistics of the step under way: gradients were cleared."""
        self._preview = None
        self.tap.clear()

    def _add_now(
        self, stats: StepStats, signals: ScalerSignals, scale: float, has_loss_scale: bool
    ) -> StepOutcome:
        # the scaler's one-element tensors come along, in the same copy from the device
        tensors = [x for x in (signals.found_inf, signals.grad_scale) if x is not None]
        if self._preview is not None and self._preview.stats is stats:
            sums, extras = self._preview.sums, [float(tensor) for tensor in tensors]
        else:
            sums, extras = stats.read(tensors)
        self._receive(stats)
        skipped = bool(extras and extras[0])
        if not stats.measured:
            return self._pass_over(scale, skipped)
        sums = self._unscale(sums, extras[1] if has_loss_scale else None)
        return self._add(sums, scale, skipped=skipped)

    def _unscale(self, sums: NormSums | None, loss_scale: float | None) -> NormSums | None:
        if sums is None or loss_scale is None:
            return sums
        if self.tap.loss_scale.update(loss_scale) and sums.consecutive:
            return None  # the two gradients that were compared have different loss scales
        return sums.unscale(loss_scale)

    def _add(self, sums: NormSums | None, scale: float, *, skipped: bool) -> StepOutcome:
        if skipped or not (sums is None or sums.all_finite):
            self.nonfinite += 1
            self.nonfinite_in_a_row += 1
        else:
            self.nonfinite_in_a_row = 0
            self.average = self._average_with(sums)
            self.sums = sums
        return StepOutcome(self.average.gain(scale), skipped)

    def _average_with(self, sums: NormSums | None) -> NoiseAverage:
        if sums is None or not sums.all_finite:
            return self.average
        return self.average.add(sums, self.tap.batch.smoothing_for(sums.scale))

    def _configure(self, average: NoiseAverage) -> NoiseAverage:
        """Return the average with the settings that the options ask for."""
        batch, options = self.tap.batch, self._options
        return average.with_settings(
            debiased=bool(options["debias_ewma"].number),
            smoothing=batch.smoothing_for(batch.scale_for(batch.passes)),
            floor_each_step=bool(options["floor_each_step"].number),
            mix_norm_kinds=batch.counts_passes,  # adaptdl mixes them
            var_floor=options["var_floor"].number,
        )

    def check_not_stuck(self) -> None:
        """Raise if the gradients of the last steps were not finite."""
        if self.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise RuntimeError(
                f"the gradients of the last {NONFINITE_LIMIT} steps were not finite. With AMP, "
                "use a torch.amp.GradScaler, which skips such steps; otherwise the parameters "
                "are probably NaN by now: lower the learning rate, clip the gradients, or "
                "continue from a checkpoint."
            )

    def _check_loss_scale_known(self, signals: ScalerSignals, stats: StepStats) -> None:
        """Raise if the statistics contain a loss scale that cannot be divided out any more."""
        advice = "Pass it when wrapping: grad_scaler=scaler."
        if signals.grad_scale is None:
            raise RuntimeError(
                "scaler.unscale_() has divided the gradients after they were measured, so the "
                f"statistics cannot know the loss scale. {advice}"
            )
        if self._preview is not None and self._preview.stats is stats:
            raise RuntimeError(
                "gain() was read before scaler.step() passed on the loss scale, so it was wrong. "
                f"{advice} Or read gain() after the step."
            )

    def _complete_early(self, optimizer: Optimizer) -> StepStats:
        """Handle a `step` without all of its backward passes: on every rank, an error.

        Except if other ranks have gradients, and DDP has averaged them with this rank's zeros.
        """
        tap = self.tap
        # Mistakes of this rank alone come first, before anything is sent.
        if not tap.hooks.active:
            raise RuntimeError("unhook() was called, so gradients are not measured any more.")
        if tap.in_one_sample:
            raise RuntimeError("step() inside one_sample(): leave the `with` block first.")
        if tap.hooks.passes.open:
            raise RuntimeError(
                "step() while backward() is running. A scaling rule needs the whole gradient "
                "first: step after backward() has returned."
            )
        passes = tap.step.passes
        if not tap.schedule.sends:
            if tap.ranks.size > 1:
                self._raise_unmeasured(optimizer)
            tap.schedule.checked = False  # there is no other rank that this step could mislead
        stats = tap.complete_early(optimizer)
        stats.read()  # raises if the ranks disagree about the step
        if stats.ranks > 1 and stats.passes > 0 and not stats.incomplete_everywhere:
            return stats
        if stats.most_passes_seen and not tap.batch.counts_passes:
            return stats  # a short step, for `complete`
        self.forget()
        if passes == 0:
            self._raise_no_backward(optimizer)
        raise RuntimeError(
            f"step() inside no_sync(), after {passes} backward pass(es): the gradients are "
            "not averaged over the workers yet. Run the step's last backward outside it."
        )

    def _raise_no_backward(self, optimizer: Optimizer) -> NoReturn:
        if not self.tap.measures(optimizer.param_groups):
            raise RuntimeError(
                "the parameters of this optimizer were replaced after it was wrapped, as "
                "Accelerate's FSDP2 does in prepare(). Wrap the prepared optimizer: "
                "mh.AdaScale(accelerator.prepare(optimizer)), or another rule."
            )
        moved = " Parameters were moved or converted: wrap after that."
        raise RuntimeError(
            "step() without a backward() before it: there is no gradient to step along. "
            "(A backward pass counts if it reached a parameter of this optimizer.)"
            + (moved if self.tap.hooks.parameters_moved else "")
        )

    def _raise_unmeasured(self, optimizer: Optimizer) -> NoReturn:
        """Raise for a `step` without all of its passes, if the ranks exchange nothing in this step.

        In a measured step they find out whether any of them has seen the passes.
        """
        passes, needed = self.tap.step.passes, self.tap.batch.passes
        self.forget()
        if passes == 0:
            self._raise_no_backward(optimizer)
        raise RuntimeError(
            f"step() after {passes} of {needed} backward passes. Run the others first. If this "
            "rank's losses in the others used none of the parameters, leave measure_every= out: "
            "only in a measured step can a rank learn that others have seen a pass."
        )

    # -- saving and loading ------------------------------------------------------------------

    @property
    def state(self) -> TrackerState:
        """What a bitwise continuation needs, besides the tap's state."""
        return TrackerState(
            self.average,
            self.tap.loss_scale.last,
            self.nonfinite,
            self.nonfinite_in_a_row,
            self.uneven_passes,
        )

    def to_state(self) -> dict[str, object]:
        """Return the tracker's part of a state dict."""
        return {
            "average": self.average.to_state(),
            "loss_scale": self.tap.loss_scale.last,
            "nonfinite": self.nonfinite,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            **({"uneven_passes": True} if self.uneven_passes else {}),
        }

    def parse_state(self, entry: SavedState) -> TrackerState:
        """Return the tracker's part of a state dict, or raise; nothing is changed."""
        loss_scale = entry["loss_scale"]
        return TrackerState(
            self.average.from_state(entry["average"]),
            None if loss_scale is None else float(loss_scale),
            int(entry["nonfinite"]),
            int(entry["nonfinite_in_a_row"]),
            bool(entry.get("uneven_passes", False)),  # earlier releases did not need it
        )

    def load_state(self, state: TrackerState) -> None:
        """Continue from a parsed state; statistics under way are dropped."""
        self.forget()
        self._in_flight = self._early_outcome = self._last_stats = None
        self.average = self._configure(state.average)
        self.tap.loss_scale.last = state.loss_scale
        self.nonfinite, self.nonfinite_in_a_row = state.nonfinite, state.nonfinite_in_a_row
        self.uneven_passes = state.uneven_passes


def _is_skipped(signals: ScalerSignals) -> bool:
    """Return whether the scaler skips the step. Waits for the device.

    This is for a step without norms, from which a delayed rule could see it later.
    """
    return signals.found_inf is not None and bool(signals.found_inf)
