"""What does Muon cost where matrices are sharded, and how much more does it send?

    python benchmarks/muon.py            ten minutes; writes docs/benchmarks/muon.md
    python benchmarks/muon.py --quick    a smoke test: a small model, writes nothing

Muon for the matrices of a decoder's blocks, AdamW(fused=True) for the rest. Under DDP every rank
computes every Muon step; under `OSS` and `WholeTensorOptimizer` each matrix has an owner; torch's
Muon on the DTensors of `fully_shard` communicates in each of its matrix products. FSDP with AdamW
alone says what an element-wise step sends. `sharding/speed.py` says how times are taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.this_checkout()

import torch  # noqa: E402
from sharding.contenders import CONTROL, DDP, OPTIONS, Contender, Trained, ddp  # noqa: E402
from sharding.fsdp_contenders import bare, fully_sharded, nested  # noqa: E402
from sharding.speed import Row, Workload, measured, restored  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import AdamW, Muon  # noqa: E402

import manyhands as mh  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "muon.json"
PAGE = ROOT / "docs" / "benchmarks" / "muon.md"
MOST = 1.5  # the aim: bytes over those of an element-wise step

OWNERS = "manyhands FSDP, WholeTensorOptimizer"
DTENSORS = "fully_shard, Muon on DTensors"
OSS = "manyhands OSS + ShardedDataParallel"
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


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and the rest."""
    inside = {id(p) for name, p in model.named_parameters() if "blocks." in name and p.dim() == 2}
    params = list(model.parameters())
    return [p for p in params if id(p) in inside], [p for p in params if id(p) not in inside]


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


def muon(params: list[nn.Parameter]) -> Muon:
    return Muon(params, lr=1e-3)


def owned(params: list[nn.Parameter]) -> mh.WholeTensorOptimizer:
    return mh.WholeTensorOptimizer(params, optim=Muon, lr=1e-3)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(DDP, trained(DistributedDataParallel, muon)),
        Contender(CONTROL, trained(DistributedDataParallel, muon)),
        Contender(OSS, sharded),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        write(json.loads(RESULTS.read_text()))
        return
    # Ranks are forked; what torch imports late is imported here, once.
    import_module("torch.distributed.fsdp")
    AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "workloads": {},
    }
    for workload in QUICK if args.quick else WORKLOADS:
        load = round(os.getloadavg()[0], 1)
        rows = measured(workload, CONTENDERS, {"fused": True}, workload.rounds)
        alone = Workload(workload.size, workload.ranks, 2, 1, ((DDP, ADAMW),))
        rows.append(measured(alone, ALONE, {"fused": True}, alone.rounds)[-1])
        print(f"\n{workload.title}\n{table(rows)}", flush=True)
        result["workloads"][workload.title] = {"load": load, "rows": [asdict(row) for row in rows]}
    if not args.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        write(result)


def table(rows: list[Row]) -> str:
    lines = [
        "| | CPU ms | × DDP's speed | 95 % | wall ms | × DDP's tokens/s | 95 % | MB sent "
        "| over FSDP's with AdamW | collectives |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    unit = next(row.sent for row in rows if row.name == ADAMW)
    for row in rows:
        beside = row.name not in (DDP, ADAMW)  # DDP there was with AdamW
        cells = [
            f"{row.cpu_ms:,.0f}",
            *([f"{row.cpu.value:.2f}", f"{row.cpu.low:.2f}–{row.cpu.high:.2f}"] * beside),
            *([] if beside else ["", ""]),
            f"{row.wall_ms:,.0f}",
            *([f"{row.wall.value:.2f}", f"{row.wall.low:.2f}–{row.wall.high:.2f}"] * beside),
            *([] if beside else ["", ""]),
            f"{row.sent / 1e6:.1f}",
            f"{row.sent / unit:.2f}",
            str(row.collectives),
        ]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TEXT = """# What Muon costs where matrices are sharded

Muon for the matrices of a decoder's blocks, `AdamW(fused=True)` for the rest. Measured on
{machine}, with {versions}; ranks talk through gloo on one machine and have one thread each.

```bash
python benchmarks/muon.py
```

{verdict}

- **DDP**: every rank takes every step of Muon.
- **manyhands OSS + ShardedDataParallel** and **WholeTensorOptimizer**: each matrix has an owner,
  which takes its step once.
- **fully_shard, Muon on DTensors**: torch alone. Each matrix product of a step communicates.
- **manyhands FSDP, AdamW alone**: what an element-wise step sends. It trains in another way, so
  only its bytes are compared.

Above 1 is faster than DDP. Ratios are of medians over rounds, with bootstrap intervals; contenders
take turns in processes of their own. **"{control}" is DDP a second time: what it is away from 1 is
noise.** Before anything is measured, the parameters of all but AdamW alone are compared with DDP's.

{tables}
"""


def verdict(workloads: dict[str, list[Row]]) -> str:
    sent, faster = [], []
    for rows in workloads.values():
        named = {row.name: row for row in rows}
        sent.append(named[OWNERS].sent / named[ADAMW].sent)
        if DTENSORS in named:
            faster.append(named[DTENSORS].wall_ms / named[OWNERS].wall_ms)
    met = "everywhere" if max(sent) <= MOST else "not everywhere"
    return "\n".join(
        [
            f"- **WholeTensorOptimizer: at most {MOST} × the bytes of an element-wise step** "
            f"{met}, {min(sent):.2f} to {max(sent):.2f} ×.",
            f"- **{min(faster):.2f} to {max(faster):.2f} × the tokens a second** of torch's Muon "
            "on the DTensors of `fully_shard` (of medians).",
        ]
    )


def write(result: dict[str, Any]) -> None:
    workloads = {
        title: [restored(row) for row in one["rows"]] for title, one in result["workloads"].items()
    }
    tables = "\n\n".join(
        f"## {title}\n\nLoad average before: {result['workloads'][title]['load']}\n\n{table(rows)}"
        for title, rows in workloads.items()
    )
    known = {name: result[name] for name in ("machine", "versions")}
    PAGE.write_text(
        TEXT.format(tables=tables, verdict=verdict(workloads), control=CONTROL, **known)
    )


if __name__ == "__main__":
    main()
