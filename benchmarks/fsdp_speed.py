"""How fast is a step with sharded parameters, beside torch's fully_shard and beside DDP?

    python benchmarks/fsdp_speed.py                    twenty minutes; writes the page
    python benchmarks/fsdp_speed.py --workload 25Mx2   one of them; writes it into the page
    python benchmarks/fsdp_speed.py --quick            a smoke test: a small model, writes nothing

AdamW(fused=True) on a decoder of 10 M, 25 M and 100 M parameters, on 2 and 4 ranks of this machine
(gloo, one thread each). `sharding/fsdp_contenders.py` lists who is compared; `sharding/speed.py`
and `rounds.py` say how times are taken and become ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from sharding.contenders import CONTROL, DDP, import_early  # noqa: E402
from sharding.fsdp_contenders import (  # noqa: E402
    BARE,
    BARE_KEPT,
    FAIRSCALE,
    FAIRSCALE_KEPT,
    FSDP,
    FSDP_CONTENDERS,
    FSDP_KEPT,
    FSDP_LEAN,
    PEER,
    RIVAL,
)
from sharding.speed import Row, Workload, measured, restored  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fsdp-speed.json"
FASTER, BYTES = 1.3, 1.5  # the aims: tokens a second over fully_shard's, bytes over DDP's

ALL = tuple(FSDP_CONTENDERS)
ZERO = tuple(name for name in ALL if FSDP_CONTENDERS[name].needs == "deepspeed")
REST = tuple(name for name in ALL if name not in ZERO)
# As many as there is memory for at once.
BESIDE_ZERO = (DDP, FSDP, FSDP_KEPT, *ZERO)
AS_IT_COMES = (DDP, FSDP, "DeepSpeed ZeRO-3")
RESHARDED = (DDP, CONTROL, BARE, FSDP, FSDP_LEAN, FAIRSCALE)
KEPT = (DDP, CONTROL, BARE_KEPT, FSDP_KEPT, FAIRSCALE_KEPT)
WORKLOADS = (
    Workload("10M", 2, rounds=14, steps=2, groups=(REST,)),
    Workload("10M", 4, rounds=8, steps=2, groups=(REST,)),
    Workload("25M", 2, rounds=10, steps=1, groups=(REST, BESIDE_ZERO)),
    Workload("25M", 4, rounds=6, steps=1, groups=(RESHARDED, KEPT, BESIDE_ZERO)),
    Workload("100M", 2, rounds=5, steps=1, groups=(RESHARDED, KEPT, AS_IT_COMES), one_ddp=True),
    Workload(
        "100M",
        4,
        rounds=3,
        steps=1,
        groups=((DDP, CONTROL, BARE, FSDP), (DDP, CONTROL, BARE_KEPT, FSDP_KEPT)),
        one_ddp=True,
    ),
)
RIVALS = {**RIVAL, **dict.fromkeys((DDP, BARE, FAIRSCALE, *ZERO), FSDP)}
QUICK = (Workload("tiny", 2, rounds=2, steps=1, groups=(ALL,)),)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="25Mx2 and the like, and no others"
    )
    parser.add_argument("--rounds", type=float, default=1.0, help="times as many rounds")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        write(json.loads(RESULTS.read_text()))
        return
    import_early()
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "workloads": {},
    }
    if args.workload and RESULTS.exists():  # what is not measured again stays
        result["workloads"] = json.loads(RESULTS.read_text())["workloads"]
    for workload in QUICK if args.quick else WORKLOADS:
        if args.workload and workload.name not in args.workload:
            continue
        load = round(os.getloadavg()[0], 1)
        rounds = max(2, round(workload.rounds * args.rounds))
        rows = measured(workload, FSDP_CONTENDERS, {"fused": True}, rounds, RIVALS)
        print(f"\n{workload.title}\n{table(rows)}", flush=True)
        if not args.quick:
            measurement = {"load": load, "rows": [asdict(row) for row in rows]}
            result["workloads"][workload.title] = measurement
            RESULTS.write_text(json.dumps(result, indent=1) + "\n")
            write(result)


def table(rows: list[Row]) -> str:
    lines = [
        "| contender | CPU ms | × DDP's speed | 95 % | wall ms | × DDP's tokens/s | 95 % "
        "| × fully_shard's tokens/s | 95 % | MB sent | over DDP's | collectives |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    unit = next(row.sent for row in rows if row.name == DDP)
    for row in rows:
        own = row.name == DDP
        cells = [
            f"{row.cpu_ms:,.0f}",
            *(["1", ""] if own else _cells(row.cpu)),
            f"{row.wall_ms:,.0f}",
            *(["1", ""] if own else _cells(row.wall)),
            *_cells(row.rival if row.name in RIVAL else None),
            f"{row.sent / 1e6:.1f}",
            f"{row.sent / unit:.2f}",
            str(row.collectives),
        ]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(value: Any) -> list[str]:
    if value is None:
        return ["", ""]
    return [f"{value.value:.2f}", f"{value.low:.2f}–{value.high:.2f}"]


def verdict(workloads: dict[str, list[Row]]) -> str:
    """Whether the aims are met, and where not."""
    heavy, slower = [], []
    beside = []  # fairscale's wall time over ours
    absent = [
        title for title, rows in workloads.items() if FAIRSCALE not in {row.name for row in rows}
    ]
    for title, name, row, unit in _ours(workloads):
        if row.sent > BYTES * unit * 1.005:  # a few messages of some bytes
            heavy.append(f"{name}, {title}: {row.sent / unit:.3f}")
        theirs = {row.name: row for row in workloads[title]}.get(PEER[name])
        if theirs is not None:
            beside.append(theirs.wall_ms / row.wall_ms)
            if beside[-1] <= 1:
                slower.append(f"{name}, {title}: {beside[-1]:.2f}")
    ours = list(_ours(workloads))
    speeds = {
        name: [row.rival.value for _, n, row, _ in ours if n == name and row.rival is not None]
        for name in (FSDP, FSDP_KEPT)
    }
    return "\n".join(
        [
            *(
                f"- **{name}: at least {FASTER} × the tokens a second of the same `fully_shard`** "
                + ("everywhere" if min(values) >= FASTER else "not everywhere")
                + f", {min(values):.2f} to {max(values):.2f} ×."
                for name, values in speeds.items()
            ),
            *(
                [
                    "- **Faster than the same of fairscale's:** "
                    + ("not everywhere: " + "; ".join(slower) + "." if slower else "everywhere,")
                    + f" {min(beside):.2f} to {max(beside):.2f} × (of medians)"
                    + (
                        f"; not in memory beside the others: {', '.join(absent)}."
                        if absent
                        else "."
                    )
                ]
                if beside
                else []
            ),
            f"- **At most {BYTES} × the bytes of DDP:** "
            + ("not everywhere: " + "; ".join(heavy) + "." if heavy else "everywhere,")
            + f" {min(row.sent / unit for _, _, row, unit in ours):.2f} to "
            f"{max(row.sent / unit for _, _, row, unit in ours):.2f} ×.",
        ]
    )


def _ours(workloads: dict[str, list[Row]]) -> Iterator[tuple[str, str, Row, int]]:
    """Every row of FSDP's, and the bytes that DDP sends there."""
    for title, rows in workloads.items():
        same = {row.name: row for row in rows}
        for name in (FSDP, FSDP_KEPT):
            yield title, name, same[name], same[DDP].sent


