"""Are the parameters after training with shards those of one process with the bare optimizer?

    python benchmarks/sharding_parity.py            some minutes; writes the page
    python benchmarks/sharding_parity.py --quick    a smoke test: one precision, writes nothing

{DDP, OSS + DDP, OSS + ShardedDataParallel} x optimizers x {accumulation or not} x {float32,
autocast to bfloat16} on 1 to 4 ranks (gloo), 50 steps each, beside one process that has the whole
batch (`sharding/trials.py`). DDP is the control: it, too, adds up in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from sharding.team import Team  # noqa: E402
from sharding.trials import OPTIMIZERS, STEPS, WRAPPERS, Trials  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sharding-parity.json"
RANKS = (1, 2, 3, 4)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        write(json.loads(RESULTS.read_text()))
        return
    # Ranks are forked; what torch imports late is imported here, once.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    rows = [row for ranks in RANKS for row in trials(ranks, args.quick)]
    result = {
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "rows": rows,
    }
    print(table(rows), largest(rows), sep="\n\n")
    if not args.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        write(result)


def trials(ranks: int, quick: bool) -> list[Row]:
    """Every case on so many ranks."""
    rows = []
    with Team(ranks, Trials) as team:
        for optimizer in OPTIMIZERS:
            for bf16 in (False,) if quick else (False, True):
                for passes in (1, 2):
                    case = {"optimizer": optimizer, "bf16": bf16, "passes": passes}
                    for wrapper in WRAPPERS:
                        found = team.ask({**case, "wrapper": wrapper})
                        agree = len({rank["sum"] for rank in found}) == 1
                        row = {"ranks": ranks, "wrapper": wrapper, "agree": agree}
                        rows.append({**case, **row, **found[0]})
    return rows


def table(rows: list[Row]) -> str:
    """A line for each case, a column for each wrapper on each number of ranks."""
    columns = [(ranks, wrapper) for ranks in RANKS for wrapper in WRAPPERS]
    short = {name: name.replace("ShardedDataParallel", "SDP") for name in WRAPPERS}
    head = [f"{ranks}: {short[wrapper]}" for ranks, wrapper in columns]
    lines = [
        "| optimizer | precision | passes | " + " | ".join(head) + " |",
        "|---|---|--:|" + "--:|" * len(columns),
    ]
    cases = dict.fromkeys((row["optimizer"], row["bf16"], row["passes"]) for row in rows)
    known = {
        (row["optimizer"], row["bf16"], row["passes"], row["ranks"], row["wrapper"]): row
        for row in rows
    }
    for case in cases:
        cells = [_shown(known[(*case, *column)]) for column in columns]
        optimizer, bf16, passes = case
        precision = "bf16" if bf16 else "fp32"
        lines.append(f"| {optimizer} | {precision} | {passes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(row: Row) -> str:
    value = f"{row['apart']:.0e}" if row["apart"] else "0"
    return value if row["agree"] else f"{value} (ranks differ)"


def largest(rows: list[Row]) -> str:
    """The largest differences of each wrapper, and how they compare with DDP's."""
    lines = [
        "| | 1 rank | 2 to 4 ranks, fp32 | 2 to 4 ranks, bf16 "
        "| largest over DDP's of the same case | DDP's very bits on 2, 3, 4 ranks |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    control = {_case(row): row["apart"] for row in rows if row["wrapper"] == "DDP"}
    bits = {_case(row): row["sum"] for row in rows if row["wrapper"] == "DDP"}
    for wrapper in WRAPPERS:
        own = [row for row in rows if row["wrapper"] == wrapper]
        one = max(row["apart"] for row in own if row["ranks"] == 1)
        several = [row for row in own if row["ranks"] > 1]
        cells = ["0" if one == 0 else f"{one:.0e}"]
        for bf16 in (False, True):
            values = [row["apart"] for row in several if row["bf16"] == bf16]
            cells.append(f"{max(values):.0e}" if values else "")
        over = max(row["apart"] / control[_case(row)] for row in several if control[_case(row)])
        cells.append(f"{over:.1f}")
        same = [
            [row["sum"] == bits[_case(row)] for row in own if row["ranks"] == n] for n in RANKS[1:]
        ]
        cells.append(", ".join(f"{sum(one)} of {len(one)}" for one in same))
        lines.append(f"| {wrapper} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _case(row: Row) -> tuple[Any, ...]:
    return row["optimizer"], row["bf16"], row["passes"], row["ranks"]


PAGE = """# Does sharding change the numbers?

The parameters after {steps} steps, beside those of one process that has the whole batch and the
bare optimizer. With {versions}; gloo.

```bash
python benchmarks/sharding_parity.py
```

A decoder transformer of 0.1 M parameters on random tokens, cut into buckets of 20,000 elements, so
that there are several; on three ranks nothing comes out even. Every number is the largest
difference of any element, over the root mean square of all parameters. **0 is bit for bit.**
{agree}

{largest}

- **On one rank everything is bitwise equal**, also with a fused optimizer: nothing is moved there.
- On several ranks the mean gradient is a sum in another order than in one batch, for DDP too, and
  that is what the differences are. Training amplifies them, most where an optimizer divides a small
  gradient by its own size, and Muon, which computes in bfloat16. So DDP stands beside as the
  control: differences of its size are those of floating point.
- With DDP, `OSS` changes nothing: it steps along the same gradients, to DDP's very bits. So does
  `ShardedDataParallel` on two ranks, where a sum has one order only.
- "passes" are backward passes in a step: with 2, the first runs inside `no_sync()`.
- Muon takes the matrices of the blocks and AdamW the rest: two `OSS`, given to
  `ShardedDataParallel` as a list. LAMB and Muon look at whole parameters, and `OSS` leaves these
  whole.

## Every case

{table}
"""


def write(result: dict[str, Any]) -> None:
    rows = result["rows"]
    apart = [row for row in rows if not row["agree"]]
    agree = (
        f"In {len(apart)} cases ranks ended with different bits."
        if apart
        else "In every case all ranks ended with the same bits."
    )
    page = ROOT / "docs" / "benchmarks" / "sharding-parity.md"
    page.write_text(
        PAGE.format(
            steps=STEPS,
            versions=result["versions"],
            agree=agree,
            largest=largest(rows),
            table=table(rows),
        )
    )


if __name__ == "__main__":
    main()
