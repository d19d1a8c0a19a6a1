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
    settings: str  # what else the result depends on; results of other settings are not used
    method: str
    scale: int
    budget: str
    seed: int
    passes: int = 0  # gradients measured per step; 0 for the rules that measure nothing
    smoothing: float | None = None  # None is the library's default

    @property
    def key(self) -> str:
        parts = (self.workload, self.settings, self.method, f"S{self.scale}", self.budget)
        study = () if self.smoothing is None else (f"smoothing{self.smoothing:g}",)
        return "/".join((*parts, f"n{self.passes}", *study, f"seed{self.seed}"))


def settings(workload: Workload) -> str:
    return f"lr{workload.lr:g}-batch{workload.batch}-T{workload.steps}"


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


def searched(factor: int) -> Rule:
    """A constant factor with linear scaling's warm-up."""
    return lambda workload, scale, k, n: linear(workload, factor, k, n)


SEARCHED: dict[str, Rule] = {f"×{factor}": searched(factor) for factor in (2, 4, 8, 16)}


# -- the lists of runs ----------------------------------------------------------------------------


def comparison(workload: Workload, seeds: int) -> Iterator[Run]:
    """The benchmark. A progress run stands before the runs that take its number of steps."""
    what = (workload.name, settings(workload))
    for seed in range(seeds):
        yield Run(*what, "plain", 1, "base", seed)
        for scale in workload.scales:
            yield Run(*what, workload.adaptive, scale, "progress", seed, passes=scale)
            yield Run(*what, workload.adaptive, scale, "samples", seed, passes=scale)
            for budget in ("samples", "steps"):
                for method in FIXED:
                    yield Run(*what, method, scale, budget, seed)


def study(workload: Workload, seeds: int) -> Iterator[Run]:
    """Does it matter how many gradients are measured per step, and how they are smoothed?

    And: which constant factor would have been as good, had somebody searched for it?
    """
    what = (workload.name, settings(workload))
    scale = max(workload.scales)
    default = 1.0 - scale / 1000.0  # with as many gradients as the scale
    for seed in range(seeds):
        for method in SEARCHED:
            yield Run(*what, method, scale, "steps", seed)
        for passes in (8, 2):
            for smoothing in (None, default):
                yield Run(*what, workload.adaptive, scale, "progress", seed, passes, smoothing)
        for smoothing in (0.0, 0.9, 0.99):
            yield Run(*what, workload.adaptive, scale, "progress", seed, scale, smoothing)
