"""One table of what a user would pick instead, from the results of the other benchmarks.

    python benchmarks/peers_page.py    writes docs/benchmarks/peers.md; nothing is measured

It reads what `sharding_speed.py`, `sharding_memory.py`, `fsdp_speed.py`, `fsdp_memory.py`,
`blocks_sync.py` and `cost.py` have left in `results/`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE_AT = ROOT / "docs" / "benchmarks" / "peers.md"
SIZE = "25M"
Stored = dict[str, Any]


@dataclass(frozen=True)
class Pick:
    """What a user would pick; of several settings of a contender the fastest counts."""

    title: str
    contender: str  # what its names begin with
    ours: str
    code: str  # what a user of ours writes


SDP, FSDP = "manyhands OSS + ShardedDataParallel", "manyhands FSDP"
LEVEL_2, LEVEL_3 = "`mh.shard(model, optimizer, 2)`", "`mh.shard(model, optimizer, 3)`"
STATES = (
    Pick("torch DDP, nothing sharded", "DDP", SDP, LEVEL_2),
    Pick("torch ZeroRedundancyOptimizer", "torch Zero", SDP, LEVEL_2),
    Pick("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-1", SDP, LEVEL_2),
    Pick("DeepSpeed ZeRO-2", "DeepSpeed ZeRO-2", SDP, LEVEL_2),
    Pick("fairscale ShardedDDP", "fairscale", SDP, LEVEL_2),
)
PARAMETERS = (
    Pick("torch fully_shard, and Accelerate's FSDP2", "fully_shard", FSDP, LEVEL_3),
    Pick("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", FSDP, LEVEL_3),
    Pick("fairscale FSDP", "fairscale FSDP", FSDP, LEVEL_3),
)
LOCAL_SGD, DILOCO, BMUF = (f"manyhands {name}, float32" for name in ("LocalSGD", "DiLoCo", "BMUF"))
ROUNDS = (
    Pick("torch PeriodicModelAverager", "torch Periodic", LOCAL_SGD, "`mh.LocalSGD`"),
    Pick("Accelerate LocalSGD", "accelerate", LOCAL_SGD, "`mh.LocalSGD`"),
    Pick("hivemind averager", "hivemind", LOCAL_SGD, "`mh.LocalSGD`"),
    Pick("torchft LocalSGD", "torchft LocalSGD", LOCAL_SGD, "`mh.LocalSGD`"),
    Pick("torchft DiLoCo", "torchft DiLoCo", DILOCO, "`mh.DiLoCo`"),
    Pick("fairseq block momentum", "per tensor, momentum (as fairseq)", BMUF, "`mh.BMUF`"),
)
RULES = (
    Pick("fairscale AdaScale", "fairscale AdaScale", "manyhands AdaScale", "`mh.AdaScale`"),
    Pick("adaptdl AdaScale", "adaptdl AdaScale", "manyhands AdaScale", "`mh.AdaScale`"),
    Pick("adaptdl AdamScale", "adaptdl AdamScale", "manyhands AdamScale", "`mh.AdamScale`"),
)
SPARING, CODE = "manyhands AdaScale, measure_every=4", "`mh.AdaScale(..., measure_every=4)`"
SMALL_RULES = (
    Pick("fairscale AdaScale, ResNet", "fairscale AdaScale", "manyhands AdaScale", "`mh.AdaScale`"),
    Pick("the same", "fairscale AdaScale", SPARING, CODE),
    Pick("adaptdl AdaScale, ResNet", "adaptdl AdaScale", "manyhands AdaScale", "`mh.AdaScale`"),
)
RANKS = 2
HEAD = (
    "| instead of | you write | ms, theirs : ours | time | CPU | MB sent, theirs : ours "
    "| memory, theirs : ours |\n|---|---|--:|--:|--:|--:|--:|"
)


def main() -> None:
    speeds, memory = _stored("sharding-speed"), _stored("sharding-memory")["measured"]
    whole_speeds, whole_memory = _stored("fsdp-speed"), _stored("fsdp-memory")["rows"]
    rounds, rules = _stored("blocks-sync"), _stored("cost")
    parts = (
        (f"**A step with sharded state and gradients, {SIZE} parameters**", STATES),
        (f"**A step with sharded parameters, {SIZE}**", PARAMETERS),
        ("**One sync round, 10 M parameters**", ROUNDS),
        ("**A step with a scaling rule, 10 M parameters**", RULES),
        ("**A step with a scaling rule, ResNet-20 (59 short tensors), batch 8**", SMALL_RULES),
    )
    lines, found = [HEAD], {}
    for title, picks in parts:
        lines.append(f"| {title} |  |  |  |  |  |  |")
        for pick in picks:
            if picks is STATES:
                cells = step(pick, speeds, memory)
            elif picks is PARAMETERS:
                cells = step(pick, whole_speeds, whole_memory)
            elif picks is ROUNDS:
                cells = sync_round(pick, rounds)
            else:
                cells = rule(pick, rules, "MLP" if picks is RULES else "ResNet-20, batch 8")
            lines.append(f"| {pick.title} | {pick.code} | " + " | ".join(cells) + " |")
            found[pick.title] = cells
    known = {name: speeds[name] for name in ("machine", "versions")}
    PAGE_AT.write_text(PAGE.format(table="\n".join(lines), behind=behind(found), **known))


def _stored(name: str) -> Stored:
    return json.loads((RESULTS / f"{name}.json").read_text())


def step(pick: Pick, speeds: Stored, memory: list[Stored]) -> list[str]:
    """A row about a step with `AdamW(fused=True)`."""
    title = next(t for t in speeds["workloads"] if t.startswith(f"{SIZE} parameters, {RANKS}"))
    rows = [row for row in speeds["workloads"][title]["rows"] if row["choice"] == "fused"]
    theirs, ours = _fastest(pick, rows), _named(pick.ours, rows)
    both = [row for row in memory if row["ranks"] == RANKS]
    held = [
        min(row["resident"] for row in found) / both[0]["parameters"]
        for found in (_begin(pick, both), [_named(pick.ours, both)])
        if found
    ]
    return [
        *_compared(theirs),
        f"{theirs['sent'] / 1e6:.0f} : {ours['sent'] / 1e6:.0f}",
        " : ".join(f"{one:.2f}" for one in held) if len(held) == 2 else "",
    ]


def sync_round(pick: Pick, rounds: Stored) -> list[str]:
    """A row about one synchronisation on 2 ranks; memory is kept, and more during it."""
    theirs, ours = _fastest(pick, rounds["rows"]), _named(pick.ours, rounds["rows"])
    sent, held = "? : ", "? : "
    if not theirs["elsewhere"]:
        sent, held = f"{theirs['sent'] / 1e6:.0f} : ", f"{_models(theirs):.2f} : "
    sent, held = f"{sent}{ours['sent'] / 1e6:.0f}", f"{held}{_models(ours):.2f}"
    return [*_compared(theirs), sent, held]


def _models(row: Stored) -> float:
    return row["kept"] + max(row["most"], row["resident"])


def rule(pick: Pick, rules: Stored, workload: str) -> list[str]:
    """A row about a step with a scaling rule, on 2 ranks."""
    rows = next(rows for title, rows in rules["workloads"].items() if title.startswith(workload))
    named = {row["variant"]: row for row in rows}
    theirs, ours = named[pick.contender], named[pick.ours]
    both = f"{theirs['wall_ms']:.0f} : {ours['wall_ms']:.0f}"
    time, cpu = (f"{theirs[key] / ours[key]:.2f}" for key in ("wall_ms", "cpu_ms"))
    sent = " : ".join(f"{row['sent_bytes'] / 1e6:.0f}" for row in (theirs, ours))
    return [both, time, cpu, sent, ""]


def _begin(pick: Pick, rows: list[Stored]) -> list[Stored]:
    """The rows of a contender: DDP itself and not its control, a peer with all its settings."""
    if pick.contender == "DDP":
        return [_named("DDP", rows)]
    return [row for row in rows if row["name"].startswith(pick.contender)]


def _fastest(pick: Pick, rows: list[Stored]) -> Stored:
    """By wall time, of those that gather parameters anew for the backward pass, as ours does."""
    same = [row for row in _begin(pick, rows) if "reshard_after_forward=False" not in row["name"]]
    return min(same, key=lambda row: row["wall_ms"])


def _named(name: str, rows: list[Stored]) -> Stored:
    return next(row for row in rows if row["name"] == name)


def _compared(theirs: Stored) -> list[str]:
    """Theirs and ours in ms, theirs over ours, and the same of CPU time (stored as ours over)."""
    stored = theirs["rival"]
    value, low, high = (1 / stored[key] for key in ("value", "high", "low"))
    shown = f"{value:.2f}" if low < 1 else f"**{value:.2f}**"
    both = f"{theirs['wall_ms']:.0f} : {theirs['wall_ms'] * stored['value']:.0f}"
    return [both, f"{shown} ({low:.2f}–{high:.2f})", f"{1 / theirs['rival_cpu']['value']:.2f}"]


def behind(found: dict[str, list[str]]) -> str:
    """Say where they are faster than ours, by wall or by CPU time, and where they hold less."""
    slower, larger = [], []
    for title, (_, time, cpu, _, memory) in found.items():
        if min(float(time.split()[0].strip("*")), float(cpu)) < 1:
            slower.append(f"{title} ({time.split()[0]} by time, {cpu} by CPU)")
        if memory and "?" not in memory:
            theirs, ours = map(float, memory.split(" : "))
            if theirs < ours:
                larger.append(f"{title} ({memory})")
    times = f"behind {'; '.join(slower)}" if slower else "behind nobody in the table"
    return (
        f"**Where we are behind.** By time: {times}. By memory: behind {'; '.join(larger)}. Our "
        "blocks keep an anchor of the model's size, from which the drift is measured, and to which "
        "a lost round returns."
    )


PAGE = """# Beside what you can install instead

