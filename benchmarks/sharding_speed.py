"""Measure a step with sharded optimizer state and gradients, over DDP's.

python benchmarks/peers.py                             once, to have the peers as well
python benchmarks/sharding_speed.py                    twenty minutes; writes half of the page
python benchmarks/sharding_speed.py --workload 25Mx2   one of them
"""

from __future__ import annotations

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

from sharding.contenders import CONTENDERS, CONTROL, DDP, OURS, SHARED  # noqa: E402
from sharding.speed import Measured, Speed, Workload, by_workload, times  # noqa: E402

from sharding import contenders  # noqa: E402

ALL = tuple(CONTENDERS)
ZERO = tuple(name for name in ALL if CONTENDERS[name].needs == "deepspeed")
REST = tuple(name for name in ALL if name not in ZERO)
PEERS = tuple(name for name in REST if not CONTENDERS[name].ours and name not in (DDP, CONTROL))
THIRDS = (  # what fits into 24 GB together
    (DDP, CONTROL, OURS, SHARED),
    (DDP, contenders.WHOLE_GRADIENTS, *PEERS[:1]),
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
QUICK = Workload("tiny", 2, rounds=2, steps=1, groups=(ALL,))
# The page leaves out variants that change little; all are in the results.
LEFT_OUT = ("DDP", "fairscale, buffer 0", "DeepSpeed ZeRO-1")
SHOWN = [name for name in ALL if name not in LEFT_OUT and ", small buckets" not in name]


def tables(measured: list[Measured]) -> str:
    """Return a table of tokens per second for each choice."""
    parts = []
    for choice, title in (("fused", "`AdamW(fused=True)`"), ("default", "`AdamW()`")):
        selected = [one.select(choice) for one in measured]
        table = by_workload(selected, SHOWN, lambda row: times(row.wall))
        parts += [f"{title}: tokens per second, over DDP's", table]
    return "\n\n".join(parts)


if __name__ == "__main__":
    rivals = dict.fromkeys((DDP, *PEERS, *ZERO), OURS)
    choices = tuple(contenders.CHOICES)
    speed = Speed("sharding-speed", "sharding-speed", "zero", CONTENDERS, choices, rivals, tables)
    speed.run(__doc__, WORKLOADS, QUICK)
