"""Which runs there are, and how one is trained: as a user would without and with manyhands.

A batch of scale S is S base batches. The fixed rules take it in as few passes as are fast,
with torch's own optimizer. AdaScale and AdamScale take it in S equal parts, as that many workers
would, because they compare the parts' gradients.

Budgets, for a workload that takes T steps at scale 1:

    base      scale 1, T steps: what all others want to equal
    progress  AdaScale or AdamScale as it is meant to be used: until its progress is T
    samples   T / S steps: as many samples as the base run
    steps     as many steps as the progress run of the same seed took
    R's steps as many steps as the progress run under the rule R took, for several rules
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from quality.workloads import Batches, Data, Workload, loss_of

WARMUP = 0.1  # linear scaling: part of the training in which its factor grows from 1 to S
LEGW_WARMUP = 0.01  # LEGW: the base run's warm-up, as a part of T


@dataclass(frozen=True)
class Run:
    """One training. `method` is a fixed rule's name, "AdaScale", "AdamScale" or "plain"."""

    workload: str
    method: str
    scale: int
    budget: str
    seed: int


Rule = Callable[[Workload, int, int, int], float]


def constant(workload: Workload, scale: int, k: int, n: int) -> float:
    return 1.0


def linear(workload: Workload, scale: int, k: int, n: int) -> float:
    reached = min(1.0, (k + 1) / max(1.0, WARMUP * n))
    return 1.0 + (scale - 1.0) * reached


def square_root(workload: Workload, scale: int, k: int, n: int) -> float:
    return math.sqrt(scale)


def legw(workload: Workload, scale: int, k: int, n: int) -> float:
    """sqrt(scale), after `scale` times as many samples of warm-up as the base run would take."""
    warmup_steps = LEGW_WARMUP * workload.steps  # of `scale` batches each: `scale` times longer
    return math.sqrt(scale) * min(1.0, (k + 1) / warmup_steps)


FIXED: dict[str, Rule] = {
    "no scaling": constant,
    "linear + warm-up": linear,
    "sqrt": square_root,
    "LEGW": legw,
}


def comparison(workload: Workload, seeds: int) -> Iterator[Run]:
    """All runs. A progress run stands before the runs that take its number of steps."""
    for seed in range(seeds):
        yield Run(workload.name, "plain", 1, "base", seed)
        for scale in workload.scales:
            for budget in ("progress", "samples"):
                yield Run(workload.name, workload.adaptive, scale, budget, seed)
            for budget in ("samples", "steps"):
                for method in FIXED:
                    yield Run(workload.name, method, scale, budget, seed)


def rules_around(workload: Workload, seeds: int) -> Iterator[Run]:
    """The runs that compare rules around one optimizer, and the square root in as many steps."""
    (scale,) = workload.scales
    rules = dict.fromkeys((workload.adaptive, "AdaScale"))
    for method, size, budget in (
        ("plain", 1, "base"),
        *((rule, scale, "progress") for rule in rules),
        *(("sqrt", scale, f"{rule}'s steps") for rule in rules),
    ):
        yield from (Run(workload.name, method, size, budget, seed) for seed in range(seeds))


RULES = {"AdaScale": mh.AdaScale, "AdamScale": mh.AdamScale}


def train(workload: Workload, data: Data, run: Run, steps: int | None) -> dict[str, Any]:
    """`steps` is the number of optimizer steps, None to train until the progress is T."""
    torch.manual_seed(run.seed)
    model = data.model()
    batches = data.batches(run.seed, workload.batch)
    start = time.process_time()  # not the clock on the wall: a run may be paused
    if run.method in RULES:
        taken, finite = _train_measured(workload, model, batches, run, steps)
    else:
        assert steps is not None
        taken, finite = _train_fixed(workload, model, batches, run, steps)
    score = round(data.score(model), 5) if finite else math.nan
    seconds = round(time.process_time() - start, 2)
    return {
        "steps": taken,
        "score": score if math.isfinite(score) else None,
        "cpu_seconds": seconds,
    }


def cosine(position: float, length: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, position / length)))


def _train_fixed(
    workload: Workload, model: nn.Module, batches: Batches, run: Run, steps: int
) -> tuple[int, bool]:
    """Return the number of steps, and whether the loss stayed finite."""
    rule = {**FIXED, "plain": constant}[run.method]
    optimizer = workload.make_optimizer(model.parameters())
    passes = math.ceil(run.scale / workload.per_pass)
    for k in range(steps):
        factor = rule(workload, run.scale, k, steps)
        optimizer.param_groups[0]["lr"] = workload.lr * factor * cosine(k, steps)
        optimizer.zero_grad()
        loss = _backward(model, *batches.take(run.scale), passes)
        optimizer.step()
        if not math.isfinite(loss):
            return k + 1, False
    return steps, True


def _train_measured(
    workload: Workload, model: nn.Module, batches: Batches, run: Run, steps: int | None
) -> tuple[int, bool]:
    optimizer = RULES[run.method](
        workload.make_optimizer(model.parameters()), num_gradients_to_accumulate=run.scale
    )
    length = workload.steps if steps is None else steps
    cosine_lr = LambdaLR(optimizer, lambda k: cosine(k, length))
    by_progress = mh.ProgressScheduler(cosine_lr, optimizer, end=length)
    taken = 0
    while taken < steps if steps else not by_progress.done:
        optimizer.zero_grad()
        loss = _backward(model, *batches.take(run.scale), run.scale)
        optimizer.step()
        (cosine_lr if steps else by_progress).step()
        taken += 1
        if not math.isfinite(loss):
            return taken, False
    return taken, True


def _backward(model: nn.Module, x: Tensor, y: Tensor, passes: int) -> float:
    """The mean loss, whose gradient is accumulated over equal parts of the batch."""
    total = 0.0
    for part_x, part_y in zip(x.chunk(passes), y.chunk(passes), strict=True):
        loss = loss_of(model, part_x, part_y) / passes
        loss.backward()
        total += loss.item()
    return total
