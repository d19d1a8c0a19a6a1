"""`Ramp`: how many micro-batches shall the next step have?

After each step every rank knows the same three things, because they travel in the one small
collective that a scaling rule has anyway (`scaling/_step_stats.py`):

    the noise         averaged by the rule, up to this step
    the step's time   of the slowest rank: each reports how long its step before took
    the batches left  of the rank with the fewest: each reports how many it has ready

So all ranks come to the same decision (`_decision.py`) without a further collective. A decision
changes the number of backward passes of the next steps, and with it the scale. The rule then
changes the learning rate as it does at any scale.

`over` keeps micro-batches ready beyond the step under way. A rank whose data has ended reports how
many are left, before any rank needs more. All ranks end together, with the last whole step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from manyhands.ramp._decision import Decision, Goal, Limits, decide
from manyhands.ramp._evidence import Evidence
from manyhands.ramp._goodput import Noise, StepTime, efficiency
from manyhands.ramp._step_times import StepTimes
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._step_stats import RankReport

Batch = TypeVar("Batch")

GOALS = ("time", "samples", "steps")
NOISE_LASTS = 10  # decisions: after that many without a new measurement the noise is unknown
SKIPPED = 3  # steps at the beginning whose times do not count: they compile, allocate, connect


class MicroBatches(Generic[Batch]):
    """The micro-batches of one step: a sequence.

    While it is iterated, all but the last are inside the model's `no_sync()`, if it has one.
    """

    def __init__(
        self, batches: Sequence[Batch], no_sync: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._batches = batches
        self._no_sync = no_sync

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        *others, last = self._batches
        for batch in others:
            with self._no_sync():
                yield batch
        yield last


class Ramp:
    """Choose the size of each step's batch while training: as many micro-batches as pay.

    Tune the learning rate at the small batch, wrap the optimizer with a scaling rule, and take
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

    Loops that fetch their own data run `ramp.passes` backward passes in each step, and read it
    again after `optimizer.step()`. It is the same on all ranks.

    Args:
        optimizer: a scaling rule, such as `AdaScale` or `AdamScale`. The rate is its task.
        max_scale: the largest batch (all workers, all passes) in small batches, as the rule's
            `scale`. Where a further doubling would cost quality, set it lower.
        goal: "time", the most progress in a second; "samples", the largest batch whose samples
            are still worth `efficiency` of a small batch's; "steps", the largest batch.
        efficiency: the least worth of a sample, with `goal="samples"`.
        every: steps between two decisions.
        growth: the largest factor by which one decision changes the batch.
        model: the module around which gradients are averaged (`DistributedDataParallel`,
            `ShardedDataParallel`, `FullyShardedDataParallel`). `over` then averages them once a
            step, and not once a pass.

    Count a schedule in progress (`ProgressScheduler`) or in samples. Counted in optimizer steps it
    would change with the batch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_scale: float,
        *,
        goal: Goal = "time",
        efficiency: float = 0.5,
        every: int = 5,
        growth: float = 1.5,
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(optimizer, ScalingRuleBase):
            raise TypeError(
                f"Ramp needs an optimizer under a scaling rule, got {type(optimizer).__name__}: "
                "the rule measures the noise, and scales the learning rate with the batch. Write "
                "mh.AdaScale(optimizer) for SGD, mh.AdamScale(optimizer) for Adam and AdamW."
            )
        if goal not in GOALS:
            raise ValueError(f"goal must be one of {', '.join(GOALS)}, got {goal!r}.")
        if not 0.0 < efficiency <= 1.0:
            raise ValueError(f"efficiency must be above 0 and at most 1, got {efficiency}.")
        if every < 1 or not growth > 1.0:
            raise ValueError(
                f"every must be at least 1 and growth above 1, got every={every}, growth={growth}."
            )
        if optimizer._observer is not None:
            raise ValueError("this optimizer has a Ramp already: one decides.")
        self.optimizer = optimizer
        self._no_sync = _no_sync_of(model)
        self._every = every
        batch = optimizer._batch
        if batch.scale is not None:  # of the whole batch; from now on the batch changes
            optimizer.set_scale_per_pass(batch.scale / batch.passes)
        self._limits = Limits(
            goal=goal,
            efficiency=efficiency,
            most=self._most_passes(max_scale),
            growth=growth,
        )
        self.max_scale = float(max_scale)
        self._passes = batch.passes
        self._decision = Decision(self._passes, "wait", self._passes)
        self._times = StepTimes()
        self._evidence = Evidence()
        self._steps = 0  # since this object was made
        self._unmeasured = 0  # decisions since the noise was last measured
        self._timed = (0.0, 0)  # the seconds and the passes of the last step on this rank
        self._step_began: float | None = None
        self._ready = 0  # micro-batches that `over` has ready
        self._left = 0  # how many all ranks had left when they last reported
        optimizer._observer = self

    def _most_passes(self, max_scale: float) -> int:
        rule, batch = self.optimizer, self.optimizer._batch
        per_pass = batch.scale_for(1)
        most = math.floor(max_scale / per_pass + 1e-9)
        if most < batch.passes:
            raise ValueError(
                f"max_scale={max_scale:g} is below the present scale of {rule.scale:g}: a pass on "
                f"{batch.workers} worker(s) is a scale of {per_pass:g}, and a step has "
                f"{batch.passes} of them. Raise max_scale, or begin with fewer passes or a smaller "
                "micro-batch."
            )
        rule._check_batch(batch, most)  # raises if the rule cannot scale this optimizer that far
        return most

    # -- what a loop asks for ------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Backward passes of the next step; all ranks have the same number."""
        return self._passes

    @property
    def scale(self) -> float:
        """Size of the next step's batch, in small batches."""
        return self.optimizer._batch.scale_for(self._passes)

    def over(self, loader: Iterable[Batch]) -> Iterator[MicroBatches[Batch]]:
        """Yield the micro-batches of one step after another, until the data has ended.

        Take one `optimizer.step()` for each. At the end of the data a step may have fewer
        micro-batches than before. If ranks have different numbers of batches, all end when the
        shortest does.
        """
        batches = iter(loader)
        ready: deque[Batch] = deque()
        _fill(ready, batches, self._look_ahead())
        self._left = self._agree_on_start(len(ready))
        self._step_began = None  # the time between two passes over the data is not a step's
        while True:
            passes = min(self._passes, self._left)
            if passes == 0:
                return
            self._use(passes)
            step = [ready.popleft() for _ in range(passes)]
            _fill(ready, batches, self._look_ahead())
            self._ready = len(ready)
            self._left -= passes  # `after_step` knows better, if the step is taken
            yield MicroBatches(step, self._no_sync)

    def _look_ahead(self) -> int:
        """Return how many micro-batches the steps to come may have, before they are reported."""
        largest = max(self._passes + 1, math.ceil(self._passes * max(self._limits.growth, 1.25)))
        # With delayed statistics the reports are one step late.
        return min(largest, self._limits.most) * (3 if self.optimizer._delayed else 2)

    def _agree_on_start(self, ready: int) -> int:
        """Return how many micro-batches the rank with the fewest has: once in a pass over data."""
        ranks = self.optimizer._ranks
        if ranks.size == 1:
            return ready
        param = next(p for group in self.optimizer.param_groups for p in group["params"])
        return int(min(number for (number,) in ranks.all_gather([float(ready)], param.device)))

    # -- what the rule calls -------------------------------------------------------------------

    def report(self) -> RankReport:
        """Return this rank's time of the step before, and how many batches it has ready."""
        seconds, passes = self._timed
        return RankReport(seconds=seconds, timed_passes=passes, batches=self._ready)

    def after_step(self, reports: Sequence[RankReport]) -> None:
        """Time the step that has ended, and decide about the next ones."""
        passes = self.optimizer._batch.passes
        now = time.perf_counter()
        if self._step_began is not None and self._steps >= SKIPPED:
            self._timed = (now - self._step_began, passes)
        self._step_began = now
        self._steps += 1
        self._evidence.add(passes * self.optimizer._batch.workers, self.optimizer.smoothing)
        if not reports:  # delayed statistics, and this was the first step
            return
        # with delayed statistics the reports are older than the step that has just ended
        used_since = passes if self.optimizer._delayed else 0
        self._left = int(min(report.batches for report in reports)) - used_since
        slowest = max(reports, key=lambda report: report.seconds)
        if slowest.seconds > 0.0:
            self._times.add(int(slowest.timed_passes), slowest.seconds)
        if self._steps % self._every == 0:
            self._decide(passes)
        self._use(self._passes)

    def _decide(self, passes: int) -> None:
        """Choose the passes of the next steps; the last step had `passes`."""
        # A single gradient has nothing to be compared with.
        compared = passes * self.optimizer._batch.workers > 1
        self._unmeasured = 0 if compared else self._unmeasured + 1
        noise = self._noise() if self._unmeasured <= NOISE_LASTS else None
        fit = self._times.fit()
        self._decision = decide(
            self._passes,
            noise,
            fit,
            self._scale_per_pass,
            self._limits,
            timed_here=fit is not None or self._passes in self._times.medians(),
        )
        self._passes = self._decision.passes

    def _use(self, passes: int) -> None:
        """Let the rule expect so many passes; all ranks do so between the same two steps."""
        batch = self.optimizer._batch
        if not batch.counts_passes:
            batch.passes = passes

    @property
    def _scale_per_pass(self) -> float:
        return self.optimizer._batch.scale_for(1)

    def _noise(self) -> Noise | None:
        average = self.optimizer._tracker.average
        if not average.measured:
            return None
        # One standard error above the average: see `_evidence.py`.
        var = average.var_of()
        return Noise(average.sqr_of() + self._evidence.error * var, var)

    # -- seeing, saving ------------------------------------------------------------------------

    @property
    def step_time(self) -> StepTime | None:
        """The fitted time of a step; None until two numbers of passes were tried."""
        return self._times.fit()

    def snapshot(self) -> dict[str, Any]:
        """Return the state in plain values, for logs and `Record`."""
        noise, fit = self._noise(), self._times.fit()
        seconds, passes = self._times.steps[-1][::-1] if self._times.steps else (None, None)
        return {
            "batch_passes": self._passes,
            "batch_target": self._decision.target,
            "batch_reason": self._decision.reason,
            "efficiency": None if noise is None else efficiency(noise, self.scale),
            "fixed_seconds": None if fit is None else fit.fixed,
            "pass_seconds": None if fit is None else fit.per_pass,
            "step_seconds": seconds,
            "predicted_seconds": None if fit is None or passes is None else fit.seconds(passes),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs: the batch, and the times that were measured."""
        return {
            "version": 1,
            "scale": self.scale,
            "workers": self.optimizer._batch.workers,
            "steps": self._steps,
            "unmeasured": self._unmeasured,
            "times": [[passes, seconds] for passes, seconds in self._times.steps],
            "timed": list(self._timed),
            "evidence": [self._evidence.squares, self._evidence.weight],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the batch of a `state_dict`, on any number of workers.

        With another number of workers a step takes another time: it is measured anew.
        """
        version = state_dict.get("version")
        if version != 1:
            raise ValueError(f"the state dict's version is {version!r}, this Ramp's is 1.")
        passes = max(1, round(float(state_dict["scale"]) / self._scale_per_pass))
        self._passes = min(passes, self._limits.most)
        self._decision = Decision(self._passes, "wait", self._passes)
        self._times = StepTimes()
        self._steps, self._timed, self._step_began = int(state_dict["steps"]), (0.0, 0), None
        self._unmeasured = int(state_dict["unmeasured"])
        squares, weight = state_dict["evidence"]
        self._evidence = Evidence(float(squares), float(weight))
        if int(state_dict["workers"]) == self.optimizer._batch.workers:
            for timed_passes, seconds in state_dict["times"]:
                self._times.add(int(timed_passes), float(seconds))
            seconds, timed_passes = state_dict["timed"]
            self._timed = float(seconds), int(timed_passes)
        self._use(self._passes)


def _fill(ready: deque[Batch], batches: Iterator[Batch], count: int) -> None:
    """Fetch micro-batches until `count` are ready, or the data has ended."""
    while len(ready) < count:
        try:
            ready.append(next(batches))
        except StopIteration:
            return


def _no_sync_of(model: nn.Module | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a pass of this model accumulate, without averaging over the ranks."""
    if model is None:
        return nullcontext
    no_sync = getattr(model, "no_sync", None)
    if no_sync is not None:
        return no_sync
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of `fully_shard`
    if set_sync is None:
        raise TypeError(
            f"model={type(model).__name__} has no no_sync(). Give the module that averages the "
            "gradients (DistributedDataParallel, ShardedDataParallel, FullyShardedDataParallel), "
            "or leave model=... out if nothing averages them."
        )

    @contextmanager
    def without_sync() -> Iterator[None]:
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)

    return without_sync
