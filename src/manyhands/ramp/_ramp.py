"""Choose the number of micro-batches of each step during training: `Ramp`.

After each step all ranks share three measurements, which travel in the small collective of the
scaling rule (`scaling/_payload.py`):

    the noise               averaged by the rule, up to this step
    the time of a step      the mean over ranks, from each rank's report of its last step
    the micro-batches left  on the rank with the fewest, from each rank's report

So all ranks make equal decisions (`_decision.py`) with no further collective. A decision changes
the number of backward passes of the next steps, and thus the scale and the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._arguments import explained, one_of, real, whole
from manyhands._optimizers.state_parts import SavedEntries, SavedState
from manyhands.data._cursor import BaseCursor
from manyhands.ramp._decision import GROWTH, Decision, Goal, Limits, StepTime, decide, efficiency
from manyhands.ramp._micro_batches import MicroBatches, StepLoader, StepSize, Supply
from manyhands.ramp._observed import Evidence, NoiseWatch, StepTimer
from manyhands.scaling._batch import PASSES, PER_STEP
from manyhands.scaling._payload import RankReport
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._weighted_mean import WeightedMean

Batch = TypeVar("Batch")

GOALS = ("time", "samples", "steps")
EVERY = 3  # steps between decisions, after the best batch is known and near
SKIPPED = 2  # first steps, which are not timed: they compile, allocate and connect


class Ramp:
    """Choose the batch size of each step during training.

    Tune the learning rate for the small batch, wrap the optimizer with a scaling rule, and take
    each step's micro-batches from `over`:

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(40)]
    >>> optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> ramp = mh.Ramp(optimizer, max_scale=16)
    >>> for micro_batches in ramp.over(loader):
    ...     for inputs, targets in micro_batches:
    ...         loss = torch.nn.functional.mse_loss(model(inputs), targets)
    ...         (loss / len(micro_batches)).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> 1 <= ramp.passes <= 16
    True

    Loops that fetch data otherwise, such as trainers, run `ramp.passes` backward passes per step,
    and read it again after `optimizer.step()`. All ranks get equal values. `begin_step` declares a
    shorter step, and `skip_time` excludes the time of a validation.

    Args:
        optimizer: a scaling rule, such as `AdaScale`, which sets the learning rate.
        max_scale: the largest batch (all workers, all passes) in small batches, like the rule's
            `scale`. Lower it if larger batches reduce quality.
        goal: "time" maximizes progress per second; "samples" minimizes steps and samples, with a
            step counted as 0.8 small batches; "steps" takes the largest batch.
        efficiency: with `goal="samples"`, choose the largest batch where a sample is worth at least
            this fraction of a sample in the small batch, such as 0.8.
        model: the module that averages gradients (`DistributedDataParallel`, `ShardedDataParallel`,
            `FullyShardedDataParallel`). `over` then averages once per step, not once per pass.
        loader: the `AdaptiveDataLoader` that `over` will get; `over` sets it if omitted.

    Unless the rule has a `smoothing`, its averages cover between 50 and 1,000 small batches: as few
    as the estimate allows, to follow the noise while the batch grows.

    Base schedules on progress (`ProgressScheduler`) or on samples. A schedule in optimizer steps
    would change with the batch.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        max_scale: float,
        *,
        goal: Goal = "time",
        efficiency: float | None = None,
        model: nn.Module | None = None,
        loader: StepLoader | None = None,
    ) -> None:
        self.max_scale = real("max_scale", max_scale, above=0.0)
        one_of("goal", goal, GOALS)
        if efficiency is not None:
            one_of("goal", goal, ["samples"], "efficiency= is for this goal.")
            real("efficiency", efficiency, above=0.0, below=1.0)
        if not isinstance(optimizer, ScalingRuleBase):
            raise TypeError(
                f"Ramp needs an optimizer under a scaling rule, got {type(optimizer).__name__}. "
                "Write mh.AdaScale(optimizer)."
            )
        if optimizer.port.observer is not None:
            raise ValueError("this optimizer already has a Ramp: use that Ramp.")
        self.optimizer = optimizer
        self._port = optimizer.port
        self._no_sync = _no_sync_of(model)
        self._loader: StepLoader | None = None
        batch = self._port.batch
        if batch.scale is not None:
            optimizer.set_scale_per_pass(batch.scale / batch.passes)
        self._limits = Limits(goal=goal, efficiency=efficiency)
        self._set_units(batch.passes)
        self._timer = StepTimer()
        self._noise = NoiseWatch(optimizer)
        self._moments_scale = self.scale  # of the batch that Adam's second moments belong to
        self._steps = 0  # since this object was made
        self._saved: SavedRamp | None = None  # loaded state, until the next step
        self._supply = Supply(optimizer)
        if loader is not None:
            self._bind(loader)
        self._port.observer = self

    def _set_units(self, units: int) -> None:
        most = self._most_units
        if most < units:
            raise ValueError(
                f"max_scale={self.max_scale:g} is below the current scale of "
                f"{self.optimizer.scale:g}: a pass on {self._port.batch.workers} worker(s) has a "
                f"scale of {self._scale_per_unit:g}, and a step has {units} of them. Raise "
                "max_scale, or start with fewer passes or a smaller micro-batch."
            )
        # Raises if the rule cannot scale this optimizer.
        self._port.check_step(most, self._scale_per_unit)
        self._limits = replace(self._limits, most=most)
        self._units = units
        self._decision = Decision(units, "wait", units)

    @property
    def _most_units(self) -> int:
        return math.floor(self.max_scale / self._scale_per_unit + 1e-9)

    def _bind(self, loader: StepLoader) -> None:
        """Count in units of this loader from now on."""
        if self._loader is loader:
            return
        if self._loader is not None:
            raise ValueError(
                "this Ramp already has an AdaptiveDataLoader. Make a Ramp and a loader per run."
            )
        before = self.scale
        self._loader = loader
        # A resumed run already has a batch.
        if self._steps:
            self._set_units(max(1, round(before / loader.scale_per_unit)))
        else:
            self._set_units(1)
            self._moments_scale = self.scale

    # -- the loop's interface ------------------------------------------------------------------

    @property
    def units(self) -> int:
        """Size of the next step on each rank: in passes, or in an `AdaptiveDataLoader`'s units."""
        return self._units

    @property
    def passes(self) -> int:
        """Backward passes of the next step, equal on all ranks."""
        return self._size.passes

    @property
    def scale(self) -> float:
        """Size of the next step's batch, in small batches."""
        return self._scale_per_unit * self._size.units

    @property
    def _size(self) -> StepSize:
        if self._loader is None:
            return StepSize(self._units, 1)
        return self._loader.size_of(self._units)

    @property
    def _scale_per_unit(self) -> float:
        if self._loader is not None:
            return self._loader.scale_per_unit
        return self._port.batch.scale_for(1)

    def over(
        self, loader: Iterable[Batch], count: Callable[[Batch], int | float | Tensor] | None = None
    ) -> Iterator[MicroBatches[Batch]]:
        """Yield the micro-batches of each step, until the data has ended.

        Call `optimizer.step()` once for each item. At the end of the data a step may have fewer
        micro-batches. All ranks end with the rank with the fewest micro-batches.

        The micro-batches of an `AdaptiveDataLoader` grow, up to its `max_local_batch_size`. Batches
        of a `Cursor` count as trained only when handed out.

        `count` returns the number of tokens in a micro-batch. Then call `backward()` on
        `micro_batches.mean(loss_sum)`: the loss is the mean over all tokens (see `WeightedMean`).
        """
        if isinstance(loader, StepLoader):
            self._bind(loader)
        self._timer.skip()  # excludes the time between epochs
        if isinstance(loader, StepLoader):
            for step in loader.steps(self._next_size):
                self._begin_step(loader.size)
                yield self._micro_batches(step, count)
            return
        if isinstance(loader, BaseCursor):
            yield from self._over_cursor(loader, count)
        else:
            for step in self._supply.steps(loader, self._next_units, self._look_ahead):
                self._begin_step(StepSize(len(step), 1))
                yield self._micro_batches(step, count)
        self._begin_step(StepSize(self._units, 1))  # the last step may have been short

    def _next_size(self) -> StepSize:
        return self._size

    def _next_units(self) -> int:
        return self._units

    def _over_cursor(
        self, cursor: BaseCursor, count: Callable[[Any], int | float | Tensor] | None
    ) -> Iterator[MicroBatches[Any]]:
        """Yield steps of a cursor's batches, which are counted when handed out."""
        with cursor.ahead() as batches:
            for step in self._supply.steps(batches, self._next_units, self._look_ahead):
                counts: list[int | float | Tensor] = []
                step_samples = 0
                not_empty = 0
                for batch in step:
                    samples = cursor.begin_batch()
                    ranks = samples.ranks
                    step_samples += samples.step_samples
                    not_empty += samples.not_empty
                    if count is None:
                        counts.append(samples.samples)
                    elif samples.samples:
                        counts.append(count(batch))
                    else:
                        counts.append(0)  # the sample of a filler counts elsewhere
                self._begin_step(StepSize(len(step), 1))
                if count is None:
                    mean = WeightedMean.of_known(
                        counts,
                        self.optimizer,
                        ranks=ranks,
                        total=step_samples,
                        not_empty=not_empty,
                    )
                else:
                    mean = WeightedMean(counts, self.optimizer)
                yield MicroBatches(step, self._no_sync, mean)

    def _micro_batches(
        self, step: list[Batch], count: Callable[[Batch], int | float | Tensor] | None
    ) -> MicroBatches[Batch]:
        mean = None
        if count is not None:
            mean = WeightedMean(list(map(count, step)), self.optimizer)
        return MicroBatches(step, self._no_sync, mean)

    def _look_ahead(self) -> int:
        """Return the number of micro-batches to prepare before ranks report."""
        largest = math.ceil(self._units * GROWTH) + 1
        return min(largest, self._limits.most) * 2

    # -- the rule's interface ------------------------------------------------------------------

    def report(self) -> RankReport:
        """Return this rank's last step time, and the number of ready batches."""
        seconds, passes = self._timer.last
        return RankReport(seconds=seconds, timed_passes=passes, batches=self._supply.ready)

    def after_step(self, reports: Sequence[RankReport]) -> None:
        """Record the time of an optimizer step, and decide about the next steps."""
        units = self.optimizer.passes
        if self._loader is not None:
            units *= self._loader.size.per_pass
        self._timer.step_ended(units, counts=self._steps >= SKIPPED)
        self._steps += 1
        self._saved = None
        self._noise.add_step()
        self._supply.step_ended(reports)
        self._timer.add_reports(reports)
        if self._steps % EVERY == 0 or self._decides_every_step():
            self._decide()
        # In `over`, the rule describes this step until the next is handed out.
        if self._loader is None and not self._supply.hands_out:
            self._begin_step(StepSize(self._units, 1))

    def _decides_every_step(self) -> bool:
        """Return whether the best batch is unknown or distant."""
        if self._limits.goal != "time":
            return False
        if not self._port.history.average.measured:
            return self._units == 1
        decision = self._decision
        return decision.reason in ("wait", "explore") or decision.target >= GROWTH * self._units

    def _decide(self) -> None:
        fit = self._timer.times.fit()
        self._noise.forget_old()
        self._noise.set_memory()
        self._decision = decide(
            self._units,
            self._noise.measured(),
            fit,
            self._scale_per_unit,
            self._limits,
            # Two timed numbers of passes suffice, so the first step need not be timed.
            timed_here=fit is not None
            or self._steps == 1
            or self._size.units in self._timer.times.seconds_by_passes(),
        )
        self._units = self._decision.passes

    def begin_step(self, passes: int) -> None:
        """Declare the number of backward passes of the next step, if not `ramp.passes`.

        For a loop that fetches data otherwise, at the end of the data. Call it on every rank before
        the step's first pass, and divide the step's losses by `passes`. The following step has
        `ramp.passes` again.
        """
        if self._loader is not None or self._port.batch.loop.decides:
            raise RuntimeError(
                "begin_step() is for a loop that fetches data without `over` and declares its "
                "passes. Here the AdaptiveDataLoader or the trainer's loop does."
            )
        passes = whole(PASSES, passes, least=1, why=PER_STEP)
        self._port.check_between_steps("begin_step()")
        self._begin_step(StepSize(passes, 1))

    def skip_time(self) -> None:
        """Exclude the time since the last step from the next step.

        Call it after work outside of steps, such as a validation or a checkpoint.
        """
        self._timer.skip()

    def _begin_step(self, size: StepSize) -> None:
        self._expect(size)
        # Not for a short step.
        scale = self.scale
        if (
            size == self._size
            and scale != self._moments_scale
            and self._port.follow_batch(self._moments_scale, scale)
        ):
            self._moments_scale = scale

    def _expect(self, size: StepSize) -> None:
        scale_per_pass = None
        if self._loader is not None:
            scale_per_pass = self._loader.scale_per_unit * size.per_pass
        self._port.begin_step(size.passes, scale_per_pass=scale_per_pass)

    # -- seeing, saving ------------------------------------------------------------------------

    @property
    def step_time(self) -> StepTime | None:
        """The fitted time of a step; None until two numbers of passes were tried."""
        return self._timer.times.fit()

    def snapshot(self) -> dict[str, object]:
        """Return the state in plain values, for logs and `Record`."""
        snapshot: dict[str, object] = {
            "batch_scale": self.scale,
            "batch_passes": self.passes,
            "target_scale": self._scale_per_unit * self._decision.target,
            "batch_reason": self._decision.reason,
            "efficiency": None,
            "fixed_seconds": None,
            "pass_seconds": None,
            "step_seconds": None,
            "predicted_seconds": None,
        }
        noise = self._noise.measured()
        if noise is not None:
            snapshot["efficiency"] = efficiency(noise, self.scale)
        steps = self._timer.times.steps
        if steps:
            snapshot["step_seconds"] = steps[-1][1]
        fit = self._timer.times.fit()
        if fit is not None:
            snapshot["fixed_seconds"] = fit.fixed
            snapshot["pass_seconds"] = fit.per_pass
            snapshot["predicted_seconds"] = fit.seconds(steps[-1][0])
        return snapshot

    def state_dict(self) -> StateDict:
        """Return the batch and the measured times, for resuming."""
        return {
            "scale": self.scale,
            "workers": self._port.batch.workers,
            "steps": self._steps,
            "moments_scale": self._moments_scale,
            **self._timer.state_dict(),
            **self._noise.state_dict(),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue with the batch of a `state_dict`, on any number of workers.

        With a different number of workers, step times are measured again.
        """
        self._take(SavedRamp.parse(state_dict))

    def _take(self, saved: SavedRamp) -> None:
        self._saved = saved
        self._steps = saved.steps
        self._moments_scale = saved.moments_scale
        self._noise.load(saved.memory, saved.unmeasured, saved.evidence)
        self._timer = StepTimer()
        if saved.workers == self._port.batch.workers:
            self._timer = saved.timer
        self.after_load()

    def after_load(self) -> None:
        """Set the rule to this batch. Second moments follow in the next step."""
        saved = self._saved
        self._port.set_scale_of_passes()  # from now on the batch changes
        most = max(1, self._most_units)
        self._limits = replace(self._limits, most=most)
        if saved is not None:
            self._units = min(max(1, round(saved.scale / self._scale_per_unit)), most)
            self._decision = Decision(self._units, "wait", self._units)
        self._noise.rule_was_loaded()
        self._expect(self._size)


@dataclass(frozen=True)
class SavedRamp:
    scale: float
    workers: int
    steps: int
    moments_scale: float
    memory: float
    unmeasured: int
    evidence: Evidence
    timer: StepTimer

    @classmethod
    def parse(cls, state_dict: object) -> SavedRamp:
        """Return the parsed state, or raise a ValueError."""
        saved = SavedEntries(state_dict, "a Ramp")
        return cls(
            scale=saved.real("scale", above=0.0),
            workers=saved.whole("workers", least=1),
            steps=saved.whole("steps"),
            moments_scale=saved.real("moments_scale", above=0.0),
            memory=saved.real("memory", least=1.0),
            unmeasured=saved.whole("unmeasured"),
            evidence=Evidence.of_saved(saved),
            timer=StepTimer.of_saved(saved),
        )


def _no_sync_of(model: nn.Module | None) -> Callable[[], AbstractContextManager[object]]:
    """Return a context in which the model's passes accumulate."""
    if model is None:
        return nullcontext
    no_sync = getattr(model, "no_sync", None)
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of `fully_shard`
    if no_sync is None and set_sync is not None:
        return partial(_without_sync, set_sync)
    if no_sync is None:
        raise TypeError(
            f"model={type(model).__name__} has no no_sync(). Pass the module that averages the "
            "gradients, such as DistributedDataParallel, or omit model= if no module does."
        )
    contexts: Iterator[Callable[[], AbstractContextManager[object]]] = repeat(no_sync)
    if getattr(model, "static_graph", False):
        # DDP records the graph in the first pass, which must be outside `no_sync()`.
        contexts = chain([nullcontext], contexts)
    return lambda: next(contexts)()


@contextmanager
def _without_sync(set_sync: Callable[[bool], object]) -> Iterator[None]:
    """The `no_sync()` of `fully_shard`."""
    set_sync(False)
    try:
        yield
    finally:
        set_sync(True)
