"""How fast is a step with sharded parameters, beside torch's fully_shard and beside DDP?

    python benchmarks/fsdp_speed.py                    twenty minutes; writes the page
    python benchmarks/fsdp_speed.py --workload 25Mx2   one of them; writes it into the page
    python benchmarks/fsdp_speed.py --quick            a smoke test: a small model, writes nothing

AdamW(fused=True) on a decoder of 10 M, 25 M and 100 M parameters, on 2 and 4 ranks of this machine
(gloo, one thread each). `sharding/contenders.py` lists who is compared; `sharding/speed.py`
and `rounds.py` say how times are taken and become ratios.
"""

from __future__ import annotations

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
from sharding.contenders import (  # noqa: E402
    BARE,
    BARE_KEPT,
    CONTROL,
    DDP,
    FAIRSCALE,
    FAIRSCALE_KEPT,
    FSDP,
    FSDP_CONTENDERS,
    FSDP_KEPT,
    FSDP_LEAN,
    PEER,
    RIVAL,
)
from sharding.speed import Row, Workload  # noqa: E402

from sharding import speed  # noqa: E402

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


PAGE = """# Speed of a step with sharded parameters

A step of `FullyShardedDataParallel` (FSDP), compared with torch's `fully_shard`, on which it is
built, fairscale's FSDP, DeepSpeed's ZeRO-3, DDP, and `OSS` with `ShardedDataParallel`:
`AdamW(fused=True)` on a decoder transformer. Measured on {machine}, with {versions}; ranks talk
through gloo on one machine and have one thread each.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/fsdp_speed.py
```

{verdict}

{how}

"tokens/s" is over DDP's, "over `fully_shard`" over that of the same with torch alone, by wall time.
The embedding, every block and the logits are wrapped by themselves. "kept" is
`reshard_after_forward=False`. With few tokens in a step FSDP is slower than DDP: it is for models
that do not fit otherwise. DeepSpeed is shown as it comes. fairscale's asks for CUDA, and is run
here without its streams (`tests/helpers/fairscale_on_cpu.py`).

{tables}
"""
HEAD = "contender | CPU ms | tokens/s | over `fully_shard` | MB sent"
LEFT_OUT = {DDP, FSDP_LEAN, *(name for name in ZERO if "," in name)}


def cells(rows: list[Row]) -> list[list[str]]:
    return [
        [
            row.name.replace(", reshard_after_forward=False", ", kept"),
            f"{row.cpu_ms:,.0f}",
            speed.times(row.wall),
            speed.times(row.rival if row.name in RIVAL else None),
            f"{row.sent / 1e6:.1f}",
        ]
        for row in rows
        if row.name not in LEFT_OUT
    ]


def verdict(workloads: speed.Rows) -> str:
    """How fast ours are beside torch's and fairscale's, and what they send."""
    over: dict[str, list[float]] = {FSDP: [], FSDP_KEPT: []}
    fairscales, sent = [], []
    absent = []
    for title, rows in workloads.items():
        named = {row.name: row for row in rows}
        if FAIRSCALE not in named:
            absent.append(title)
        for name, values in over.items():
            if (rival := named[name].rival) is not None:
                values.append(rival.value)
            sent.append(named[name].sent / named[DDP].sent)
            if PEER[name] in named:
                fairscales.append(named[PEER[name]].wall_ms / named[name].wall_ms)
    fits = f" (it did not fit in memory with {'; '.join(absent)})" if absent else ""
    return "\n".join(
        [
            *(
                f"- **{name}: {speed.between(values)} times the tokens per second of the same "
                "`fully_shard`.**"
                for name, values in over.items()
            ),
            f"- {speed.between(fairscales)} times those of the same of fairscale's{fits}.",
            f"- {speed.between(sent)} times the bytes of DDP.",
        ]
    )


def write(result: speed.Result) -> None:
    found = speed.tables(result, HEAD, cells)
    said = verdict(speed.rows_of(result))
    pages.write("fsdp-speed", PAGE, result, tables=found, verdict=said, how=speed.HOW)


if __name__ == "__main__":
    speed.run(
        __doc__, "fsdp-speed", WORKLOADS, QUICK, FSDP_CONTENDERS, {"fused": True}, write, RIVALS
    )
