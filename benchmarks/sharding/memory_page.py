"""The formulas, the tables, the page and the figure of `sharding_memory.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers

from manyhands.sharding.zero._layout import bucket_size
from sharding.contenders import DDP, OURS, OVERLAP, WHOLE_GRADIENTS

ROOT = Path(__file__).resolve().parents[2]
FIGURE = ROOT / "docs" / "figures" / "sharding-memory.svg"
BYTES = ("parameters", "after_backward", "between_steps", "most", "resident")

SHARDED = (OURS, OVERLAP, "fairscale, buffer 0")


def bucket(row: dict[str, Any]) -> int:
    """Bytes of a bucket of ours, of which there is a tenth of so small a model's parameters."""
    return 4 * bucket_size(row["ranks"], row["parameters"] // 4)


def formula(name: str, ranks: int) -> tuple[float, float]:
    """After backward and between steps, in units of the parameters' bytes.

    Parameters 1, AdamW's state 2, gradients 1; DDP has gradients once more, in its buckets, for
    good. Sharded is the state with all but DDP, and the gradients with `SHARDED`.
    """
    state = 2.0 if name == DDP else 2 / ranks
    if name in SHARDED:
        return 1 + 1 / ranks + state, 1 + state
    if name == "fairscale, default buffer":  # buckets are the gradients, and stay
        return 2 + state, 2 + state
    return 3 + state, 2 + state


def measured(rows: Sequence[dict[str, Any]]) -> str:
    """Bytes over the parameters', with the formulas, and whether the aim is met."""
    lines = [
        "| ranks | contender | after backward | formula | between steps | formula "
        "| most in a step | resident |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        unit = row["parameters"]
        after, between = (f"{units:.3f}" for units in formula(row["name"], row["ranks"]))
        if "DeepSpeed" in row["name"]:  # holds more than ZeRO's formulas, for reasons of its own
            after = between = ""
        lines.append(
            f"| {row['ranks']} | {row['name']} | {row['after_backward'] / unit:.3f} | {after} "
            f"| {row['between_steps'] / unit:.3f} | {between} "
            f"| {row['most'] / unit:.3f} | {row['resident'] / unit:.2f} |"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How ours stand to the aim: 5 % and two buckets over the formula."""
    beyond = []
    for row in rows:
        if row["name"] not in (OURS, OVERLAP, WHOLE_GRADIENTS):
            continue
        expected = formula(row["name"], row["ranks"])
        for key, units in zip(("after_backward", "between_steps"), expected, strict=True):
            over = row[key] - units * row["parameters"]
            if over > 0.05 * units * row["parameters"] + 2 * bucket(row):
                beyond.append(f"{row['name']} on {row['ranks']}, {key}: {over / 1e6:.1f} MB over")
    if beyond:
        return "**Not within 5 % and two buckets of the formula:** " + "; ".join(beyond) + "."
    peaks = [
        (row["most"] - formula(row["name"], row["ranks"])[0] * row["parameters"]) / bucket(row)
        for row in rows
        if row["name"] in (OURS, OVERLAP) and row["ranks"] > 1
    ]
    return (
        "What ours hold is within 5 % and two buckets of the formula everywhere. The most in a "
        f"step is up to {max(peaks):.1f} buckets above that after backward: one fills, one is "
        "under way, its slices arrive from each worker, and the layer that backward is in has its "
        "own gradients."
    )


def behind(rows: Sequence[dict[str, Any]]) -> str:
    """Where a peer holds less than ours."""
    places = []
    for key in ("after_backward", "between_steps", "most"):
        for ranks in (2, 4):
            same = {row["name"]: row for row in rows if row["ranks"] == ranks}
            own = same[OURS][key] / same[OURS]["parameters"]
            for name, row in same.items():
                held = row[key] / row["parameters"]
                if "manyhands" not in name and held < own - 0.005:
                    when = key.replace("_", " ").replace("most", "at the most")
                    places.append(f"{name} {when} on {ranks} ranks ({held:.2f}, ours {own:.2f})")
    if not places:
        return "- No peer holds less than ours anywhere."
    return "- Less than ours hold: " + "; ".join(places) + "."


def simulated(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| collectives | ranks | after backward | formula | between steps | formula "
        "| most in a step | started in a step |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        unit, ranks = row["parameters"], row["ranks"]
        kind = "ready-made" if row["ready_made"] else "gloo's"
        after, between = formula(OURS, ranks)
        started = ", ".join(f"{count:,} {name}" for name, count in row["started"].items())
        lines.append(
            f"| {kind} | {ranks:,} | {row['after_backward'] / unit:.3f} | {after:.3f} "
            f"| {row['between_steps'] / unit:.3f} | {between:.3f} "
            f"| {row['most'] / unit:.3f} | {started} |"
        )
    return "\n".join(lines)


PAGE = """# What each worker holds

Bytes of parameters, gradients, optimizer state and buckets on a rank, beside DDP, torch's
ZeroRedundancyOptimizer, fairscale 0.4.13 and DeepSpeed 0.19.8: a decoder of {size} parameters
(float32) with `AdamW(fused=True)`. With {versions}.

```bash
python benchmarks/peers.py             # once: an environment with the peers
python benchmarks/sharding_memory.py
```

![Bytes held over the number of workers](../figures/sharding-memory.svg)

Everything is in units of the parameters' {unit:.1f} MB, and of the rank that holds most. Every
tensor's memory is counted, by listening to the operations that make them; gloo's own scratch
memory is not. A step has eight tokens, so that activations are next to nothing. "After backward"
is before `step()`, "between steps" after `zero_grad()`, "most in a step" the highest of all
moments. "Resident" is what the operating system says the process has grown by at most, which
includes memory that was freed and not given back.

The formulas are ZeRO's: parameters 1, AdamW's state 2/N, gradients 1/N where they are sharded.
DDP holds gradients twice, in `param.grad` and in its buckets, and the buckets for good; so does
whoever uses it.

{measured}

{verdict}

- A bucket is a tenth of so small a model, {bucket:.3f} of these units (and 4 Mi elements at most,
  16 MiB, on so few workers). What ours hold beyond the formula is a buffer that is kept from
  step to step, so that memory is not given back and taken again.
{behind}
- On one worker nothing is sharded: `OSS` is the optimizer itself, and no bucket is made.
- DeepSpeed holds 2 + 3/N between steps, and buffers of a bucket's size while it steps. With its
  default, 500 million elements, these are 2 GB of addresses, of which so small a model touches few.
- fairscale gives every parameter to one rank whole: its ranks hold unequal shares, and the
  largest counts.

## Up to 1,024 workers

The same model on one rank of many, in torch's fake process group, in which collectives do nothing.
Sent are always 2(N − 1)/N of the parameters' bytes per rank and step, as with DDP's all-reduce:
half of it gradients, half of it parameters.

{simulated}

- With a backend whose reduce-scatter and all-gather move no more than they must (NCCL), a bucket
  is two collectives at any number of workers.
- On gloo a bucket is N − 1 messages each way and N broadcasts: their number grows with the workers,
  and their size shrinks, although buckets grow with N where the model is large enough (eight times
  the size at 1,024 workers). gloo is not meant for such numbers of workers.
"""


def write(result: dict[str, Any]) -> None:
    """The page and the figure of a run."""
    unit = result["measured"][0]["parameters"]
    page = ROOT / "docs" / "benchmarks" / "sharding-memory.md"
    page.write_text(
        PAGE.format(
            size=result["size"].replace("M", " M"),
            versions=result["versions"],
            unit=unit / 1e6,
            bucket=bucket(result["measured"][-1]) / unit,
            measured=measured(result["measured"]),
            behind=behind(result["measured"]),
            verdict=verdict(result["measured"]),
            simulated=simulated(result["simulated"]),
        )
    )
    try:
        draw(result, FIGURE)
    except ModuleNotFoundError:
        print(f"\nThe figure needs matplotlib, which is in the peers' environment: {peers.HOW}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Left: after backward, each contender at 1, 2, 4 ranks. Right: ours up to 1,024, simulated."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "manyhands"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    others = iter(("#c2571a", "#d98a5b", "#e8b491", "#777777"))
    # DeepSpeed's are in the table: its buffers, most of them untouched, would set the scale.
    shown = [row["name"] for row in result["measured"] if "DeepSpeed" not in row["name"]]
    for name in dict.fromkeys(name for name in shown if name != OVERLAP):
        rows = [row for row in result["measured"] if row["name"] == name]
        held = [row["after_backward"] / row["parameters"] for row in rows]
        colour = "#1b7f5c" if name == OURS else "#74b89f" if "manyhands" in name else next(others)
        order = 3 if name == OURS else 2  # lines that coincide: ours on top, dashed
        style = "o--" if name == OURS else "o-"
        worlds = [row["ranks"] for row in rows]
        left.plot(worlds, held, style, color=colour, label=name, ms=4, lw=1.3, zorder=order)
    left.set_xticks([1, 2, 4])
    left.set_title("after backward, measured", fontsize=9, loc="left")
    rows = [row for row in result["simulated"] if not row["ready_made"]]
    worlds = [row["ranks"] for row in rows]
    for key, at, colour in (("after_backward", 0, "#1b7f5c"), ("between_steps", 1, "#74b89f")):
        held = [row[key] / row["parameters"] for row in rows]
        right.plot(worlds, held, "o", color=colour, label=key.replace("_", " "), ms=4)
        right.plot(worlds, [formula(OURS, n)[at] for n in worlds], "-", color=colour, lw=1)
    right.set_xscale("log", base=2)
    right.set_xticks(worlds, [f"{n:,}" for n in worlds])
    right.set_title("manyhands, simulated; lines: the formulas", fontsize=9, loc="left")
    for axis in (left, right):
        axis.set_ylim(0, None)
        axis.set_xlabel("workers", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("bytes held / parameters' bytes", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
