"""What each rank holds with sharded parameters, beside DDP, torch's fully_shard and the formula.

    python benchmarks/fsdp_memory.py            two minutes; writes the page
    python benchmarks/fsdp_memory.py --quick    a smoke test: a small model, writes nothing

Every tensor's memory is counted while a decoder of 25 M parameters is trained by
AdamW(fused=True) on 1, 2 and 4 ranks (`sharding/memory.py`), with so few tokens that activations
are next to nothing; beside it stands what `mh.plan` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from sharding.contenders import DDP, OPTIONS, Contender, Trained, import_early  # noqa: E402
from sharding.fsdp_contenders import (  # noqa: E402
    BARE,
    FSDP,
    FSDP_CONTENDERS,
    FSDP_LEAN,
    ZERO3,
)
from sharding.team import Team  # noqa: E402

import manyhands as mh  # noqa: E402
from sharding import memory, models  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fsdp-memory.json"
RANKS = (1, 2, 4)
BYTES = ("parameters", "between_steps", "after_backward", "most", "resident")
PLANNED = "manyhands FSDP, as planned"
COMPARED = (DDP, BARE, FSDP, FSDP_LEAN)
ZERO = tuple(one.name for one in ZERO3 if "overlap" not in one.name)
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
    import_early()
    torch.set_num_threads(1)
    size = replace(models.SIZES["tiny" if args.quick else "25M"], batch=1, context=8)
    result: dict[str, Any] = {
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "size": size.name,
        "unit": largest_unit(size),
        "rows": measured(size),
    }
    print(table(result), verdict(result), sep="\n\n")
    if not args.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        write(result)


def largest_unit(size: models.Size) -> int:
    """Bytes of the largest wrap of `fsdp_contenders.nested`."""
    model = models.decoder(size)
    parts = (model.tokens, model.logits, *model.blocks)
    return max(4 * sum(param.numel() for param in part.parameters()) for part in parts)


def measured(size: models.Size) -> list[Row]:
    """Each contender on each number of ranks, with the bytes of the rank that holds most."""
    rows = []
    for ranks in RANKS:
        plan = mh.plan(lambda: models.decoder(size), "adamw", ranks, backend="gloo", fused=True)
        planned = Contender(PLANNED, lambda model, code=plan.rows[3].code: pasted(model, code))
        known = [FSDP_CONTENDERS[name] for name in COMPARED + (ZERO if ranks > 1 else ())]
        for contender in (*known, planned):
            if not contender.present:
                continue
            with Team(ranks, memory.work(contender, size)) as team:
                seen = team.ask({})
            row = {"name": contender.name, "ranks": ranks}
            rows.append({**row, **{key: max(rank[key] for rank in seen) for key in BYTES}})
        said = plan.rows[3]
        rows[-1]["planned"] = {
            "between_steps": said.parameters + said.optimizer,
            "after_backward": said.parameters + said.gradients + said.optimizer,
            "most": said.total,
        }
    return rows


def pasted(model: torch.nn.Module, code: str) -> Trained:
    """Wrapped by the lines that the plan gives."""
    names: dict[str, Any] = {"torch": torch, "mh": mh, "model": model, "lr": OPTIONS["lr"]}
    exec(code, names)
    return Trained(names["model"], names["optimizer"], names["optimizer"].zero_grad)


def held(ranks: int, name: str) -> tuple[float, float]:
    """By the formula, between steps and after backward, in units of the parameters' bytes."""
    return (4.0, 5.0) if name == DDP else (3 / ranks, 4 / ranks)


