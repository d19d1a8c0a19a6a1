"""Are the parameters after training with sharded parameters those of one process?

    python benchmarks/fsdp_parity.py            fifteen minutes; writes the page
    python benchmarks/fsdp_parity.py --quick    a smoke test: up to 2 ranks, writes nothing

FSDP as one wrap, nested and by auto_wrap x {SGD with momentum, AdamW, LAMB} x {accumulation or not}
x {float32, compute in bfloat16 with float32 reduction} on 1 to 4 ranks (gloo), 50 steps each,
beside one process (`sharding/fsdp_trials.py`). Controls are DDP and torch's own fully_shard.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from sharding.fsdp_trials import BARE, CHOSEN, DDP, OURS, STEPS, Trials  # noqa: E402
from sharding.team import Team  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fsdp-parity.json"
RANKS = (1, 2, 3, 4)
CONTROLS = (DDP, BARE)
WAYS = (*CONTROLS, *OURS)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--ranks", type=int, action="append", help="only so many; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        write(json.loads(RESULTS.read_text()))
        return
    # Ranks are forked; what torch imports late is imported here, once.
    import_module("torch.distributed.fsdp")
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    chosen = args.ranks or (RANKS[:2] if args.quick else RANKS)
    rows = [row for ranks in chosen for row in trials(ranks, args.quick)]
    result = {
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "rows": rows,
    }
    print(largest(rows), table(rows), sep="\n\n")
    if not (args.quick or args.ranks):
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        write(result)


def trials(ranks: int, quick: bool) -> list[Row]:
    """Every case on so many ranks."""
    rows = []
    with Team(ranks, Trials) as team:
        for optimizer in CHOSEN[1:2] if quick else CHOSEN:
            for bf16 in (False, True):
                for passes in (1, 2):
                    case = {"optimizer": optimizer, "bf16": bf16, "passes": passes}
                    for way in WAYS:
                        if way in CONTROLS and (way == BARE) != bf16 and ranks > 1:
                            continue  # DDP in float32, fully_shard in bfloat16
                        if way in CONTROLS and ranks == 1:
                            continue  # nothing is compared with them there
                        found = team.ask({**case, "way": way})
                        agree = len({rank["sum"] for rank in found}) == 1
                        rows.append(
                            {**case, "ranks": ranks, "way": way, "agree": agree, **found[0]}
                        )
    return rows


def largest(rows: list[Row]) -> str:
    """The largest differences of each way to train."""
    lines = [
        "| | 1 rank | 2 to 4, fp32: from one batch | from its parts | 2 to 4, bf16: from one batch "
        "| from its parts |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        cells = [_most(row["whole"] for row in own if row["ranks"] == 1)]
        for bf16 in (False, True):
            several = [row for row in own if row["ranks"] > 1 and row["bf16"] == bf16]
            cells += [_most(row[key] for row in several) for key in ("whole", "parts")]
        lines.append(f"| {_name(way)} | " + " | ".join(cells) + " |")
    plain = [
        _most(row["plain"] for row in rows if row["ranks"] > 1 and row["bf16"] == bf16)
        for bf16 in (False, True)
    ]
    lines.append(f"| one process, by parts | 0 | {plain[0]} | 0 | {plain[1]} | 0 |")
    return "\n".join(lines)


def _name(way: str) -> str:
    return f"manyhands FSDP, {way}" if way in OURS else way


def _most(values: Any) -> str:
    values = list(values)
    return _shown(max(values)) if values else ""


def _shown(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def table(rows: list[Row]) -> str:
    """A line for each case and number of ranks: from one batch, and from its parts."""
    lines = [
        "| optimizer | precision | passes | ranks | "
        + " | ".join(("control", *OURS, "one process, by parts"))
        + " |",
        "|---|---|--:|--:|" + "--:|" * (len(OURS) + 2),
    ]
    cases = dict.fromkeys((r["optimizer"], r["bf16"], r["passes"], r["ranks"]) for r in rows)
    for case in sorted(cases, key=lambda case: (CHOSEN.index(case[0]), *case[1:])):
        optimizer, bf16, passes, ranks = case
        here = {
            row["way"]: row
            for row in rows
            if (row["optimizer"], row["bf16"], row["passes"], row["ranks"]) == case
        }
        control = here.get(BARE if bf16 else DDP)
        cells = [_cell(control), *(_cell(here[way]) for way in OURS)]
        cells.append(_shown(next(iter(here.values()))["plain"]))
        precision = "bf16" if bf16 else "fp32"
        lines.append(
            f"| {optimizer} | {precision} | {passes} | {ranks} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    value = f"{_shown(row['whole'])} / {_shown(row['parts'])}"
    return value if row["agree"] else f"{value} (ranks differ)"


def verdict(rows: list[Row]) -> str:
    """Where ours are further from one process than the control of the same case is."""
    case = ("optimizer", "bf16", "passes", "ranks")
    control = {tuple(row[key] for key in case): row for row in rows if row["way"] in CONTROLS}
    ours = [row for row in rows if row["way"] in OURS]
    beyond = [
        f"{row['way']}, {row['optimizer']}, {'bf16' if row['bf16'] else 'fp32'}, "
        f"{row['passes']} pass(es), {row['ranks']} ranks: {row['parts']:.0e}"
        for row in ours
        if row["ranks"] > 1
        and row["parts"] > max(1e-5, 4 * control[tuple(row[key] for key in case)]["parts"])
    ]
    alone = max(row["whole"] for row in ours if row["ranks"] == 1)
    apart = sum(not row["agree"] for row in ours)
    return "\n".join(
        [
            "- **On one rank everything is bitwise equal.**"
            if alone == 0
            else f"- **On one rank parameters are up to {alone:.0e} apart.**",
            "- **On several, FSDP is no further from one process than the control is**: at most "
            "1e-5, or a few times as far."
            if not beyond
            else "- **Further from one process than the control:** " + "; ".join(beyond) + ".",
            "- All ranks gather the same bits, in every case."
            if not apart
            else f"- **In {apart} cases ranks gather different bits.**",
        ]
    )


PAGE = """# Do sharded parameters change the numbers?

