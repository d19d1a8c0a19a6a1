"""The tables and the page of `checkpoints.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from checkpointing.contenders import CONTROL, COPY, DCP, FULL, OURS

ROOT = Path(__file__).resolve().parents[2]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| ranks | | save, s | load, s | peak while saving, MB | peak while loading, MB |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        load = "" if row["name"] == COPY else f"{median(row['load']):.2f}"
        memory = "" if row["name"] == COPY else f"{max(row['load_peak']) / 1e6:,.0f}"
        lines.append(
            f"| {row['ranks']} | {row['name']} | {median(row['save']):.2f} | {load} "
            f"| {max(row['save_peak']) / 1e6:,.0f} | {memory} |"
        )
    return "\n".join(lines)


def noise(rows: Sequence[dict[str, Any]]) -> str:
    """How far the control is from what it repeats."""
    found = {(row["ranks"], row["name"]): row for row in rows}
    ratios = [
        median(found[ranks, CONTROL][key]) / median(found[ranks, DCP][key])
        for ranks in sorted({row["ranks"] for row in rows})
        for key in ("save", "load")
    ]
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def against(rows: Sequence[dict[str, Any]], other: str, key: str) -> str:
    """Another's seconds or bytes over ours, by number of ranks."""
    found = {(row["ranks"], row["name"]): row for row in rows}
    by = max if key.endswith("peak") else median
    return " and ".join(
        f"{by(found[ranks, other][key]) / max(by(found[ranks, OURS][key]), 1e-9):.2f}"
        for ranks in sorted({row["ranks"] for row in rows})
    )


PAGE = """# What a checkpoint costs

A decoder transformer of {size} parameters (float32) under torch's `fully_shard` with AdamW's
state, {state:,.0f} MB in all, saved and loaded by `mh.save` and `mh.load`; by the full state
dict (`get_state_dict(full_state_dict=True)`, then `torch.save` on rank 0;
`torch.load(mmap=True)` and `set_state_dict` on each); and by `torch.distributed.checkpoint` as
it comes. "OSS" is the same model with `mh.OSS`, whose parameters are whole on every rank. With
{versions}, on {machine}, gloo.

```bash
python benchmarks/checkpoints.py
```

{table}

Seconds are the median of {rounds} rounds, in each of which the order is rotated; every contender
has processes of its own, and all wait until the disk has the file. The control saves and loads
as torch.distributed.checkpoint does, once more: its times over the other's are {noise} (save and
load on each number of ranks), which is how far apart two times must be to mean anything. "Peak"
is by how much the resident memory of the rank that grows most was above what it held before.
{quiet}
- The full state dict takes {full_save} times as long to save (on 2 and 4 ranks) and {full_load}
  times as long to load; its rank 0 needs {full_peak} times our peak.
- torch.distributed.checkpoint takes {dcp_save} times as long to save, {dcp_load} to load. It has no
  checksums, and pickles its metadata.
- `mh.load` reads the checkpoint twice: once to compare every byte with its checksum, before
  anything changes.
- `wait=False` returns when the state is copied; its peak is at most that copy, 1/N of the state.

## Kills and damage

- **{kills} runs** of two ranks that save without a pause (every other one with `wait=False`)
  were killed with SIGKILL at a random moment. After each, the newest complete checkpoint loaded,
  all of its numbers of one and the same step: **{kills_wrong} failures**.
- **{damaged:,} checkpoints** with one file harmed at random (a bit flipped, 64 bytes zeroed, cut
  off, extended, emptied, replaced by noise, removed): **{damaged_wrong} that did not** raise an
  error which says what to do, or that changed anything in memory.
"""


def write(result: dict[str, Any]) -> None:
    rows = result["rows"]
    page = ROOT / "docs" / "benchmarks" / "checkpoints.md"
    page.write_text(
        PAGE.format(
            size=result["size"].replace("M", " M"),
            state=result["bytes"] / 1e6,
            versions=result["versions"],
            machine=result["machine"],
            table=table(rows),
            rounds=result["rounds"],
            noise=noise(rows),
            quiet=result["note"],
            full_save=against(rows, FULL, "save"),
            full_load=against(rows, FULL, "load"),
            full_peak=against(rows, FULL, "save_peak"),
            dcp_save=against(rows, DCP, "save"),
            dcp_load=against(rows, DCP, "load"),
            kills=result["kills"],
            kills_wrong=result["kills_wrong"],
            damaged=result["damaged"],
            damaged_wrong=len(result["damaged_wrong"]),
        )
    )