def table(result: dict[str, Any]) -> str:
    lines = [
        "| ranks | contender | between steps | formula | after backward | formula "
        "| most in a step | over the formula, in groups | resident |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    unit = result["rows"][0]["parameters"]  # what DeepSpeed has sharded looks empty
    for row in result["rows"]:
        between, after = held(row["ranks"], row["name"])
        over = (row["most"] - after * unit) / result["unit"]
        groups = "" if row["name"] in (DDP, PLANNED, *ZERO) else f"{over:.2f}"
        lines.append(
            f"| {row['ranks']} | {row['name']} | {row['between_steps'] / unit:.3f} | {between:.3f} "
            f"| {row['after_backward'] / unit:.3f} | {after:.3f} | {row['most'] / unit:.3f} "
            f"| {groups} | {row['resident'] / unit:.2f} |"
        )
    return "\n".join(lines)


def planned(result: dict[str, Any]) -> str:
    lines = [
        "| ranks | between steps | planned | after backward | planned | most in a step | planned |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        if "planned" in row:
            cells = [
                f"{value / 1e6:.2f} MB"
                for key in ("between_steps", "after_backward", "most")
                for value in (row[key], row["planned"][key])
            ]
            lines.append(f"| {row['ranks']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """How ours stand to the formula and to the plan."""
    ours = [row for row in result["rows"] if row["name"] == FSDP]
    beyond = [
        f"{row[key] / row['parameters']:.3f} for {expected:.3f} {said} on {row['ranks']} rank(s)"
        for row in ours
        for key, said, expected in zip(
            ("between_steps", "after_backward"),
            ("between steps", "after backward"),
            held(row["ranks"], FSDP),
            strict=True,
        )
        if abs(row[key] / row["parameters"] / expected - 1) > 0.05
    ]
    off = [
        abs(row["planned"][key] / row[key] - 1)
        for row in result["rows"]
        for key in row.get("planned", ())
    ]
    groups = {
        name: [
            (row["most"] - held(row["ranks"], name)[1] * row["parameters"]) / result["unit"]
            for row in result["rows"]
            if row["name"] == name and row["ranks"] > 1
        ]
        for name in (FSDP, FSDP_LEAN)
    }
    above = [
        row["most"] / (held(row["ranks"], FSDP)[1] * row["parameters"] + 2 * result["unit"])
        for row in result["rows"]
        if row["name"] == FSDP_LEAN and row["ranks"] > 1
    ]
    lines = [
        "- **Between steps and after backward, FSDP holds what the formula says**, within 5 %, "
        "everywhere."
        if not beyond
        else "- **Not within 5 % of the formula:** " + "; ".join(beyond) + ".",
        f"- **The most in a step** is up to {max(groups[FSDP]):.1f} groups above that after "
        f"backward; with `overlap=False` {max(groups[FSDP_LEAN]):.1f}. One group's parameters "
        "and gradients, which a backward pass needs whole, are 2: with `overlap=False` the most is "
        f"{min(above):.3f} to {max(above):.3f} times the formula and these"
        + ("." if max(above) <= 1.05 else ": **not within 5 %.**"),
        f"- **The plan** is within {100 * max(off):.1f} % of what is measured, everywhere"
        + ("." if max(off) <= 0.05 else ": **not within 5 %.**"),
    ]
    return "\n".join(lines)


PAGE = """# What each worker holds with sharded parameters

Bytes of parameters, gradients and optimizer state on a rank, beside DDP, torch's `fully_shard`
and DeepSpeed's ZeRO-3: a decoder transformer of {size} parameters (float32) with
`AdamW(fused=True)`, whose embedding, blocks and logits are wrapped each by itself, and what is
left with the whole model. With
{versions}; gloo.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/fsdp_memory.py
```

{verdict}

{table}

Everything is in units of the parameters' {unit:.1f} MB, and of the rank that holds most; a
*group* is what one wrap gathers, the largest of which is {group:.3f} of these units. Every tensor's
memory is counted, by listening to the operations that make them; gloo's own scratch memory is not.
A step has eight tokens, so that activations are next to nothing. "Between steps" is after
`zero_grad()`, "after backward" before `step()`, "most in a step" the highest of all moments.
"Resident" is what the operating system says the process has grown by at most: it includes gloo's
memory, and memory that was freed and not given back.

DeepSpeed's default bucket is 500 million elements: 2 GB of addresses, of which so small a model
touches few. Small buckets are 2 million.

The formula is (parameters 1 + gradients 1 + AdamW's state 2) / N; between steps there are no
gradients. While a backward pass runs, this is there on top, in sizes of a group (and the shares of
gradients that are still to come are not there yet):

- the whole parameters of the wrap that computes, and its gradients: 2
- the parameters of the wrap that comes after it, on their way: 1 (not with `overlap=False`)
- the gradients of the wrap that came before, on their way: 1 (not with `overlap=False`), and what
  has come for them from others than the first ((N - 2) / N); `fully_shard` has only the first of
  these two

## Next to the plan

The same model wrapped by the lines that `mh.plan` prints (smaller wraps, by size), in bytes:

{planned}
"""


def write(result: dict[str, Any]) -> None:
    unit = result["rows"][0]["parameters"]
    page = ROOT / "docs" / "benchmarks" / "fsdp-memory.md"
    page.write_text(
        PAGE.format(
            size=result["size"].replace("M", " M"),
            versions=result["versions"],
            verdict=verdict(result),
            table=table(result),
            planned=planned(result),
            unit=unit / 1e6,
            group=result["unit"] / unit,
        )
    )


if __name__ == "__main__":
    main()
