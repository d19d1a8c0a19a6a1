"""Keeps the noise average up to date: one `StepStats` per step, added when the step is taken.

`StepCounts` has what a rule's steps have come to: how many there were, and their progress.
`ScheduleWatch` warns of a schedule that counts steps where progress runs ahead of them.

Between `backward` and `step` the finished statistics are only *previewed*: `current` shows the
average with them, and nothing is kept until `finish_step`. Statistics that no step follows leave no
trace.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands._core.state_parts import SQUARES, SavedEntries
from manyhands._core.wrappers import ScalerSignals
from manyhands.scaling._noise import NoiseAverage, NormSums
from manyhands.scaling._settings import Options
from manyhands.scaling._step_in_progress import steps_between
from manyhands.scaling._step_stats import RankReport, StepStats
from manyhands.scaling._tap import GradientTap

NONFINITE_LIMIT = 10
EXPLODED = 10.0  # a step's noise over the limit of its average, of which the user should know
STEPS_IN_A_ROW = 20  # a rate that changes in so many follows a schedule
AHEAD = 1.5  # progress per step at which a schedule in steps is clearly behind


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step's statistics."""

    gain: float  # of the average that includes them, at the scale of their step
    skipped: bool  # the gradient scaler found infinities, and no step was made


@dataclass
class StepCounts:
    """What a rule's steps have come to so far. The owner of the progress."""

    progress: float = 0.0  # the sum of the gains
    steps: int = 0
    skipped: int = 0
    short: int = 0  # steps with fewer passes than declared

    def to_state(self) -> dict[str, float]:
        """Return the counts for a state dict."""
        return asdict(self)

    @classmethod
    def parse_state(cls, entry: SavedEntries) -> StepCounts:
        """Return the counts of a state dict, or raise."""
        return cls(entry.real("progress"), *map(entry.whole, ("steps", "skipped", "short")))

    def load_state(self, loaded: StepCounts) -> None:
        """Become `loaded`, in place: the proxies that trainers put around a rule share this."""
        vars(self).update(vars(loaded))


@dataclass
class ScheduleWatch:
    """Warns once of a torch scheduler that is stepped once per optimizer step, and so lags behind.

    A scheduler that is stepped in every pass, or with every epoch, counts samples.
    """

    rates: list[object] = field(default_factory=list)  # of the last step, by parameter group
    in_a_row: int = 0  # steps whose rates are not those of the step before
    worth: float = 0.0  # the sum of their gains
    done: bool = False

    def see(self, optimizer: Optimizer, gain: float, steps: int) -> None:
        """Take note of a step with this gain, after which there have been so many steps."""
        if self.done:
            return
        before, self.rates = self.rates, [group["lr"] for group in optimizer.param_groups]
        if before in ([], self.rates):
            self.in_a_row, self.worth = 0, 0.0
            return
        self.in_a_row, self.worth = self.in_a_row + 1, self.worth + gain
        if self.in_a_row < STEPS_IN_A_ROW or self.worth < AHEAD * self.in_a_row:
            return
        self.done = True  # the search is slow
        if STEPS_IN_A_ROW <= _most_scheduler_steps(optimizer) <= steps:
            warnings.warn(
                f"the learning rate schedule counts optimizer steps, and the last {self.in_a_row} "
                f"of them were worth {self.worth:.0f} of the small batch. A schedule that was made "
                "for the small batch then lasts too long: step it by progress, with "
                "mh.ProgressScheduler(scheduler, optimizer, end=...).",
                stacklevel=3,
            )


def _most_scheduler_steps(optimizer: Optimizer) -> int:
    """Return how often a torch scheduler of this optimizer, or of one inside, was stepped."""
    groups = optimizer.param_groups  # one list for all layers
    return max(
        (
            each.last_epoch
            for each in gc.get_objects()
            # type(each), because isinstance() runs a lazy proxy's code
            if issubclass(type(each), LRScheduler)
            and getattr(vars(each).get("optimizer"), "param_groups", None) is groups
        ),
        default=0,
    )


