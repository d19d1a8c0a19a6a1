"""The ways to train that `time_to_loss.py` compares, the lines, and a rank that trains.

Its clock stops for evaluations. After every `evaluate_every` small-batch steps of progress (in
blocks: after each sync round) rank 0 measures the loss on held-out samples and sends it to all,
with the moment at which they go on. The ranks are on one machine and read one clock, so they go on
together.

The loss that counts is the mean of those measured during the last `smooth_over` of progress.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from blocks.contenders import diloco
from quality.workloads import WORKLOADS, Data, Pictures, Workload, loss_of
from slow_link import Link, Terms, slow_link
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from traffic import bytes_sent

import manyhands as mh
from manyhands.ramp import _observed

MAX_SCALE = 128
# DiLoCo's, found by trial: at a constant rate a large outer momentum keeps the loss high.
OUTER = {"lr": 1.0, "momentum": 0.5}


@dataclass(frozen=True)
class Way:
    name: str
    passes: int = 1  # micro-batches of every step on each rank, without `ramp`
    rule: bool = False  # AdaScale; without it the rate stays as it was tuned
    ramp: bool = False
    every: int = 0  # steps of a block of DiLoCo; 0: DDP

    def prepare(self, bare: nn.Module, optimizer: Optimizer, ranks: int) -> Prepared:
        model = bare if self.every else DistributedDataParallel(bare)
        rule = None
        ramp = None
        if self.rule:
            alone = 1 if self.every else None  # inside blocks a worker is alone
            rule = mh.AdaScale(optimizer, world_size=alone, num_gradients_to_accumulate=self.passes)
            optimizer = rule
        if self.every:
            optimizer = diloco(**OUTER)(optimizer, self.every, bare)
        if rule is not None and self.ramp:
            if self.every:
                ramp = mh.Ramp(rule, MAX_SCALE // ranks)
            else:
                ramp = mh.Ramp(rule, MAX_SCALE, model=model)
        return Prepared(model, optimizer, rule, ramp)


@dataclass(frozen=True)
class Prepared:
    """A wrapped model and optimizer, and the rule and `Ramp` inside."""

    model: nn.Module
    optimizer: Any
    rule: mh.AdaScale | None
    ramp: mh.Ramp | None


PLAIN = Way("DDP")
RAMP = Way("DDP + AdaScale + Ramp", rule=True, ramp=True)
WAYS = {
    way.name: way
    for way in (
        PLAIN,
        Way("DDP + AdaScale, 1 pass", rule=True),
        Way("DDP + AdaScale, 4 passes", passes=4, rule=True),
        Way("DDP + AdaScale, 16 passes", passes=16, rule=True),
        RAMP,
        Way("DiLoCo, H = 16", every=16),
        Way("DiLoCo, H = 64", every=64),
        Way("DiLoCo, H = 16, Ramp inside", rule=True, ramp=True, every=16),
    )
}


@dataclass(frozen=True)
class Line:
    """A line of `terms` between two hosts, or loopback."""

    name: str
    terms: Terms | None = None

    def laid(self) -> AbstractContextManager[Link | None]:
        return nullcontext() if self.terms is None else slow_link(self.terms)


LINES = {
    line.name: line
    for line in (
        Line("loopback"),
        Line("1 Gbit/s", Terms(rate=1e9, delay=0.0001)),
        Line("50 Mbit/s, 20 ms", Terms()),
    )
}


AHEAD = 0.03  # seconds from the end of an evaluation to the moment when all ranks go on
HELD_OUT = 2000  # samples


@dataclass(frozen=True)
class Task:
    workload: str
    small_steps: int  # the run at the small batch, of which the target is taken
    at: float = 0.85  # of that run
    evaluate_every: float = 10.0  # small-batch steps of progress
    smooth_over: float = 40.0
    limit: float = 180.0  # seconds after which a run is given up

    @property
    def about(self) -> Workload:
        return next(workload for workload in WORKLOADS if workload.name == self.workload)


MNIST = Task("mnist-sgd", small_steps=900)
DIGITS = Task("digits-sgd", small_steps=80, limit=5.0)  # for a smoke test


@dataclass
class SmoothLoss:
    """The mean of the losses during the last `over` of progress."""

    over: float
    seen: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, progress: float, loss: float) -> float:
        """Return the mean, with this loss in it."""
        self.seen.append((progress, loss))
        while self.seen[0][0] <= progress - self.over:
            self.seen.popleft()
        return fmean(value for _, value in self.seen)


class TrainingClock:
    """Seconds of training: evaluations are left out. `Ramp` reads it as the module `time`."""

    def __init__(self) -> None:
        self.paused = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() - self.paused

    def pause(self, until: Callable[[], float]) -> None:
        """Call `until`, which returns a moment, and go on at that moment."""
        began = time.perf_counter()
        moment = until()
        time.sleep(max(0.0, moment - time.perf_counter()))
        self.paused += time.perf_counter() - began


def held_out_loss(data: Data, model: nn.Module) -> float:
    assert isinstance(data, Pictures)
    x, y = data.test
    apart = max(1, len(x) // HELD_OUT)
    with torch.no_grad():
        return loss_of(model, x[::apart], y[::apart]).item()


def target_of(task: Task, folder: Path, seeds: Sequence[int] = (0, 1, 2)) -> float:
    """Return the loss that one process at the small batch reaches, in the mean over the seeds."""
    return fmean(_small_batch_loss(task, folder, seed) for seed in seeds)


def _small_batch_loss(task: Task, folder: Path, seed: int) -> float:
    data = task.about.load(folder)
    torch.manual_seed(seed)
    model = data.model()
    batches = data.batches(seed, task.about.batch)
    optimizer = task.about.make_optimizer(model.parameters())
    smooth = SmoothLoss(task.smooth_over)
    loss = float("inf")
    for step in range(1, round(task.at * task.small_steps) + 1):
        loss_of(model, *batches.take(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % task.evaluate_every == 0:
            loss = smooth.add(step, held_out_loss(data, model))
    return loss


Batch = tuple[Tensor, Tensor]


class Rank:
    def __init__(
        self, task: Task, folder: Path, way: Way, seed: int, target: float, rank: int
    ) -> None:
        self.task = task
        self.way = way
        self.target = target
        self.rank = rank
        self.data = task.about.load(folder)
        torch.manual_seed(seed)  # all ranks begin with the same parameters
        self.bare = self.data.model()
        self.batches = self.data.batches(1000 * seed + rank, task.about.batch)
        self.ranks = dist.get_world_size()
        optimizer = task.about.make_optimizer(self.bare.parameters())
        self.clock = TrainingClock()
        mock.patch.object(_observed, "time", self.clock).start()
        self.made: Prepared = way.prepare(self.bare, optimizer, self.ranks)
        self.smooth = SmoothLoss(task.smooth_over)
        self.loss = float("inf")

    def train(self) -> dict[str, Any]:
        """Train until the loss is reached, or the time is over."""
        optimizer = self.made.optimizer
        model = self.made.model
        passes_of_steps: list[int] = []
        self.clock.pause(self._together)
        began = self.clock.perf_counter()
        sent = bytes_sent()
        now = began
        evaluated = 0.0  # progress at the last evaluation
        over = False
        for passes, micro_batches in self._steps():
            for batch in micro_batches:
                (loss_of(model, *batch) / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
            passes_of_steps.append(passes)
            now = self.clock.perf_counter()
            progress = self._progress(len(passes_of_steps))
            if self._is_time_to_evaluate(len(passes_of_steps), progress - evaluated):
                evaluated = progress
                over = self._evaluate(progress, now - began)
            if over:
                break
        return {
            "loss": self.loss,
            "seconds": now - began,
            "steps": len(passes_of_steps),
            "samples": self.task.about.batch * sum(passes_of_steps),
            "sent": bytes_sent() - sent,
            "mean_passes": fmean(passes_of_steps),
            **self._step_times(),
        }

    def _steps(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield the number of micro-batches of each step, and the micro-batches."""
        stream = self._stream()
        if self.made.ramp is None:
            while True:
                yield self.way.passes, self._accumulated(stream)
        for micro_batches in self.made.ramp.over(stream):
            yield len(micro_batches), iter(micro_batches)

    def _stream(self) -> Iterator[Batch]:
        while True:
            yield self.batches.take(1)

    def _accumulated(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        """Yield a step's micro-batches; gradients are averaged in the last one's backward."""
        for left in reversed(range(self.way.passes)):
            model = self.made.model
            if left > 0 and isinstance(model, DistributedDataParallel):
                with model.no_sync():
                    yield next(stream)
            else:
                yield next(stream)

    def _progress(self, steps: int) -> float:
        """Return how many small-batch steps were made; in blocks and plain DDP, any steps."""
        rule = self.made.rule
        if rule is None or self.way.every:
            return float(steps)
        return rule.progress

    def _is_time_to_evaluate(self, steps: int, progress: float) -> bool:
        """Say the same on all ranks. In blocks only a sync round gives all the same parameters."""
        if self.way.every:
            return steps % self.way.every == 0
        return progress >= self.task.evaluate_every

    def _evaluate(self, progress: float, seconds: float) -> bool:
        """Return whether training is over; the clock stands meanwhile."""
        over = torch.zeros(1)

        def evaluate() -> float:
            if self.rank == 0:
                self.loss = self.smooth.add(progress, held_out_loss(self.data, self.bare))
                over.fill_(self.loss <= self.target or seconds > self.task.limit)
            dist.broadcast(over, 0)
            return self._together()

        self.clock.pause(evaluate)
        return bool(over)

    def _together(self) -> float:
        """Return the moment at which all ranks go on."""
        moment = torch.tensor([time.perf_counter() + AHEAD], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        return moment.item()

    def _step_times(self) -> dict[str, float]:
        """Return a and b, as `Ramp` has measured them."""
        ramp = self.made.ramp
        if ramp is None or ramp.step_time is None:
            return {}
        fit = ramp.step_time
        return {"fixed_ms": 1e3 * fit.fixed, "pass_ms": 1e3 * fit.per_pass}