What a step and a sync round cost with what people install today, over what they cost with
manyhands: **above 1 we are faster**, and 2.00 is twice as fast. Bold: all of the interval is
above 1.

{table}

{behind}

How to read it, and what is not in it:

- **Time** is wall time, theirs over ours, with the 95 % interval of a bootstrap over rounds;
  **CPU** is the CPU time of all ranks and threads, theirs over ours, and is the firmer figure
  here. Everyone has processes of their own, which take turns in an order drawn anew in each
  round. Who is compared has computed the same parameters first, as plain DDP or as the formula
  written out.
- **The machine** has {machine} and {versions}. Ranks are processes on it that talk through gloo
  over its loopback, with one thread each. There is no GPU: what these libraries do on GPUs is not
  measured here, and most of them are made for that. A loopback is fast, so bytes cost little:
  over a slow line, what is sent decides (see [a slow line](blocks-slow-link.md)).
- **Their settings are the fastest that we found**: DeepSpeed 0.19.8 as it comes and with small
  buckets, with `overlap_comm` on and off; fairscale 0.4.13 with buffers and without; torchft
  0.2.0 with one bucket and without (several do not give the mean). **Ours is as it comes, through
  sockets.** On one machine ours can share memory, which is faster still: the pages below have
  those rows.
- **The optimizer** of the steps is torch's `AdamW(fused=True)` for everyone.
- **Accelerate's FSDP2** 1.15.0 calls `fully_shard`, and does so on accelerators only: on a CPU it
  is DDP. The row is `fully_shard`'s.
