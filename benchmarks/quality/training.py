"""One run. The loops are straight: what a user would write, without and with manyhands.

A batch of scale S is S base batches. The fixed rules take it in as few passes as are fast,
with torch's own optimizer. AdaScale and AdamScale take it in `passes` equal parts, as that many
workers would, because they compare the parts' gradients.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from quality.plan import FIXED, SEARCHED, Run, constant
from quality.workloads import Batches, Data, Workload, loss_of

RULES = {"AdaScale": mh.AdaScale, "AdamScale": mh.AdamScale}
CURVE_POINTS = 40


@dataclass
class Curve:
    """Step, progress, loss and gain, averaged over equal parts of the run's progress."""

    length: float
    points: list[tuple[int, float, float, float]] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _gains: list[float] = field(default_factory=list)

    def add(self, step: int, progress: float, loss: float, gain: float) -> None:
        self._losses.append(loss)
        self._gains.append(gain)
        if progress >= self.length * (len(self.points) + 1) / CURVE_POINTS:
            mean_loss = sum(self._losses) / len(self._losses)
            mean_gain = sum(self._gains) / len(self._gains)
            self.points.append((step, _short(progress), _short(mean_loss), _short(mean_gain)))
            self._losses, self._gains = [], []


@dataclass
class Outcome:
    steps: int
    progress: float  # in steps at scale 1; for the fixed rules the sum of their factors
    score: float
    finite: bool
    cpu_seconds: float
    curve: list[tuple[int, float, float, float]]


Parts = tuple[int, float, bool, Curve]  # steps, progress, whether the loss stayed finite


def train(workload: Workload, data: Data, run: Run, steps: int | None) -> Outcome:
    """`steps` is the number of optimizer steps, None to train until the progress is T."""
    torch.manual_seed(run.seed)
    model = data.model()
    batches = data.batches(run.seed, workload.batch)
    start = time.process_time()  # not the clock on the wall: a run may be paused
    if run.method in RULES:
        parts = _train_measured(workload, model, batches, run, steps)
    else:
        assert steps is not None
        parts = _train_fixed(workload, model, batches, run, steps)
    taken, progress, finite, curve = parts
    score = data.score(model) if finite else math.nan
    return Outcome(taken, progress, score, finite, time.process_time() - start, curve.points)


def cosine(position: float, length: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, position / length)))


def _train_fixed(
    workload: Workload, model: nn.Module, batches: Batches, run: Run, steps: int
) -> Parts:
    rule = {**FIXED, **SEARCHED, "plain": constant}[run.method]
    optimizer = workload.make_optimizer(model.parameters())
    passes = math.ceil(run.scale / workload.per_pass)
    curve = Curve(steps)
    progress = 0.0
    for k in range(steps):
        factor = rule(workload, run.scale, k, steps)
        optimizer.param_groups[0]["lr"] = workload.lr * factor * cosine(k, steps)
        x, y = batches.take(run.scale)
        optimizer.zero_grad()
        loss = _backward(model, x, y, passes)
        optimizer.step()
        progress += factor
        if not math.isfinite(loss):
            return k + 1, progress, False, curve
        curve.add(k + 1, k + 1, loss, factor)
    return steps, progress, True, curve


def _train_measured(
    workload: Workload, model: nn.Module, batches: Batches, run: Run, steps: int | None
) -> Parts:
    optimizer = RULES[run.method](
        workload.make_optimizer(model.parameters()),
        scale=run.scale,
        num_gradients_to_accumulate=run.passes,
        smoothing=run.smoothing,
    )
    length = workload.steps if steps is None else steps
    cosine_lr = LambdaLR(optimizer, lambda k: cosine(k, length))
    by_progress = mh.ProgressScheduler(cosine_lr, optimizer, end=length)
    curve = Curve(length)
    taken = 0
    while taken < steps if steps else not by_progress.done:
        x, y = batches.take(run.scale)
        optimizer.zero_grad()
        loss = _backward(model, x, y, run.passes)
        optimizer.step()
        (cosine_lr if steps else by_progress).step()
        taken += 1
        if not math.isfinite(loss):
            return taken, optimizer.progress, False, curve
        position = taken if steps else optimizer.progress
        curve.add(taken, position, loss, optimizer.gain())
    return taken, optimizer.progress, True, curve


def _backward(model: nn.Module, x: Tensor, y: Tensor, passes: int) -> float:
    """The mean loss, whose gradient is accumulated over equal parts of the batch."""
    total = 0.0
    for part_x, part_y in zip(x.chunk(passes), y.chunk(passes), strict=True):
        loss = loss_of(model, part_x, part_y) / passes
        loss.backward()
        total += loss.item()
    return total


def _short(value: float) -> float:
    return float(f"{value:.4g}")
