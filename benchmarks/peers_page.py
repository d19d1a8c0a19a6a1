"""Write one comparison with other libraries, from the results of the other benchmarks.

    python benchmarks/peers_page.py    writes docs/benchmarks/peers.md; nothing is measured

It reads what `sharding_speed.py`, `sharding_memory.py`, `fsdp_speed.py`,
`blocks_sync.py` and `cost.py` have left in `results/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pages

SIZE = "25M"
RANKS = 2
Stored = dict[str, Any]


@dataclass(frozen=True)
class Pick:
    """What a user would pick; of several settings of a contender the fastest counts."""

    title: str
    contender: str  # what its names begin with
    ours: str


SDP, FSDP = "manyhands OSS + ShardedDataParallel", "manyhands FSDP"
STATES = (
    Pick("torch DDP, nothing sharded", "DDP", SDP),
    Pick("torch ZeroRedundancyOptimizer", "torch Zero", SDP),
    Pick("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-1", SDP),
    Pick("DeepSpeed ZeRO-2", "DeepSpeed ZeRO-2", SDP),
    Pick("fairscale ShardedDDP", "fairscale", SDP),
)
PARAMETERS = (
    Pick("torch fully_shard, and Accelerate's FSDP2", "fully_shard", FSDP),
    Pick("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", FSDP),
    Pick("fairscale FSDP", "fairscale FSDP", FSDP),
)
LOCAL_SGD, DILOCO, BMUF = (f"manyhands {name}, float32" for name in ("LocalSGD", "DiLoCo", "BMUF"))
ROUNDS = (
    Pick("torch PeriodicModelAverager", "torch Periodic", LOCAL_SGD),
    Pick("Accelerate LocalSGD", "accelerate", LOCAL_SGD),
    Pick("torchft LocalSGD", "torchft LocalSGD", LOCAL_SGD),
    Pick("torchft DiLoCo", "torchft DiLoCo", DILOCO),
    Pick("fairseq block momentum", "per tensor, momentum (as fairseq)", BMUF),
)
RULES = (
    Pick("fairscale AdaScale", "fairscale AdaScale", "manyhands AdaScale"),
    Pick("adaptdl AdaScale", "adaptdl AdaScale", "manyhands AdaScale"),
    Pick("adaptdl AdamScale", "adaptdl AdamScale", "manyhands AdamScale"),
)
HEAD = "instead of | ms | time | CPU | MB sent"


def main() -> None:
    speeds, memory = pages.read("sharding-speed"), pages.read("sharding-memory")["measured"]
    whole_speeds, whole_memory = pages.read("fsdp-speed"), pages.read("fsdp-memory")["rows"]
    rounds, rules = pages.read("blocks-sync"), pages.read("cost")
    found = {
        f"A step with sharded state and gradients, {SIZE} parameters: "
        "`mh.shard(model, optimizer, 2)`": {
            pick.title: step(pick, speeds, memory) for pick in STATES
        },
        f"A step with sharded parameters, {SIZE}: `mh.shard(model, optimizer, 3)`": {
            pick.title: step(pick, whole_speeds, whole_memory) for pick in PARAMETERS
        },
        "One sync round, 10 M parameters: `mh.LocalSGD`, `mh.DiLoCo`, `mh.BMUF`": {
            pick.title: sync_round(pick, rounds) for pick in ROUNDS
        },
        "A step with a scaling rule, 10 M parameters: `mh.AdaScale`, `mh.AdamScale`": {
            pick.title: rule(pick, rules, "MLP") for pick in RULES
        },
        "A step with a scaling rule, ResNet-20 (59 short tensors), batch 8: `mh.AdaScale`": {
            f"{pick.title}, ResNet": rule(pick, rules, "ResNet-20, batch 8") for pick in RULES[:2]
        },
    }
    tables = [f"## {title}\n\n" + pages.table(*shown(rows)) for title, rows in found.items()]
    all_rows = {title: cells for rows in found.values() for title, cells in rows.items()}
    pages.write("peers", PAGE, speeds, tables="\n\n".join(tables), behind=behind(all_rows))


def shown(rows: dict[str, list[str]]) -> tuple[str, list[list[str]]]:
    """The head and the rows of a table, which has a column of memory if it was measured."""
    measured = any(len(cells) == 5 for cells in rows.values())
    head = f"{HEAD} | memory" if measured else HEAD
    return head, [[title, *cells] for title, cells in rows.items()]


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
        f"{theirs['sent'] / 1e6:.0f}:{ours['sent'] / 1e6:.0f}",
        ":".join(f"{one:.2f}" for one in held) if len(held) == 2 else "",
    ]


def sync_round(pick: Pick, rounds: Stored) -> list[str]:
    """A row about one synchronisation on 2 ranks; memory is kept, and more during it."""
    theirs, ours = _fastest(pick, rounds["rows"]), _named(pick.ours, rounds["rows"])
    sent = f"{theirs['sent'] / 1e6:.0f}:{ours['sent'] / 1e6:.0f}"
    return [*_compared(theirs), sent, f"{_models(theirs):.2f}:{_models(ours):.2f}"]


def _models(row: Stored) -> float:
    return row["kept"] + max(row["most"], row["resident"])


def rule(pick: Pick, rules: Stored, workload: str) -> list[str]:
    """A row about a step with a scaling rule, on 2 ranks."""
    rows = next(rows for title, rows in rules["workloads"].items() if title.startswith(workload))
    named = {row["variant"]: row for row in rows}
    theirs, ours = named[pick.contender], named[pick.ours]
    both = f"{theirs['wall_ms']:.0f}:{ours['wall_ms']:.0f}"
    time, cpu = (f"{theirs[key] / ours[key]:.2f}" for key in ("wall_ms", "cpu_ms"))
    sent = ":".join(f"{row['sent_bytes'] / 1e6:.0f}" for row in (theirs, ours))
    return [both, time, cpu, sent]


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
    both = f"{theirs['wall_ms']:.0f}:{theirs['wall_ms'] * stored['value']:.0f}"
    return [both, f"{shown} ({low:.2f}–{high:.2f})", f"{1 / theirs['rival_cpu']['value']:.2f}"]


def behind(found: dict[str, list[str]]) -> str:
    """Say where they are faster than ours, by wall or by CPU time, and where they hold less."""
    slower, larger = [], []
    for title, (_, time, cpu, _, *memory) in found.items():
        if min(float(time.split()[0].strip("*")), float(cpu)) < 1:
            slower.append(f"{title} ({time.split()[0]} by time, {cpu} by CPU)")
        if memory and memory[0]:
            theirs, ours = map(float, memory[0].split(":"))
            if theirs < ours:
                larger.append(f"{title} ({memory[0]})")
    return f"Slower than: {'; '.join(slower)}.\n\nMore memory than: {'; '.join(larger)}."


PAGE = """# Comparison with other libraries

