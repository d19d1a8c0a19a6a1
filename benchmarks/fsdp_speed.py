"""Measure a step with sharded parameters, over those of torch's fully_shard and DDP.

python benchmarks/peers.py                         once, to have the peers as well
python benchmarks/fsdp_speed.py                    twenty minutes; writes half of the page
python benchmarks/fsdp_speed.py --workload 25Mx2   one of them
"""

from __future__ import annotations

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

from sharding.contenders import BARE, BARE_KEPT, CONTROL, DDP, FSDP, FSDP_KEPT  # noqa: E402
from sharding.speed import Measured, Speed, Workload, by_workload, times  # noqa: E402

from sharding import contenders  # noqa: E402

ALL = tuple(contenders.FSDP_CONTENDERS)
ZERO = tuple(contender.name for contender in contenders.ZERO3)
REST = tuple(name for name in ALL if name not in ZERO)
# As many as there is memory for at once.
BESIDE_ZERO = (DDP, FSDP, FSDP_KEPT, *ZERO)
AS_IT_COMES = (DDP, FSDP, "DeepSpeed ZeRO-3")
RESHARDED = (DDP, CONTROL, BARE, FSDP, contenders.FSDP_LEAN, contenders.FAIRSCALE)
KEPT = (DDP, CONTROL, BARE_KEPT, FSDP_KEPT, contenders.FAIRSCALE_KEPT)
LARGEST = ((DDP, CONTROL, BARE, FSDP), (DDP, CONTROL, BARE_KEPT, FSDP_KEPT))
WORKLOADS = (
    Workload("10M", 2, rounds=14, steps=2, groups=(REST,)),
    Workload("10M", 4, rounds=8, steps=2, groups=(REST,)),
    Workload("25M", 2, rounds=10, steps=1, groups=(REST, BESIDE_ZERO)),
    Workload("25M", 4, rounds=6, steps=1, groups=(RESHARDED, KEPT, BESIDE_ZERO)),
    Workload("100M", 2, rounds=5, steps=1, groups=(RESHARDED, KEPT, AS_IT_COMES), one_ddp=True),
    Workload("100M", 4, rounds=3, steps=1, groups=LARGEST, one_ddp=True),
)
QUICK = Workload("tiny", 2, rounds=2, steps=1, groups=(ALL,))
BESIDE_TORCH = {FSDP: BARE, FSDP_KEPT: BARE_KEPT, contenders.FSDP_LEAN: BARE}
LEFT_OUT = {DDP, contenders.OURS, contenders.FSDP_LEAN, *(name for name in ZERO if "," in name)}
SHOWN = [name for name in ALL if name not in LEFT_OUT]


def tables(measured: list[Measured]) -> str:
    """Compare with `fully_shard`, and with DDP."""
    parts = [
        "Tokens per second, over `fully_shard` with equal options",
        by_workload(measured, (FSDP, FSDP_KEPT), lambda row: times(row.rival)),
        "Tokens per second, over DDP's",
        by_workload(measured, SHOWN, lambda row: times(row.wall)),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    rivals = {**BESIDE_TORCH, **dict.fromkeys((DDP, BARE, contenders.FAIRSCALE, *ZERO), FSDP)}
    made = contenders.FSDP_CONTENDERS
    speed = Speed("fsdp-speed", "sharding-speed", "fsdp", made, ("fused",), rivals, tables)
    speed.run(__doc__, WORKLOADS, QUICK)
