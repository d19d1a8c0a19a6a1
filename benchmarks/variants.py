"""Ways to train on DDP with a scaling rule, and what each is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharding.contenders import Trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

WARM_UP = 18  # more than AdamScale's five plain steps
SETTLED = 520  # the averages of two small batches look back over 500 steps
Make = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Variant:
    """One way to train; `base` names what its cost is divided by."""

    name: str
    make: Callable[[nn.Module], Trained]
    base: str
    needs: str | None = None  # the peer that must be installed
    warm_up: int = WARM_UP  # steps that are not timed


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-4, fused=True)


def bare(optimizer: Make) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        made = optimizer(model)
        return Trained(DistributedDataParallel(model), made, made.zero_grad)

    return make


def ruled(rule: Any, optimizer: Make, **options: Any) -> Callable[[nn.Module], Trained]:
    return bare(lambda model: rule(optimizer(model), **options))


def around(base: str, optimizer: Make, rule: Any, name: str, **options: Any) -> list[Variant]:
    """Return the base twice, and the rule with the default and with every step measured."""
    every = ruled(rule, optimizer, measure_every=1, **options)
    return [
        Variant(base, bare(optimizer), base),
        Variant(f"{base} again (A/A)", bare(optimizer), base),
        Variant(name, ruled(rule, optimizer, **options), base, warm_up=SETTLED),
        Variant(f"{name}, measure_every=1", every, base),
    ]