Time per step and per sync round of other libraries, divided by manyhands' time: **above 1
manyhands is faster**. Bold: the whole 95 % interval is above 1. In a pair, the first is theirs.
Measured on {machine}, with {versions}: ranks are processes of one machine, with one
thread each, that talk through gloo over the loopback. **There are no GPU measurements**, and most
of these libraries are made for GPUs.

{tables}

## Where manyhands is behind

{behind}

Blocks keep an anchor of the model's size: the drift is measured from it, and a failed round
returns to it.

## Conditions

- **Time** is wall time with the 95 % interval of a bootstrap over rounds. **CPU** is the CPU time
  of all ranks and threads, and is the firmer figure on a shared machine. Every contender first
  computed the same parameters as plain DDP or the published formula. Contenders take turns.
- **Settings.** The others have the fastest settings that we found: DeepSpeed 0.19.8 with default
  and small buckets, `overlap_comm` on and off; fairscale 0.4.13 with and without buffers; torchft
  0.2.0 with and without one bucket. manyhands has its defaults, through sockets. Ranks of one
  machine can also share memory, which is faster: the pages below have those rows.
- **Steps** use torch's `AdamW(fused=True)`. Accelerate 1.15.0 calls `fully_shard` only on
  accelerators, so that row stands for both.
- **torchft** asks for a quorum before each round; the manyhands rows are without a
  [crew](../crew.md), which does that.
- **fairseq** is its published recurrence with its number of collectives.
- **Memory** of a step is the most by which a process grew, over the size of the parameters; of a
  sync round it is what is kept plus the peak during one, in models.
- **MB sent** is by one of 2 ranks. DeepSpeed did not fit in memory beside the others and ran in a
  separate session, so manyhands has two timings. Over a [slow network](blocks-slow-link.md), bytes
  decide.

All settings, conditions and control rows: [sharding](sharding-speed.md) and [its
memory](sharding-memory.md), [FSDP](fsdp-speed.md) and [its memory](fsdp-memory.md), [sync
rounds](blocks-sync.md), [scaling rules](cost.md).

```bash
python benchmarks/peers.py               # once: an environment with the peers
python benchmarks/sharding_speed.py --workload 25Mx2
python benchmarks/sharding_memory.py
python benchmarks/fsdp_speed.py --workload 25Mx2
python benchmarks/blocks_sync.py
python benchmarks/cost.py
python benchmarks/peers_page.py          # this page
```
"""


if __name__ == "__main__":
    main()