- **hivemind** 1.1.12 averages in processes of its own that are made for the internet: encrypted,
  through NATs, with workers that come and go. Its search for a group, two seconds before each
  round, is not counted. torchft asks for a quorum before each round, so that workers may come and
  go; ours does that with a [crew](../crew.md), which is not in these rows.
- **fairseq's** block momentum is its published recurrence with its number of collectives (fairseq
  itself is awkward to install today).
- **Memory** of a step is what the process has grown by at most, over the parameters' bytes, on 2
  ranks and with few tokens: parameters, gradients, state, buckets, and what gloo takes. Of a sync
  round it is what is kept between rounds and what comes on top during one, in models. Of a
  contender's settings it is the least.
- **ms** are medians of wall time. Not all fit into memory at once: DeepSpeed took turns with other
  processes of ours than the rest did, hence two times of ours.
- **MB sent** is by one of 2 ranks, in a step or a round.

Each figure with its conditions, all settings, and the control rows that show the noise: [a
sharded step](sharding-speed.md), [its memory](sharding-memory.md), [sharded
parameters](fsdp-speed.md), [their memory](fsdp-memory.md), [one sync round](blocks-sync.md), [a
scaling rule](cost.md).

```bash
python benchmarks/peers.py               # once: an environment with the peers
python benchmarks/sharding_speed.py --workload 25Mx2
python benchmarks/sharding_memory.py
python benchmarks/fsdp_speed.py --workload 25Mx2
python benchmarks/fsdp_memory.py
python benchmarks/blocks_sync.py
python benchmarks/cost.py
python benchmarks/peers_page.py          # this page
```
"""


if __name__ == "__main__":
    main()
