"""Measure a step with sharded optimizer state and gradients, over DDP's.

python benchmarks/peers.py                             once, to have the peers as well
python benchmarks/sharding_speed.py                    twenty minutes; writes the page
python benchmarks/sharding_speed.py --workload 25Mx2   one of them; writes it into the page
"""

from __future__ import annotations

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

from sharding.contenders import CONTENDERS, CONTROL, DDP, OURS, SHARED  # noqa: E402
from sharding.speed import Row, Speed, Workload, times  # noqa: E402

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
HEAD = "contender | fused: CPU | fused: tokens/s | default: CPU | default: tokens/s | MB sent"


def cells(rows: list[Row]) -> list[list[str]]:
    """Return a line for each contender, with the ratios of all choices."""
    ratios: dict[str, list[str]] = {}
    sent: dict[str, str] = {}
    for row in rows:
        if row.name not in LEFT_OUT and ", small buckets" not in row.name:
            ratios.setdefault(row.name, []).extend([times(row.cpu), times(row.wall)])
            sent.setdefault(row.name, f"{row.sent / 1e6:.1f}")
    return [[name, *ratios[name], sent[name]] for name in ratios]


if __name__ == "__main__":
    rivals = dict.fromkeys((DDP, *PEERS, *ZERO), OURS)
    choices = tuple(contenders.CHOICES)
    Speed("sharding-speed", CONTENDERS, choices, rivals, HEAD, cells).run(__doc__, WORKLOADS, QUICK)
