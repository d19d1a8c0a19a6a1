"""A crew as events: what faults cost 8 workers, and what they would cost thousands.

A worker's block counts if the worker is there from the round before to the round at its end. Faults
come at random times, at a rate, and hit random workers. From the runs it takes what was measured:
how long the others' block is delayed, and how long the worker is away until it waits to join. It
waits for the next round, and counts from the round after that. Each round in which somebody is lost
or comes in costs one regrouping, which grows with the number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recoveries:
    delays: Sequence[float]  # of the block that it hits
    away: Sequence[float]  # until the worker waits to join

    @classmethod
    def of(cls, measured: Mapping[str, Any], block: float) -> Recoveries:
        # A worker that is back has waited for half a block on average, and held one.
        return cls(measured["delays"], [max(0.0, s - 1.5 * block) for s in measured["back"]])


def kept(
    workers: int,
    block: float,
    interval: float,
    kinds: Sequence[Recoveries],
    *,
    regroup: float = 0.0,
    rounds: int = 2000,
    seed: int = 0,
) -> float:
    """Return the share of the throughput that is kept with a fault every `interval` seconds.

    `regroup` is what a regrouping costs beyond the measured delays, in seconds.
    """
    dice = random.Random(seed)
    now = 0.0
    counted = 0
    due = dice.expovariate(1 / interval)
    comes: dict[int, float] = {}  # when each worker that is away waits to join
    for _ in range(rounds):
        ends = now + block
        lost = set()
        delay = 0.0
        while due < ends + delay:
            worker = dice.randrange(workers)
            kind = dice.choice(kinds)
            if worker not in comes:
                comes[worker] = due + dice.choice(kind.away)
                lost.add(worker)
                delay = max(delay, dice.choice(kind.delays))
            due += dice.expovariate(1 / interval)
        counted += workers - len(comes)
        back = [worker for worker, when in comes.items() if when <= ends + delay]
        for worker in back:
            del comes[worker]
        now = ends + delay + (regroup if lost or back else 0.0)
    return counted / rounds / workers * (rounds * block / now)
