"""The ways to train that `time_to_loss.py` compares, and the lines between the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from blocks.contenders import diloco
from slow_link import Link, Terms, slow_link
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import manyhands as mh

MAX_SCALE = 128
# DiLoCo's, found by trial: at a constant rate a large outer momentum keeps the loss high. What else
# was tried is in docs/notes.md.
OUTER = {"lr": 1.0, "momentum": 0.5}


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    passes: int = 1  # micro-batches of every step on each rank, without `ramp`
    rule: bool = False  # AdaScale; without it the rate stays as it was tuned
    ramp: bool = False
    every: int = 0  # steps of a block of DiLoCo; 0: DDP

    def prepare(self, bare: nn.Module, optimizer: Optimizer, ranks: int) -> Prepared:
        """Wrap the model and the optimizer."""
        model = bare if self.every else DistributedDataParallel(bare)
        rule = ramp = None
        if self.rule:
            workers = {"world_size": 1} if self.every else {}
            optimizer = rule = mh.AdaScale(
                optimizer, num_gradients_to_accumulate=self.passes, **workers
            )
        if self.every:
            optimizer = diloco(**OUTER)(optimizer, self.every, bare)
        if self.ramp:
            # inside blocks a worker is alone, and its batch is its own
            most, averaged = (MAX_SCALE // ranks, None) if self.every else (MAX_SCALE, model)
            ramp = mh.Ramp(rule, most, model=averaged)
        return Prepared(model, optimizer, rule, ramp)


@dataclass(frozen=True)
class Prepared:
    """A model and an optimizer to train with, and what they are made of."""

    model: nn.Module
    optimizer: Any
    rule: mh.AdaScale | None
    ramp: mh.Ramp | None


PLAIN = Way("DDP")
RAMP = Way("DDP + AdaScale + Ramp", rule=True, ramp=True)
WAYS = {
    way.name: way
    for way in (
        PLAIN,
        Way("DDP + AdaScale, 1 pass", rule=True),
        Way("DDP + AdaScale, 4 passes", passes=4, rule=True),
        Way("DDP + AdaScale, 16 passes", passes=16, rule=True),
        RAMP,
        Way("DiLoCo, H = 16", every=16),
        Way("DiLoCo, H = 64", every=64),
        Way("DiLoCo, H = 16, Ramp inside", rule=True, ramp=True, every=16),
    )
}


@dataclass(frozen=True)
class Line:
    """What lies between the ranks: a line of `terms` between two hosts, or nothing."""

    name: str
    terms: Terms | None = None

    def laid(self) -> AbstractContextManager[Link | None]:
        return nullcontext() if self.terms is None else slow_link(self.terms)


LINES = {
    line.name: line
    for line in (
        Line("loopback"),
        Line("1 Gbit/s", Terms(rate=1e9, delay=0.0001)),
        Line("50 Mbit/s, 20 ms", Terms()),
    )
}
