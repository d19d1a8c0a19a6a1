"""Measure what each level leaves on a rank of a frozen bfloat16 model with float32 adapters.

    python benchmarks/lora_memory.py            a minute; writes results/lora-memory.json
    python tools/figures.py                     then writes the table of docs/recipes.md

A decoder of 25 M parameters whose linear layers have adapters of rank 8, under AdamW on 4 ranks.
Every tensor's memory is counted (`sharding/memory.py`), with 8 tokens a rank, so that activations
are next to nothing. The table is of the rank that holds most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pages
import torch
from sharding.memory import WARM_UP, Held
from team import Team, largest
from torch import Tensor, nn

import manyhands as mh
from sharding import models

RANKS = 4
LORA = 8


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, LORA, bias=False)
        self.b = nn.Linear(LORA, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x.float())).to(x.dtype)


def adapted(size: models.Size) -> nn.Module:
    model = models.decoder(size).bfloat16().requires_grad_(False)
    for block in [module for module in model.modules() if isinstance(module, models.Block)]:
        for name in ("mixed", "joined", "wide", "narrow"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


def held_bytes(size: models.Size, rank: int, level: Any) -> dict[str, int]:
    """Train a few steps, and look at the last."""
    batches = models.batches(size, rank)
    with Held(batches) as held:
        plain = adapted(size)
        plain_optimizer = torch.optim.AdamW(p for p in plain.parameters() if p.requires_grad)
        model, optimizer = mh.shard(plain, plain_optimizer, level)
        del plain_optimizer
        for number in range(WARM_UP + 1):
            held.most = 0
            model(batches[number]).backward()
            after_backward = held.now()
            optimizer.step()
            optimizer.zero_grad()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    base = sum(getattr(p, "_local_tensor", p).nbytes for p in frozen)
    return {"base": base, "trained": after_backward - base, "most": held.most}


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    size = replace(models.SIZES["tiny" if args.quick else "25M"], batch=1, context=8)
    result = {**pages.conditions(), "size": size.name, "ranks": RANKS, "rows": []}
    for level in range(4):
        with Team(RANKS, lambda rank: lambda order: held_bytes(size, rank, **order)) as team:
            row = {"level": level, **largest(team.ask({"level": level}))}
        result["rows"].append(row)
        print(row)
    if not args.quick:
        pages.store("lora-memory", result)


if __name__ == "__main__":
    main()
