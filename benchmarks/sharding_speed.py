"""How fast is a step with sharded optimizer state and gradients, over DDP's?

    python benchmarks/peers.py                             once, to have the peers as well
    python benchmarks/sharding_speed.py                    twenty minutes; writes the page
    python benchmarks/sharding_speed.py --workload 25Mx2   one of them; writes it into the page
    python benchmarks/sharding_speed.py --quick            a smoke test; writes nothing

AdamW on a decoder of 25 M and of 100 M parameters, on 2 and 4 ranks of this machine (gloo, one
thread each). `sharding/contenders.py` lists who is compared, `team.py` says why each has
processes of its own. `rounds.py` says how times become ratios.
"""

from __future__ import annotations

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
from sharding.contenders import (  # noqa: E402
    CHOICES,
    CONTENDERS,
    CONTROL,
    DDP,
    OURS,
    SHARED,
    WHOLE_GRADIENTS,
)
from sharding.speed import Row, Workload  # noqa: E402

from sharding import speed  # noqa: E402

ALL = tuple(CONTENDERS)
ZERO = tuple(name for name in ALL if CONTENDERS[name].needs == "deepspeed")
REST = tuple(name for name in ALL if name not in ZERO)
PEERS = tuple(name for name in REST if not CONTENDERS[name].ours and name not in (DDP, CONTROL))
THIRDS = (  # what fits into 24 GB together
    (DDP, CONTROL, OURS, SHARED),
    (DDP, WHOLE_GRADIENTS, *PEERS[:1]),
    (DDP, *PEERS[1:]),
)
BESIDE_ZERO = (DDP, OURS, *ZERO)
AS_IT_COMES = (DDP, OURS, "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2")
WORKLOADS = (
    Workload("25M", 2, rounds=12, steps=2, groups=(REST, BESIDE_ZERO)),
    Workload("25M", 4, rounds=8, steps=2, groups=(REST, BESIDE_ZERO)),
    Workload("100M", 2, rounds=7, steps=1, groups=(REST, AS_IT_COMES), one_ddp=True),
    Workload("100M", 4, rounds=5, steps=1, groups=THIRDS, one_ddp=True),
)
QUICK = (Workload("tiny", 2, rounds=2, steps=1, groups=(ALL,)),)
RIVALS = dict.fromkeys((DDP, *PEERS, *ZERO), OURS)
# The page leaves out variants that change little; all are in the results.
LEFT_OUT = ("DDP", "fairscale, buffer 0", "DeepSpeed ZeRO-1", ", small buckets")

PAGE = """# Speed of a sharded step

A step of `OSS` and `ShardedDataParallel`, compared with DDP, torch's ZeroRedundancyOptimizer,
fairscale 0.4.13 and DeepSpeed 0.19.8: AdamW on a decoder transformer. Measured on {machine}, with
{versions}; ranks talk through gloo on one machine and have one thread each.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/sharding_speed.py
```

{how}

"CPU" is DDP's CPU time of all ranks over the contender's, "tokens/s" the same of wall time, which
with as many ranks as cores is the noisier one. "fused" is `AdamW(fused=True)` on all sides,
"default" torch's loop over tensors. DeepSpeed is shown as it comes; its ZeRO-1, smaller buckets and
`overlap_comm` are in the results.

{tables}

By CPU time:

{reading}
"""
HEAD = "contender | fused: CPU | fused: tokens/s | default: CPU | default: tokens/s | MB sent"


def cells(rows: list[Row]) -> list[list[str]]:
    """A line for each contender."""
    found = {(row.name, row.choice): row for row in rows}
    names = [n for n in dict.fromkeys(row.name for row in rows) if not _left_out(n)]
    lines = []
    for name in names:
        both = [found[name, choice] for choice in CHOICES]
        ratios = [speed.times(value) for row in both for value in (row.cpu, row.wall)]
        lines.append([name, *ratios, f"{both[0].sent / 1e6:.1f}"])
    return lines


def _left_out(name: str) -> bool:
    return name in LEFT_OUT or any(each[0] == "," and each in name for each in LEFT_OUT)


def reading(workloads: speed.Rows) -> str:
    """Where ours are slower than DDP, and where a peer is faster."""
    lines = []
    for title, rows in workloads.items():
        for choice in dict.fromkeys(row.choice for row in rows):
            same = {row.name: row for row in rows if row.choice == choice}
            ours = same[OURS]
            if ours.cpu.high < 1:
                lines.append(f"- {title}, {choice}: manyhands is slower than DDP ({ours.cpu}).")
            lines += [
                f"- {title}, {choice}: {row.name} is ahead of manyhands ({row.cpu.value:.3f}, "
                f"{ours.cpu.value:.3f})."
                for row in same.values()
                if not row.name.startswith(("manyhands", DDP)) and row.cpu.value > ours.cpu.value
            ]
    return "\n".join(lines) or "- manyhands is behind DDP or a peer nowhere."


def write(result: speed.Result) -> None:
    found = speed.tables(result, HEAD, cells)
    read = reading(speed.rows_of(result))
    pages.write("sharding-speed", PAGE, result, tables=found, reading=read, how=speed.HOW)


if __name__ == "__main__":
    speed.run(__doc__, "sharding-speed", WORKLOADS, QUICK, CONTENDERS, CHOICES, write, RIVALS)
