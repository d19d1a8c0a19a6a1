"""Write one comparison with other libraries, from the results of the other benchmarks.

python benchmarks/peers_page.py    writes docs/benchmarks/peers.md; nothing is measured
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
    """A pair to compare; of several settings of a contender the fastest counts."""

    title: str
    contender: str  # what its names begin with
    ours: str


SDP = "manyhands OSS + ShardedDataParallel"
FSDP = "manyhands FSDP"
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
LOCAL_SGD = "manyhands LocalSGD, float32"
ROUNDS = (
    Pick("torch PeriodicModelAverager", "torch Periodic", LOCAL_SGD),
    Pick("Accelerate LocalSGD", "accelerate", LOCAL_SGD),
    Pick("torchft LocalSGD", "torchft LocalSGD", LOCAL_SGD),
    Pick("torchft DiLoCo", "torchft DiLoCo", "manyhands DiLoCo, float32"),
    Pick("fairseq block momentum", "per tensor, momentum (as fairseq)", "manyhands BMUF, float32"),
)
RULES = (
    Pick("fairscale AdaScale", "fairscale AdaScale", "manyhands AdaScale"),
    Pick("adaptdl AdaScale", "adaptdl AdaScale", "manyhands AdaScale"),
    Pick("adaptdl AdamScale", "adaptdl AdamScale", "manyhands AdamScale"),
)
ON_RESNET = (
    Pick("fairscale AdaScale, ResNet", "fairscale AdaScale", "manyhands AdaScale"),
    Pick("adaptdl AdaScale, ResNet", "adaptdl AdaScale", "manyhands AdaScale"),
)
HEAD = "instead of | ms | time | CPU | MB sent"
HEAD_WITH_MEMORY = f"{HEAD} | memory"


def main() -> None:
    speeds = pages.read("sharding-speed")
    memory = pages.read("sharding-memory")["measured"]
    fsdp_speeds = pages.read("fsdp-speed")
    fsdp_memory = pages.read("fsdp-memory")["rows"]
    rounds = pages.read("blocks-sync")
    rules = pages.read("cost")
    states = [step(pick, speeds, memory) for pick in STATES]
    parameters = [step(pick, fsdp_speeds, fsdp_memory) for pick in PARAMETERS]
    sync_rounds = [sync_round(pick, rounds) for pick in ROUNDS]
    mlp = [rule(pick, rules, "MLP") for pick in RULES]
    resnet = [rule(pick, rules, "ResNet-20, batch 8") for pick in ON_RESNET]
    tables = [
        f"## Sharded state and gradients: `mh.shard(model, optimizer, 2)`, {SIZE} parameters",
        pages.table(HEAD_WITH_MEMORY, states),
        f"## Sharded parameters: `mh.shard(model, optimizer, 3)`, {SIZE} parameters",
        pages.table(HEAD_WITH_MEMORY, parameters),
        "## Sync rounds: `mh.LocalSGD`, `mh.DiLoCo`, `mh.BMUF`, 10M parameters",
        pages.table(HEAD_WITH_MEMORY, sync_rounds),
        "## Scaling rules: `mh.AdaScale`, `mh.AdamScale`, 10M parameters or ResNet-20 at batch 8",
        pages.table(HEAD, [*mlp, *resnet]),
    ]
    lines = [*states, *parameters, *sync_rounds, *mlp, *resnet]
    pages.fill("peers", speeds, tables="\n\n".join(tables), behind=behind(lines))


def step(pick: Pick, speeds: Stored, memory: list[Stored]) -> list[str]:
    title = next(t for t in speeds["workloads"] if t.startswith(f"{SIZE} parameters, {RANKS}"))
    rows = [row for row in speeds["workloads"][title]["rows"] if row["choice"] == "fused"]
    both = [row for row in memory if row["ranks"] == RANKS]
    held = [row["resident"] for row in _settings(pick, both)]
    pair = ""
    if held:
        unit = both[0]["parameters"]
        pair = f"{min(held) / unit:.2f}:{_named(pick.ours, both)['resident'] / unit:.2f}"
    return [*_compared(pick, rows), pair]


def sync_round(pick: Pick, rounds: Stored) -> list[str]:
    """Return a row about a sync round on 2 ranks; memory is kept, and more during the round."""
    theirs = _models(_fastest(pick, rounds["rows"]))
    ours = _models(_named(pick.ours, rounds["rows"]))
    return [*_compared(pick, rounds["rows"]), f"{theirs:.2f}:{ours:.2f}"]


def _models(row: Stored) -> float:
    return row["kept"] + max(row["most"], row["resident"])


def rule(pick: Pick, rules: Stored, workload: str) -> list[str]:
    rows = next(rows for title, rows in rules["workloads"].items() if title.startswith(workload))
    named = {row["variant"]: row for row in rows}
    theirs = named[pick.contender]
    ours = named[pick.ours]
    both = f"{theirs['wall_ms']:.0f}:{ours['wall_ms']:.0f}"
    time = f"{theirs['wall_ms'] / ours['wall_ms']:.2f}"
    cpu = f"{theirs['cpu_ms'] / ours['cpu_ms']:.2f}"
    return [pick.title, both, time, cpu, _sent(theirs["sent_bytes"], ours["sent_bytes"])]


def _settings(pick: Pick, rows: list[Stored]) -> list[Stored]:
    """Return the rows of a contender: DDP itself and not its control, a peer with all settings."""
    if pick.contender == "DDP":
        return [_named("DDP", rows)]
    return [row for row in rows if row["name"].startswith(pick.contender)]


def _fastest(pick: Pick, rows: list[Stored]) -> Stored:
    """By wall time, of those that gather parameters anew for the backward pass, as ours does."""
    found = _settings(pick, rows)
    same = [row for row in found if "reshard_after_forward=False" not in row["name"]]
    return min(same, key=lambda row: row["wall_ms"])


def _named(name: str, rows: list[Stored]) -> Stored:
    return next(row for row in rows if row["name"] == name)


def _sent(theirs: float, ours: float) -> str:
    return f"{theirs / 1e6:.0f}:{ours / 1e6:.0f}"


def _compared(pick: Pick, rows: list[Stored]) -> list[str]:
    """Return both in ms, theirs over ours, the same of CPU time, and the bytes of both."""
    theirs = _fastest(pick, rows)
    ours = _named(pick.ours, rows)
    stored = theirs["rival"]  # ours over theirs
    low = 1 / stored["high"]
    shown = f"{1 / stored['value']:.2f}"
    if low >= 1:
        shown = f"**{shown}**"
    both = f"{theirs['wall_ms']:.0f}:{theirs['wall_ms'] * stored['value']:.0f}"
    time = f"{shown} ({low:.2f}–{1 / stored['low']:.2f})"
    cpu = f"{1 / theirs['rival_cpu']['value']:.2f}"
    return [pick.title, both, time, cpu, _sent(theirs["sent"], ours["sent"])]


def behind(lines: list[list[str]]) -> str:
    """Say where they are faster than ours, by wall or by CPU time, and where they hold less."""
    slower = []
    larger = []
    for title, _, time, cpu, _, *memory in lines:
        shown = time.split()[0]
        if min(float(shown.strip("*")), float(cpu)) < 1:
            slower.append(f"{title} ({shown} by time, {cpu} by CPU)")
        if memory and memory[0]:
            theirs, ours = map(float, memory[0].split(":"))
            if theirs < ours:
                larger.append(f"{title} ({memory[0]})")
    return f"Slower than: {'; '.join(slower)}.\n\nMore memory than: {'; '.join(larger)}."


if __name__ == "__main__":
    main()
