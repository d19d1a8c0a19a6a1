"""What does Muon cost where matrices are sharded, and how much more does it send?

    python benchmarks/muon.py            ten minutes; writes docs/benchmarks/muon.md
    python benchmarks/muon.py --quick    a smoke test: a small model, writes nothing

Muon for the matrices of a decoder's blocks, AdamW(fused=True) for the rest. Under DDP every rank
computes every Muon step; under `OSS` and `WholeTensorOptimizer` each matrix has an owner; torch's
Muon on the DTensors of `fully_shard` communicates in each of its matrix products. FSDP with AdamW
alone says what an element-wise step sends. `sharding/speed.py` says how times are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peers

peers.this_checkout()

import pages  # noqa: E402
from sharding.contenders import (  # noqa: E402
    CONTROL,
    DDP,
    OPTIONS,
    OURS,
    Contender,
    Trained,
    bare,
    ddp,
    fully_sharded,
    nested,
)
from sharding.models import divided  # noqa: E402
from sharding.speed import Row, Workload, measured  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import AdamW, Muon  # noqa: E402

import manyhands as mh  # noqa: E402
from sharding import speed  # noqa: E402

OWNERS = "manyhands FSDP, WholeTensorOptimizer"
DTENSORS = "fully_shard, Muon on DTensors"
ADAMW = "manyhands FSDP, AdamW alone"


class Both:
    """Two optimizers that step together."""

    def __init__(self, muon: Any, adamw: Any) -> None:
        self.muon, self.adamw = muon, adamw
        self.param_groups = adamw.param_groups  # of which `fused` is chosen

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()


def trained(
    wrap: Callable[[Any], nn.Module], make_muon: Callable[[list[nn.Parameter]], Any]
) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        wrapped = wrap(model)
        matrices, rest = divided(wrapped)
        both = Both(make_muon(matrices), AdamW(rest, **OPTIONS))
        return Trained(wrapped, both, both.zero_grad)

    return make


def sharded(model: nn.Module) -> Trained:
    matrices, rest = divided(model)
    muon = mh.OSS(matrices, optim=Muon, lr=1e-3)
    adamw = mh.OSS(rest, optim=AdamW, **OPTIONS)
    both = Both(muon, adamw)
    return Trained(mh.ShardedDataParallel(model, [muon, adamw]), both, both.zero_grad)


muon = partial(Muon, lr=1e-3)
owned = partial(mh.WholeTensorOptimizer, optim=Muon, lr=1e-3)
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(DDP, trained(DistributedDataParallel, muon)),
        Contender(CONTROL, trained(DistributedDataParallel, muon)),
        Contender(OURS, sharded),
        Contender(OWNERS, trained(lambda model: nested(model, mh.FSDP), owned)),
        Contender(DTENSORS, trained(lambda model: nested(model, bare), muon)),
    )
}
ALONE = {DDP: Contender(DDP, ddp), ADAMW: Contender(ADAMW, fully_sharded(mh.FSDP))}
WORKLOADS = (
    Workload("10M", 2, rounds=8, steps=1, groups=(tuple(CONTENDERS),)),
    Workload("10M", 4, rounds=5, steps=1, groups=(tuple(CONTENDERS),)),
    Workload("25M", 2, rounds=5, steps=1, groups=(tuple(CONTENDERS),)),
)
QUICK = (Workload("tiny", 2, rounds=2, steps=1, groups=(tuple(CONTENDERS),)),)


def alone(workload: Workload) -> list[Row]:
    """What an element-wise step sends: it trains in another way, so it is beside DDP with AdamW."""
    apart = Workload(workload.size, workload.ranks, 2, 1, ((DDP, ADAMW),))
    return measured(apart, ALONE, {"fused": True})[-1:]


TEXT = """# Muon where matrices are sharded

Muon for the matrices of a decoder's blocks, `AdamW(fused=True)` for the rest. Measured on
{machine}, with {versions}; ranks talk through gloo on one machine and have one thread each.

```bash
python benchmarks/muon.py
```

{verdict}

Ratios are over DDP, where every rank takes every step of Muon: medians over rounds with bootstrap
intervals. "DDP again (A/A)" shows the noise. With "AdamW alone" only bytes are compared.

{tables}
"""
HEAD = "contender | CPU | tokens/s | MB sent"


def cells(rows: list[Row]) -> list[list[str]]:
    return [
        [
            row.name,
            *(speed.times(ratio if row.name != ADAMW else None) for ratio in (row.cpu, row.wall)),
            f"{row.sent / 1e6:.1f}",
        ]
        for row in rows
        if row.name != DDP
    ]


def write(result: speed.Result) -> None:
    sent, faster = [], []
    for rows in speed.rows_of(result).values():
        named = {row.name: row for row in rows}
        sent.append(named[OWNERS].sent / named[ADAMW].sent)
        faster.append(named[DTENSORS].wall_ms / named[OWNERS].wall_ms)
    verdict = (
        f"- **WholeTensorOptimizer sends {speed.between(sent)} times the bytes of an "
        f"element-wise step,** and trains {speed.between(faster)} times the tokens per second "
        "of torch's Muon on the DTensors of `fully_shard`."
    )
    found = speed.tables(result, HEAD, cells)
    pages.write("muon", TEXT, result, tables=found, verdict=verdict)


if __name__ == "__main__":
    choice = {"fused": True}
    speed.run(__doc__, "muon", WORKLOADS, QUICK, CONTENDERS, choice, write, more=alone)
