"""The table, the page and the figure of `sharding_speed.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
from rounds import Ratio

from sharding.contenders import CONTENDERS, CONTROL, DDP, OURS
from sharding.speed import Row, restored

ROOT = Path(__file__).resolve().parents[2]
FIGURE = ROOT / "docs" / "figures" / "sharding-speed.svg"


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| AdamW | contender | CPU ms | × DDP's speed | 95 % | wall ms | × tokens/s | 95 % "
        "| MB sent | collectives |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.choice} | {row.name} | {row.cpu_ms:,.0f} | {_times(row, row.cpu)} "
            f"| {row.wall_ms:,.0f} | {_times(row, row.wall)} "
            f"| {row.sent / 1e6:.1f} | {row.collectives} |"
        )
    return "\n".join(lines)


def _times(row: Row, value: Ratio) -> str:
    if row.name == DDP:
        return "1 | "
    return f"{value.value:.3f} | {value.low:.3f}–{value.high:.3f}"


PAGE = """# How fast a sharded step is

A step of `OSS` and `ShardedDataParallel` beside DDP's, torch's ZeroRedundancyOptimizer, fairscale
0.4.13 and DeepSpeed 0.19.8: AdamW on a decoder transformer. Measured on {machine}, with
{versions}; ranks talk through gloo on one machine and have one thread each. The load average at
which each table's run began stands above it; the tables before it have their share in that.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/sharding_speed.py
```

![Speed over DDP's](../figures/sharding-speed.svg)

"× DDP's speed" is DDP's CPU time of all ranks and threads over the contender's, "× tokens/s" the
same for wall time: **above 1 is faster than DDP**. Both are ratios of medians over rounds with
their bootstrap intervals. Every contender has processes of its own; they take turns in an order
drawn anew in each round. CPU time is the firmer figure: with as many ranks as cores, or
more, wall time depends on who waits for whom. **The row "again (A/A)" is DDP a second time: what
it is away from 1 is noise.** (At 100 M it is the same processes once more: there is no room for
others.) "fused" is `AdamW(fused=True)` on all sides, "default" torch's loop over tensors. Bytes are
what a rank's sockets have sent in a step, collectives those that a rank starts.

{tables}

Reading the tables:

{reading}
"""

FIXED = """- Every contender trains the same model: before anything is measured, its parameters
  are compared with DDP's. fairscale's default buckets are right only where `zero_grad` sets
  gradients to zero and not to None, and that is how they are measured.
- DeepSpeed has the same `AdamW`, as it comes and with buckets of 2 million elements (its default,
  500 million, is one bucket for the whole of these models), `overlap_comm` on and off. It runs
  beside a DDP and an `OSS` with `ShardedDataParallel` of its own: not all fit into memory at once.
- On a machine that is shared, wall time is noise wherever its interval is wide."""


def reading(workloads: dict[str, list[Row]]) -> str:
    """Where ours are slower than DDP, and where a peer is faster: by CPU time."""
    lines = []
    for title, rows in workloads.items():
        for choice in dict.fromkeys(row.choice for row in rows):
            same = {row.name: row for row in rows if row.choice == choice}
            ours = same[OURS]
            if ours.cpu.high < 1:
                lines.append(f"- {title}, {choice}: ours is slower than DDP ({ours.cpu}).")
            ahead = [
                f"{row.name} ({row.cpu.value:.3f})"
                for row in same.values()
                if not row.name.startswith(("manyhands", DDP)) and row.cpu.value > ours.cpu.value
            ]
            if ahead:
                own = f"{ours.cpu.value:.3f}"
                lines.append(f"- {title}, {choice}: ahead of ours ({own}): {', '.join(ahead)}.")
    found = "\n".join(lines) or "- Ours is behind DDP or a peer nowhere, by CPU time."
    return f"{found}\n{FIXED}"


def write(result: dict[str, Any]) -> None:
    """The page and the figure of a run."""
    measurements = result["workloads"].items()
    workloads = {title: [restored(row) for row in one["rows"]] for title, one in measurements}
    tables = "\n\n".join(
        f"## {title}\n\nLoad average before: {one['load']}\n\n{table(workloads[title])}"
        for title, one in measurements
    )
    known = {name: result[name] for name in ("machine", "versions")}
    page = ROOT / "docs" / "benchmarks" / "sharding-speed.md"
    page.write_text(PAGE.format(tables=tables, reading=reading(workloads), **known))
    try:
        draw(workloads, FIGURE)
    except ModuleNotFoundError:
        print(f"\nThe figure needs matplotlib, which is in the peers' environment: {peers.HOW}")


def draw(workloads: dict[str, list[Row]], path: Path) -> None:
    """CPU speed over DDP's, a panel for each workload: filled for fused, hollow for default."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "manyhands"
    from matplotlib import pyplot

    names = [n for n in CONTENDERS if n != DDP][::-1]
    figure, axes = pyplot.subplots(
        2, 2, figsize=(9, 0.55 * len(names) + 1.2), sharey=True, sharex=True, layout="constrained"
    )
    for axis, (title, rows) in zip(axes.flat, workloads.items(), strict=False):
        for row in rows:
            if row.name == DDP:
                continue
            fused = row.choice == "fused"
            y = names.index(row.name) + (0.15 if fused else -0.15)
            ours = row.name.startswith("manyhands")
            colour = "#1b7f5c" if ours else "#999999" if row.name == CONTROL else "#c2571a"
            axis.plot([row.cpu.low, row.cpu.high], [y, y], color=colour, linewidth=1.5)
            face = colour if fused else "white"
            axis.plot(row.cpu.value, y, "o", color=colour, markerfacecolor=face, markersize=5)
        axis.axvline(1, color="#555555", linewidth=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.set_title(title, fontsize=8, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "DDP's CPU time / the contender's: right is faster (filled: AdamW fused, hollow: default)",
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
