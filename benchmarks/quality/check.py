"""The library's fixed rules give the numbers of a plain torch loop with that factor.

The benchmark trains the fixed rules in the plain loop, one pass per batch, because that is
faster. This check, in double precision and at every start, says that the library would do the
same: `mh.LinearScale(optimizer, scale=8, num_gradients_to_accumulate=4)` and so on.

One difference is left: the benchmark's LEGW counts its warm-up in samples, as published;
`mh.LEGWScale` (like adaptdl's) counts it in progress, so that it lasts longer where the gain
is below the scale. The check gives the plain loop the progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import manyhands as mh
from manyhands.scaling._rules import legw_factor
from quality.workloads import Data, Workload, loss_of

STEPS, SCALE, PASSES, EPOCHS, SAMPLES = 6, 8, 4, 0.1, 2000
Wrap = Callable[[Optimizer], mh.ScalingRuleBase]


def fixed_rules(workload: Workload, data: Data) -> None:
    options: dict[str, Any] = {"scale": SCALE, "num_gradients_to_accumulate": PASSES}

    def legw(optimizer: Optimizer) -> mh.ScalingRuleBase:
        size = workload.batch
        return mh.LEGWScale(EPOCHS, SAMPLES, optimizer, batch_size=size, **options)

    def legw_by_hand(progress: float) -> float:
        return legw_factor(SCALE, progress, EPOCHS, SAMPLES, workload.batch)

    pairs: tuple[tuple[Wrap, Callable[[float], float]], ...] = (
        (lambda optimizer: mh.LinearScale(optimizer, **options), lambda progress: SCALE),
        (lambda optimizer: mh.SqrtScale(optimizer, **options), lambda progress: math.sqrt(SCALE)),
        (legw, legw_by_hand),
    )
    for wrap, factor in pairs:
        ours, progress = _with_manyhands(workload, data, wrap)
        plain = _plain(workload, data, [factor(value) for value in progress])
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def _with_manyhands(workload: Workload, data: Data, wrap: Wrap) -> tuple[nn.Module, list[float]]:
    """The trained model, and the progress before each step."""
    model, batches = _start(workload, data)
    optimizer = wrap(workload.make_optimizer(model.parameters()))
    progress = []
    for x, y in batches:
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(PASSES), y.chunk(PASSES), strict=True):
            (loss_of(model, part_x, part_y) / PASSES).backward()
        progress.append(optimizer.progress)
        optimizer.step()
    return model, progress


def _plain(workload: Workload, data: Data, factors: list[float]) -> nn.Module:
    model, batches = _start(workload, data)
    optimizer = workload.make_optimizer(model.parameters())
    for (x, y), factor in zip(batches, factors, strict=True):
        optimizer.param_groups[0]["lr"] = workload.lr * factor
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model


def _start(workload: Workload, data: Data) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = data.model().double()
    stream = data.batches(0, workload.batch)
    batches = [stream.take(SCALE) for _ in range(STEPS)]
    return model, [(x.double() if x.is_floating_point() else x, y) for x, y in batches]
