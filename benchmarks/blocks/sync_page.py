"""The table, the verdict and the page of `blocks_sync.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import Ratio

from blocks.contenders import (
    BMUF,
    BMUF_SHARED,
    CONTROL,
    FLAT,
    LOCAL_SGD,
    LOCAL_SGD_SHARED,
    PER_TENSOR,
)

PAGE_AT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "blocks-sync.md"
FASTER = 1.5  # the aim: times as fast as one all-reduce for each tensor
KEPT = 2.05  # models: an anchor, a momentum, and some numbers


@dataclass(frozen=True)
class Row:
    """One way to synchronise."""

    name: str
    formula: str
    wall_ms: float
    least_ms: float
    cpu_ms: float  # of both ranks, all threads
    speed: Ratio  # wall of one all-reduce for each tensor, with momentum, over its own
    cpu_speed: Ratio  # the same of CPU time
    beside_torch: Ratio  # wall of torch's PeriodicModelAverager over its own
    sent: int  # bytes, by a rank
    collectives: int
    apart: float  # from the formula written out, over how far parameters have moved
    kept: float  # between synchronisations, besides parameters and gradients, in models
    most: float  # more during one, counted by tensors
    resident: float  # the same, counted by pages of the process
    elsewhere: bool = False  # it works in other processes, whose bytes and memory are not seen
    rival: Ratio | None = None  # wall of what of ours does the same, over its own
    rival_cpu: Ratio | None = None  # the same of CPU time


def restored(stored: dict[str, Any]) -> Row:
    kinds = ("speed", "cpu_speed", "beside_torch", "rival", "rival_cpu")
    ratios = {key: Ratio(**stored[key]) for key in kinds if stored.get(key)}
    return Row(**{**stored, **ratios})


def table(rows: list[Row]) -> str:
    lines = [
        "| contender | formula | wall ms, median | least | × per tensor's speed | 95 % "
        "| CPU ms, both ranks | × by CPU | MB sent | collectives "
        "| kept, models | more at its peak | by pages | from the formula |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            f"{row.wall_ms:,.0f}",
            f"{row.least_ms:,.0f}",
            f"{row.speed.value:.2f}",
            f"{row.speed.low:.2f}–{row.speed.high:.2f}",
            f"{row.cpu_ms:,.0f}",
            f"{row.cpu_speed.value:.2f}",
            *(
                ["?"] * 5
                if row.elsewhere
                else [
                    f"{row.sent / 1e6:.1f}",
                    str(row.collectives),
                    f"{row.kept:.2f}",
                    f"{row.most:.2f}",
                    f"{row.resident:.2f}",
                ]
            ),
            f"{row.apart:.0e}" if row.apart else "0",
        ]
        lines.append(f"| {row.name} | {row.formula} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Each aim, and whether it is met."""
    named = {row.name: row for row in rows}
    wanted = (BMUF, BMUF_SHARED, LOCAL_SGD, LOCAL_SGD_SHARED)
    if not {contender.name for contender in wanted} <= named.keys():
        return "- No verdict: manyhands' own were not measured."
    bmuf, bmuf_shared, average, average_shared = (named[contender.name] for contender in wanted)
    sockets, shared = average.beside_torch, average_shared.beside_torch
    ring = bmuf_shared.kept - bmuf.kept
    return "\n".join(
        [
            f"- **With momentum, at least {FASTER} × as fast as one all-reduce for each tensor:** "
            f"{_met(bmuf_shared.speed.value >= FASTER)}, {_times(bmuf_shared.speed)} by wall time, "
            f"{bmuf_shared.cpu_speed.value:.2f} × by CPU time. Through sockets "
            f"{_met(bmuf.speed.value >= FASTER)}, {_times(bmuf.speed)} and "
            f"{bmuf.cpu_speed.value:.2f} ×.",
            "- **A plain average is no slower than torch's PeriodicModelAverager:** "
            f"{_no_slower(shared)}, {_times(shared)} its speed. Through sockets "
            f"(`shared_memory=False`) {_no_slower(sockets)}, {_times(sockets)}: torch's reads the "
            "parameters and writes their mean, and ours also looks whether all are finite, reads "
            "and writes the anchor, and measures the drift.",
            "- **No copy of the whole model beyond the anchor and the outer momentum:** "
            f"{_met(max(_most(bmuf), _most(bmuf_shared) + ring) < 1 and bmuf.kept <= KEPT)}; BMUF "
            f"keeps {bmuf.kept:.2f} models between synchronisations and has {_most(bmuf):.2f} more "
            f"during one; what workers of one host read of each other is {ring:.2f} of a model.",
        ]
    )