PAGE = """# How fast a step with sharded parameters is

A step of `FullyShardedDataParallel` (FSDP) beside torch's `fully_shard`, on which it is built,
fairscale's FSDP, DeepSpeed's ZeRO-3, DDP, and `OSS` with `ShardedDataParallel`:
`AdamW(fused=True)` on a decoder transformer. Measured on {machine}, with {versions}; ranks talk
through gloo on one machine and have one thread each. The load average at which each table's run
began stands above it; the tables before it have their share in that.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/fsdp_speed.py
```

{verdict}

Who shards parameters is wrapped alike: the embedding, every block and the logits by themselves,
and what is left with the whole model. "× DDP's speed" is DDP's CPU time of all ranks and threads
over the contender's, "tokens/s" are by wall time: **above 1 is faster.** All are ratios of medians
over rounds with their bootstrap intervals. Every contender has processes of its own; they take
turns in an order drawn anew in each round. **"{control}" is DDP a second time: what it is away
from 1 is noise.** (At 100 M it is the same processes once more: there is no room for others.) Where
not all fit into memory at once, they run in two groups, each beside DDP of its own, and are
compared with that; the tables show the first group's.
Bytes are what a rank's sockets have sent in a step, collectives those that a rank starts, each
message between two ranks counted as one. Before anything is measured, the parameters of every
contender are compared with DDP's.

{tables}

- What a rank lacks is gathered for the forward, and again for the backward pass (not with
  `reshard_after_forward=False`): FSDP is for models that do not fit otherwise. With few tokens in a
  step it is slower than DDP; the larger the model, the more it gains by computing 1 / N of AdamW.
  Where parameters fit and the state does not, `OSS` with `ShardedDataParallel` is the cheaper way.
- DeepSpeed has the same `AdamW`, as it comes (it overlaps) and with buckets of 2 million elements,
  and with `overlap_comm` off. It gathers each layer's parameters by hooks of its own.
- fairscale 0.4.13 asks for CUDA. Here what it does with streams is left out, as the library's tests
  do to compare numbers (`tests/fairscale_on_cpu.py`): it sends while nothing else runs.
"""


def write(result: dict[str, Any]) -> None:
    order = {workload.title: number for number, workload in enumerate(WORKLOADS)}
    measurements = sorted(result["workloads"].items(), key=lambda item: order[item[0]])
    workloads = {title: [restored(row) for row in one["rows"]] for title, one in measurements}
    tables = "\n\n".join(
        f"## {title}\n\nLoad average before: {one['load']}\n\n{table(workloads[title])}"
        for title, one in measurements
    )
    known = {name: result[name] for name in ("machine", "versions")}
    page = ROOT / "docs" / "benchmarks" / "fsdp-speed.md"
    page.write_text(
        PAGE.format(tables=tables, verdict=verdict(workloads), control=CONTROL, **known)
    )


if __name__ == "__main__":
    main()