The parameters after {steps} steps of `FullyShardedDataParallel` (FSDP), beside those of one
process. With {versions}; gloo.

```bash
python benchmarks/fsdp_parity.py
```

{verdict}

A decoder transformer of 0.06 M parameters on random tokens; on three ranks most dimensions do not
come out even. It is wrapped as a whole, nested (embedding, block and logits by themselves), or by
`auto_wrap(min_num_params=10_000)`. Every number is the largest difference of any element, over the
root mean square of all parameters. **0 is bit for bit.** "fp32" is float32 throughout. "bf16" is
`mixed_precision=True, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True`.

There are two plain runs in one process. **"From one batch"** has the batches of all ranks as one.
**"From its parts"** has each rank's batch by itself and takes the mean of the gradients: what ranks
do. Where gradients are computed in bfloat16 the two differ (last line), as each batch's gradient is
rounded; FSDP is to be compared with the second.

{largest}

- What is left in float32 is the order of sums, which DDP, the control, changes as well. Training
  amplifies it, most where AdamW divides a small gradient by its own size.
- In bfloat16 the control is torch's `fully_shard` (nested) with the same precision.
- "passes" are backward passes in a step: with 2, the first runs inside `no_sync()`.

## Every case

From one batch / from its parts. The control is DDP for fp32 and `fully_shard` for bf16.

{table}
"""


def write(result: dict[str, Any]) -> None:
    rows = result["rows"]
    page = ROOT / "docs" / "benchmarks" / "fsdp-parity.md"
    page.write_text(
        PAGE.format(
            steps=STEPS,
            versions=result["versions"],
            verdict=verdict(rows),
            largest=largest(rows),
            table=table(rows),
        )
    )


if __name__ == "__main__":
    main()
