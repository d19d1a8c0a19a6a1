"""Compare what several contenders cost, on a machine whose speed changes from minute to minute.

A round runs a few steps of each contender, one after the other, in an order drawn anew for every
round: whatever slows the machine down hits them all alike, and none always follows the same one
(which leaves caches and memory as it needs them).

What is reported is a ratio of medians over rounds; its confidence interval comes from drawing
rounds at random (a bootstrap), the same ones for both sides of the ratio.

A contender that is the base once more (an A/A control) shows how far a ratio is from 1 by chance.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

import torch.distributed as dist
from traffic import bytes_sent

Name, Row = TypeVar("Name"), TypeVar("Row")
Spent = dict[str, float]  # wall and CPU seconds, and bytes sent
Times = dict[Name, dict[str, list[float]]]  # the same, one for each round


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def restored(kind: type[Row], stored: Mapping[str, Any]) -> Row:
    """A row as it was before it was stored: what is a dict was a ratio."""
    ratios = {key: Ratio(**value) for key, value in stored.items() if isinstance(value, dict)}
    return kind(**{**stored, **ratios})


def shuffled(names: Sequence[Name], round_number: int) -> list[Name]:
    """The order in one round: random, and the same in every process."""
    return random.Random(round_number).sample(names, len(names))


def in_turns(turns: Mapping[Name, Callable[[], list[Spent]]], rounds: int) -> Times[Name]:
    """Take turns; a turn returns what each rank has spent.

    Seconds of CPU are summed over the ranks, wall is the slowest's, bytes are their mean.
    """
    over_ranks = {"cpu": sum, "wall": max, "sent": fmean}
    times: Times[Name] = {name: {kind: [] for kind in over_ranks} for name in turns}
    for number in range(rounds):
        for name in shuffled(list(turns), number):
            ranks = turns[name]()
            for kind, join in over_ranks.items():
                times[name][kind].append(join([rank[kind] for rank in ranks]))
    return times


def spent(step: Callable[[], object], steps: int = 1) -> Spent:
    """What this rank spends on a step; CPU seconds are those of all its threads."""
    dist.barrier()
    wall, used, sent = time.perf_counter(), time.process_time(), bytes_sent()
    for _ in range(steps):
        step()
    wall, used = time.perf_counter() - wall, time.process_time() - used
    return {"wall": wall / steps, "cpu": used / steps, "sent": (bytes_sent() - sent) / steps}


def ratio(values: Sequence[float], base: Sequence[float], draws: int = 4000) -> Ratio:
    """median(values) / median(base), where equal positions are of the same round."""
    rng = random.Random(0)
    rounds = range(len(values))
    drawn = []
    for _ in range(draws):
        chosen = rng.choices(rounds, k=len(rounds))
        drawn.append(median(values[i] for i in chosen) / median(base[i] for i in chosen))
    drawn.sort()
    return Ratio(
        median(values) / median(base),
        drawn[int(0.025 * (draws - 1))],
        drawn[int(0.975 * (draws - 1))],
    )
