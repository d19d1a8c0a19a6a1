"""A rank that trains: pretended computing, a real inner optimizer, and what a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sharding.models import Size
from torch.optim import AdamW

from blocks import ours
from blocks.contenders import Contender
from blocks.model import Pretended
from sharding import traffic


class Stepping:
    """One rank of a contender."""

    def __init__(self, contender: Contender, size: Size, every: int, rank: int) -> None:
        self.module = Pretended(size, rank)
        self.model = contender.wrap(self.module)
        inner = AdamW(self.module.parameters(), lr=1e-4, fused=True)
        self.optimizer = contender.make(inner, every, self.module)

    def step(self) -> None:
        self.model().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self, warm_up: int, blocks: int, length: int, seconds: float) -> dict[str, Any]:
        """Wall seconds of each block's steps; CPU seconds and bytes sent, per step.

        The warm-up does not sleep. There is no barrier: what an overlapped synchronisation still
        has under way when it ends, it has again when the last block ends.
        """
        self.module.seconds = 0.0
        for _ in range(warm_up):
            self.step()
        self.module.seconds = seconds
        cpu, sent, walls = time.process_time(), traffic.bytes_sent(), []
        for _ in range(blocks):
            began = time.perf_counter()
            for _ in range(length):
                self.step()
            walls.append((time.perf_counter() - began) / length)
        cpu, sent = time.process_time() - cpu, traffic.bytes_sent() - sent
        ours.finish(self.optimizer)
        steps = blocks * length
        return {"wall": walls, "cpu": cpu / steps, "sent": sent / steps}


def stepping(contender: Contender, size: Size, every: int) -> Callable[[int], Callable[..., Any]]:
    """What a team's ranks do (`team.Work`); the order is what `measured` is given."""

    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        one = Stepping(contender, size, every, rank)
        return lambda order: one.measured(**order)

    return work
