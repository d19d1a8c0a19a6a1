"""Which runs there are, and the fixed rules they compare with.

Budgets, for a workload that takes T steps at scale 1:

    base      scale 1, T steps: what all others want to equal
    progress  AdaScale or AdamScale as it is meant to be used: until its progress is T
    samples   T / S steps: as many samples as the base run
    steps     as many steps as the progress run of the same seed took
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quality.workloads import Workload

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


# -- the fixed rules: what the learning rate is multiplied with in step k of n ---------------------

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
