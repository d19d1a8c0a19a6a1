"""Compare what several variants cost, on a machine whose speed changes from minute to minute.

All variants live in the same processes. A round runs a few steps of each, one variant after the
other, in an order drawn anew for every round: whatever slows the machine down hits them all
alike, and none always follows the same one (which leaves caches and memory as it needs them).

What is reported is a ratio of medians over rounds; its confidence interval comes from drawing
rounds at random (a bootstrap), the same ones for both sides of the ratio.

A variant that is the base once more (an A/A control) shows how far a ratio is from 1 by chance.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def shuffled(names: Sequence[str], round_number: int) -> list[str]:
    """The order in one round: random, and the same in every process."""
    return random.Random(round_number).sample(names, len(names))


def measure(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    steps_per_round: int,
    ready: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds per step of this process: name -> "wall", "cpu" -> one per round.

    CPU seconds are those of all threads of this process. `ready` is called before each variant's
    turn; with several processes it is their barrier.
    """
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in steps}
    for number in range(rounds):
        for name in shuffled(list(steps), number):
            step = steps[name]
            ready()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps_per_round):
                step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            times[name]["wall"].append(wall / steps_per_round)
            times[name]["cpu"].append(cpu / steps_per_round)
    return times


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