def _most(row: Row) -> float:
    return max(row.most, row.resident)


def _times(speed: Ratio) -> str:
    return f"{speed.value:.2f} × (95 %: {speed.low:.2f} to {speed.high:.2f})"


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def _no_slower(speed: Ratio) -> str:
    if speed.value >= 1:
        return "met"
    return "met within the noise" if speed.high >= 1 else "**not met**"


PAGE = """# What one synchronisation costs

A block of local steps ends when ranks agree on a new anchor. Here that is measured by itself:
{elements:.1f} M parameters in {tensors} tensors, on 2 ranks of one machine that have one thread
each. As they come, ours read each other's memory there; everything else goes through gloo, as
between machines. Measured on {machine}, with {versions}. Other work on the machine when the run
began and ended: a load average of {load[0]} and {load[1]} (the second includes the run's own
processes).

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/blocks_sync.py
```

{verdict}

{table}

- "{per_tensor}" is fairseq's block momentum (Chen & Huo, 2016). fairseq itself is awkward to
  install today: `benchmarks/blocks/recurrence.py` is its published recurrence with its number of
  collectives, one all-reduce for each tensor, and without the third copy of the model that fairseq
  keeps, which is in its favour. "{flat}" puts all parameters into one tensor, sums that and copies
  it back.
- "× per tensor's speed" is the wall time of "{per_tensor}" over the contender's, a ratio of medians
  over {rounds} rounds with its bootstrap interval: **above 1 is faster.** Every contender has
  processes of its own; they take turns in an order drawn anew in each round. **"{control}" is the
  same a second time: what it is away from 1 is noise.** "Least" is the quickest of all rounds.
- Before anything is measured, every contender makes 3 synchronisations next to its formula written
  out tensor by tensor. "From the formula" is how far it ends from that, over how far the parameters
  have moved: in float32 what rounding leaves, with a codec what the codec leaves. All ranks end at
  the same bits.
- torchft 0.2.0: every rank is a replica group of its own, with its manager; rank 0 has the
  lighthouse. A quorum comes before each synchronisation, which is what lets workers come and go
  (a crew, here). Its int8 exchange needs a GPU. With several buckets what came back was not the
  mean (0.87 of the way off), so it is measured with one. accelerate 1.15.0 has a barrier and one
  all-reduce for each tensor. hivemind 1.1.12 averages in processes of its own, through libp2p;
  its search for a group, two seconds before each round, is not counted. Its CPU time is that of
  all its processes; its bytes and memory are not seen, and its ranks' parameters differ in the
  last bits.
- Bytes are what a rank's sockets have sent, collectives those that it starts, a message between two
  ranks counted as one. In shared memory a collective of one number goes with each of 16 parts, and
  one more at the end.
  The memory that is shared is counted in full on each of the ranks.
- Memory is in units of the model's parameters. "Kept" is what a rank has between synchronisations
  besides parameters and gradients: with momentum an anchor and the momentum, with a codec that
  rounds also what rounding has left. "More at its peak" is what tensors it makes meanwhile, "by
  pages" what the process grows by, which includes gloo's own buffers, and leaves out what the
  process had freed and not given back.
"""


def write(result: dict[str, Any]) -> None:
    """The page of a run."""
    rows = [restored(row) for row in result["rows"]]
    known = {name: result[name] for name in ("machine", "versions", "load", "tensors", "rounds")}
    page = PAGE.format(
        elements=result["elements"] / 1e6,
        verdict=verdict(rows),
        table=table(rows),
        per_tensor=PER_TENSOR.name,
        flat=FLAT.name,
        control=CONTROL.name,
        **known,
    )
    PAGE_AT.write_text(page)
