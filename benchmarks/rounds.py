"""Compare what several contenders cost, on a machine whose speed changes from minute to minute.

A round runs a few steps of each contender, one after the other, in an order drawn anew for every
round, so that whatever slows the machine down hits all alike. A result is a ratio of medians over
rounds; its confidence interval comes from drawing rounds at random (a bootstrap), the same rounds
for both sides. A contender that repeats the base (an A/A control) shows the noise of a ratio.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

import torch.distributed as dist
from traffic import bytes_sent

Name = TypeVar("Name", bound=Hashable)
Row = TypeVar("Row")
Spent = dict[str, float]  # wall and CPU seconds, and bytes sent
Times = dict[Name, dict[str, list[float]]]  # the same, one for each round
OVER_RANKS: dict[str, Callable[[list[float]], float]] = {"cpu": sum, "wall": max, "sent": fmean}


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def restored(kind: Callable[..., Row], stored: Mapping[str, Any]) -> Row:
    """Return a row as it was before it was stored: a dict was a ratio."""
    ratios = {key: Ratio(**value) for key, value in stored.items() if isinstance(value, dict)}
    return kind(**{**stored, **ratios})


def shuffled(names: Sequence[Name], round_number: int) -> list[Name]:
    """Return the order in one round: random, and the same in every process."""
    return random.Random(round_number).sample(names, len(names))


def in_turns(turns: Mapping[Name, Callable[[], list[Spent]]], rounds: int) -> Times[Name]:
    """Take turns; a turn returns what each rank has spent.

    CPU seconds are summed over the ranks, wall is the slowest rank's, bytes are the mean.
    """
    times: Times[Name] = {name: {kind: [] for kind in OVER_RANKS} for name in turns}
    for number in range(rounds):
        for name in shuffled(list(turns), number):
            ranks = turns[name]()
            for kind, join in OVER_RANKS.items():
                times[name][kind].append(join([rank[kind] for rank in ranks]))
    return times


def spent(step: Callable[[], object], steps: int = 1) -> Spent:
    """Return this rank's costs of a step; CPU seconds are those of all threads."""
    dist.barrier()
    wall = time.perf_counter()
    cpu = time.process_time()
    sent = bytes_sent()
    for _ in range(steps):
        step()
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    return {"wall": wall / steps, "cpu": cpu / steps, "sent": (bytes_sent() - sent) / steps}


def ratio(values: Sequence[float], base: Sequence[float], draws: int = 4000) -> Ratio:
    """Return median(values) / median(base), where equal positions are of the same round."""
    rng = random.Random(0)
    rounds = range(len(values))
    drawn = []
    for _ in range(draws):
        chosen = rng.choices(rounds, k=len(rounds))
        drawn.append(median(values[i] for i in chosen) / median(base[i] for i in chosen))
    drawn.sort()
    low = drawn[int(0.025 * (draws - 1))]
    high = drawn[int(0.975 * (draws - 1))]
    return Ratio(median(values) / median(base), low, high)