@dataclass(frozen=True)
class _Preview:
    """Statistics that were looked at before their step."""

    stats: StepStats
    sums: NormSums | None
    average: NoiseAverage


@dataclass(frozen=True)
class TrackerState:
    """The noise tracker's part of a state dict, parsed."""

    average: NoiseAverage
    loss_scale: float | None
    nonfinite: int
    nonfinite_in_a_row: int


class NoiseTracker:
    """Adds the statistics of the tap's steps to an average.

    `options` are the rule's, of which some say how to average.
    """

    def __init__(self, tap: GradientTap, average: NoiseAverage, options: Options) -> None:
        self.tap = tap
        self._options = options
        self.average = self._configure(average)
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0
        self.sums: NormSums | None = None  # of the last step that was added, if it has any
        self._preview: _Preview | None = None
        self._last_stats: StepStats | None = None
        self._warned = False
        self.measures_every_step = False  # whether somebody needs the numbers of each
        self.reports: Sequence[RankReport] = ()  # of the last step that has sent them
        self._new_reports: Sequence[RankReport] = ()  # the same, until they are taken

    @property
    def current(self) -> NoiseAverage:
        """The average, with the gradients of a backward that no step has followed yet."""
        step = self.tap.step
        stats = step.stats
        if stats is None:
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

    def _period(self) -> int:
        """Return how many steps the next measured one is to stand for; the same on all ranks.

        Every step is measured where a `Ramp` needs the numbers of each, where consecutive gradients
        are compared, and after gradients that are not finite.
        """
        batch = self.tap.batch
        passes = batch.passes * batch.workers
        if self.measures_every_step or self.nonfinite_in_a_row or passes == 1:
            return 1
        k = int(self._options["measure_every"].number)
        held = self.average.steps_held(batch.smoothing_for(batch.scale_for(batch.passes)))
        return steps_between(k, batch.memory_in_steps, held, passes)

    def take_reports(self) -> Sequence[RankReport]:
        """Return what the ranks reported since the last call."""
        reports, self._new_reports = self._new_reports, ()
        return reports

    def _receive(self, stats: StepStats) -> None:
        """Take note of what the ranks have said in a step, which has been read."""
        self.reports = self._new_reports = stats.reports

    def complete(self, optimizer: Optimizer) -> bool:
        """Complete the step if that is still to be done; return whether it is short on all ranks.

        A short step that the policy does not allow is an error. If short steps count, the gradient
        is the mean of its passes when this returns.
        """
        tap, batch = self.tap, self.tap.batch
        stats = tap.step.stats or self._complete_early(optimizer)
        passes = tap.step.passes
        if passes >= stats.passes:
            return False  # this rank has seen all passes
        stats.read()
        if not stats.incomplete_everywhere:
            return False
        if batch.short_step == "error":
            self.forget()
            raise RuntimeError(batch.describe_short(passes))
        tap.division.count_short(tap.step)
        return True

    def finish_step(self, signals: ScalerSignals, scale: float) -> StepOutcome:
        """Add this step's statistics, and return the outcome."""
        tap, loss_scale = self.tap, self.tap.loss_scale
        stats = tap.step.stats
        assert stats is not None
        if tap.step.problem is not None:
            raise RuntimeError(tap.step.problem)
        if signals.present and not loss_scale.known:
            self._check_loss_scale_known(signals, stats)
        late_loss_scale = loss_scale.at_step(signals)
        outcome = self._add_now(stats, signals, scale, late_loss_scale is not None)
        self._preview, self._last_stats = None, stats
        tap.finish_step(self._period())
        return outcome

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
            self._warn_if_exploded(sums)
            self.average = self._average_with(sums)
            self.sums = sums
        return StepOutcome(self.average.gain(scale), skipped)

    def _average_with(self, sums: NormSums | None) -> NoiseAverage:
        if sums is None or not sums.all_finite:
            return self.average
        return self.average.add(sums, self.tap.batch.smoothing_for(sums.scale))

    def _warn_if_exploded(self, sums: NormSums | None) -> None:
        if sums is None or self._warned:
            return
        over = max(self.average.over_limit(sums, self.tap.batch.smoothing_for(sums.scale)))
        if over < EXPLODED:
            return
        self._warned = True
        warnings.warn(
            f"a gradient has exploded: its noise was {over:.0f} times the most that counts. "
            "The gain stays what it was. If the loss rises, clip the gradients or lower the rate. "
            "(Said once.)",
            stacklevel=2,
        )

    def _configure(self, average: NoiseAverage) -> NoiseAverage:
        """Return the average with the settings that the options ask for."""
        batch, options = self.tap.batch, self._options
        return average.with_settings(
            debiased=bool(options["debias_ewma"].number),
            smoothing=batch.smoothing_for(batch.scale_for(batch.passes)),
            mix_norm_kinds=batch.counts_passes,  # adaptdl mixes them
            var_floor=options["var_floor"].number,
        )

    def check_not_stuck(self) -> None:
        """Raise if the gradients of the last steps were not finite."""
        if self.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise RuntimeError(
                f"{NONFINITE_LIMIT} steps were not finite. Use a GradScaler with AMP."
            )

    def _check_loss_scale_known(self, signals: ScalerSignals, stats: StepStats) -> None:
        """Raise if the statistics contain a loss scale that cannot be divided out any more."""
        advice = "Pass it when wrapping: grad_scaler=scaler."
        if signals.grad_scale is None:
            raise RuntimeError(f"scaler.unscale_() came before the loss scale was known. {advice}")
        if self._preview is not None and self._preview.stats is stats:
            raise RuntimeError(f"gain() was read before scaler.step(), so it was wrong. {advice}")

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
            raise RuntimeError("step() while backward() is running: step after it has returned.")
        passes = tap.step.passes
        stats = tap.complete_early(optimizer)
        stats.read()  # raises if the ranks disagree about the step
        if stats.ranks > 1 and stats.passes > 0 and not stats.incomplete_everywhere:
            return stats
        if stats.most_passes_seen and not tap.batch.counts_passes:
            return stats  # a short step, for `complete`
        self.forget()
        if passes == 0:
            self._raise_no_backward(optimizer)
        raise RuntimeError(f"step() inside no_sync(): run the last of {passes} passes outside it.")

    def _raise_no_backward(self, optimizer: Optimizer) -> NoReturn:
        if not self.tap.measures(optimizer.param_groups):
            raise RuntimeError(
                "the optimizer's parameters were replaced after it was wrapped. Wrap the prepared "
                "one: mh.AdaScale(accelerator.prepare(optimizer))."
            )
        moved = " Parameters were moved or converted: wrap after that."
        raise RuntimeError(
            "step() without a backward() before it that reached a parameter of this optimizer."
            + (moved if self.tap.hooks.parameters_moved else "")
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
        )

    def to_state(self) -> dict[str, object]:
        """Return the tracker's part of a state dict."""
        return {
            "average": self.average.to_state(),
            "loss_scale": self.tap.loss_scale.last,
            "nonfinite": self.nonfinite,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def parse_state(self, entry: SavedEntries) -> TrackerState:
        """Return the tracker's part of a state dict, or raise; nothing is changed."""
        known = entry.has("loss_scale")
        return TrackerState(
            self.average.from_state(entry.part("average")),
            entry.real("loss_scale", above=0.0, below=SQUARES) if known else None,
            entry.whole("nonfinite"),
            entry.whole("nonfinite_in_a_row"),
        )

    def load_state(self, state: TrackerState) -> None:
        """Continue from a parsed state; statistics under way are dropped."""
        self.forget()
        self._last_stats = None
        self.average = self._configure(state.average)
        self.tap.loss_scale.last = state.loss_scale
        self.nonfinite, self.nonfinite_in_a_row = state.nonfinite, state.nonfinite_in_a_row
