"""Gradients as codes: how many bytes does a step send, and does training end as well?

    python benchmarks/sharding_codecs.py --data FOLDER    # tinyshakespeare.txt.xz; writes
    python benchmarks/sharding_codecs.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/sharding_codecs.py --draw           # the page from the results so far

Four ranks train a transformer on the characters of Shakespeare, with the same samples, schedule and
AdamW in each run. Bytes are those through the ranks' sockets; times are not measured. Each finished
run is one line in results/sharding-codecs.jsonl, and the same command goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import peers

peers.this_checkout()

import json_lines  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import TASKS, Task, Transformer, in_processes, loss_of, lr_at  # noqa: E402
from quality.workloads import shakespeare  # noqa: E402
from sharding.traffic import bytes_sent  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import AdamW  # noqa: E402

import manyhands as mh  # noqa: E402
from manyhands._core.encoded_slices import EncodedSlices  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sharding-codecs.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "sharding-codecs.md"
WORKERS, BATCH, STEPS, SEEDS = 4, 4, 300, (0, 1, 2)
LONGER = 1200  # steps of one more run of some ways
WIDTH, LAYERS, LENGTH = 64, 2, 64
WINDOWS = 256  # of held-out characters
RATE = 3e-3
COUNTED = 5  # steps, after training, whose bytes are counted
LINE = 50e6  # bits a second
LARGEST_SHARE = 0.27  # of float32's bytes of gradients: the aim for int8


@dataclass(frozen=True)
class Way:
    """One line of the table."""

    sharded: dict[str, Any] = field(default_factory=dict)  # options of the module
    oss: dict[str, Any] = field(default_factory=dict)
    full: bool = False  # FSDP
    forgets: bool = False  # rounding is not made up for


WAYS = {
    "float32": Way(),
    "bfloat16": Way({"reduce_dtype": torch.bfloat16}),
    "int8": Way({"codec": "int8"}),
    "int4": Way({"codec": "int4"}),
    "fp4": Way({"codec": "fp4"}),
    "int4, without residuals": Way({"codec": "int4"}, forgets=True),
    "int8, parameters in float16": Way({"codec": "int8"}, {"broadcast_fp16": True}),
    "FSDP, float32": Way(full=True),
    "FSDP, int8": Way({"codec": "int8"}, full=True),
}

LONG_WAYS = ("float32", "int8", "int4", "fp4", "int4, without residuals")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with tinyshakespeare.txt.xz")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        if options.data is None:
            parser.error("--data FOLDER is needed: where tinyshakespeare.txt.xz is")
        torch.set_num_threads(1)
        AdamW([nn.Parameter(torch.ones(1))])  # what it imports is not imported again
        train_all(options.data, options.quick)
    if not options.quick:
        PAGE.write_text(page(json_lines.read(RESULTS)))


def train_all(folder: Path, quick: bool) -> None:
    data = shakespeare(folder)  # in this process, whose forks have it
    data = replace(data, test=data.test[: WINDOWS * LENGTH + 1])
    done = set() if quick else {row["key"] for row in json_lines.read(RESULTS)}
    for name, seed, steps in planned(quick):
        key = f"{WORKERS}/{BATCH}/{steps}/{WIDTH}/{LAYERS}/{RATE}/{name}/{seed}"
        if key in done:
            continue
        work = partial(learn, data, WAYS[name], seed, steps)
        ranks = in_processes(WORKERS, work, name)
        row: dict[str, Any] = {
            "key": key,
            "name": name,
            "seed": seed,
            "steps": steps,
            "loss": ranks[0]["loss"],
            "gradients": statistics.mean(each["gradients"] for each in ranks),
            "all": statistics.mean(each["all"] for each in ranks),
            "parameters": ranks[0]["parameters"],
        }
        print(row, flush=True)
        if not quick:
            json_lines.append(RESULTS, row)


def planned(quick: bool) -> list[tuple[str, int, int]]:
    """Return the way, the seed and the number of steps of each run."""
    if quick:
        return [(name, 0, 10) for name in WAYS]
    runs = [(name, seed, STEPS) for seed in SEEDS for name in WAYS]
    return [*runs, *((name, 0, LONGER) for name in LONG_WAYS)]


def learn(data: Any, way: Way, seed: int, steps: int) -> dict[str, float]:
    """Train, count bytes for a few more steps, and return both."""
    torch.set_num_threads(1)
    if way.forgets:
        EncodedSlices._residual = _no_residual  # type: ignore[method-assign]
    rank, task = dist.get_rank(), TASKS["Shakespeare"]
    torch.manual_seed(seed)
    module = Transformer(data.symbols, LENGTH, WIDTH, LAYERS)
    size = sum(p.numel() for p in module.parameters())
    model, optimizer = sharded(module, way)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * lr_at(step, steps)
        backward(model, optimizer, task, data, generator)
        optimizer.step()
    loss = held_out(model, way, data, task)
    gradients = total = 0
    for _ in range(COUNTED):
        before = settled_bytes()
        backward(model, optimizer, task, data, generator)
        between = settled_bytes()
        optimizer.step()
        gradients, total = gradients + between - before, total + settled_bytes() - before
    dist.barrier()  # a rank that returns closes connections, whose bytes others still count
    return {
        "loss": loss,
        "gradients": gradients / COUNTED,
        "all": total / COUNTED,
        "parameters": size,
    }


def sharded(module: nn.Module, way: Way) -> tuple[nn.Module, torch.optim.Optimizer]:
    options: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95)}
    if way.full:
        for number, block in enumerate(module.blocks):  # type: ignore[arg-type]
            module.blocks[number] = mh.FSDP(block, **way.sharded)  # type: ignore[index]
        model = mh.FSDP(module, **way.sharded)
        return model, AdamW(model.parameters(), **options)
    optimizer = mh.OSS(module.parameters(), optim=AdamW, **way.oss, **options)
    return mh.ShardedDataParallel(module, optimizer, **way.sharded), optimizer


def backward(
    model: nn.Module, optimizer: Any, task: Task, data: Any, generator: torch.Generator
) -> None:
    x, y = task.draw(data, BATCH, generator)
    optimizer.zero_grad()
    loss_of(model, x, y).backward()


def held_out(model: nn.Module, way: Way, data: Any, task: Task) -> float:
    if not way.full:
        return task.loss_at_the_end(data, model) if dist.get_rank() == 0 else 0.0
    return task.loss_at_the_end(data, model)  # which gathers parameters on all ranks


def settled_bytes() -> int:
    """Return the bytes sent so far, when every rank has come here."""
    dist.barrier()
    return bytes_sent()


def _no_residual(self: EncodedSlices, owner: int, gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient, dtype=torch.float32)


# -- the page --------------------------------------------------------------------------------------


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page of these results."""
    found = by_name(rows, STEPS)
    size = rows[0]["parameters"]
    share = mean(found["int8"], "gradients") / mean(found["float32"], "gradients")
    met = "met" if share <= LARGEST_SHARE else "**not** met"
    return f"""# Sharding: gradients as codes

```bash
python benchmarks/sharding_codecs.py --data FOLDER  # tinyshakespeare.txt.xz
```

{WORKERS} ranks train a transformer for characters with {size / 1e6:.2f} M parameters on
Shakespeare: {STEPS} steps of AdamW, {BATCH} samples of {LENGTH} characters on each rank, a learning
rate of at most {RATE:g}. All runs of a seed have the same samples. The first lines are
`OSS` and `ShardedDataParallel`: `reduce_dtype=torch.bfloat16`, or `codec=`.

| gradients as | gradients, kB | of float32 | in all, kB | s on a line | loss | over float32 |
|---|--:|--:|--:|--:|--:|--:|
{chr(10).join(line(name, found) for name in WAYS if found[name])}
{long_table(by_name(rows, LONGER))}
- *Gradients* are the bytes that a rank sends in a backward pass, and *in all* those of a step: the
  new parameters travel, too. Both are read from the ranks' sockets, with a few hundred bytes of
  barriers. FSDP also gathers parameters in a backward pass, so only the whole is given.
- *s on a line*: how long the bytes of one rank's step take at {LINE / 1e6:.0f} Mbit/s, computed.
  Times were not measured.
- *Loss* (in nats) on held-out data: mean ± standard deviation of {len(SEEDS)} seeds, and how much
  more it is than float32's, seed by seed (smallest to largest).
- *Without residuals*, what rounding leaves out is lost. (The library has no option for it.)
- *Parameters in float16*: `OSS(..., broadcast_fp16=True)`.

int8 sends {share:.3f} of float32's bytes of gradients; at most {LARGEST_SHARE:g} was the aim:
{met}.
"""


def by_name(rows: list[dict[str, Any]], steps: int) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [row for row in rows if (row["name"], row["steps"]) == (name, steps)] for name in WAYS
    }


def long_table(found: dict[str, list[dict[str, Any]]]) -> str:
    if not found["float32"]:
        return ""
    lines = ["", f"| {LONGER} steps, one seed | loss | over float32 |", "|---|--:|--:|"]
    (base,) = found["float32"]
    for name in LONG_WAYS:
        for row in found[name]:
            more = "" if row is base else f"{100 * (row['loss'] / base['loss'] - 1):+.2f} %"
            lines.append(f"| {name} | {row['loss']:.4f} | {more} |")
    return "\n".join([*lines, ""])


def line(name: str, found: dict[str, list[dict[str, Any]]]) -> str:
    rows, full = found[name], WAYS[name].full
    base = found["FSDP, float32" if full else "float32"]
    gradients, share = mean(rows, "gradients"), mean(rows, "gradients") / mean(base, "gradients")
    losses = [row["loss"] for row in rows]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    exact = {row["seed"]: row["loss"] for row in base}
    over = sorted(100 * (r["loss"] / exact[r["seed"]] - 1) for r in rows if r["seed"] in exact)
    more = "" if rows is base or not over else f"{over[0]:+.3f} to {over[-1]:+.3f} %"
    cells = [
        name,
        "" if full else f"{gradients / 1e3:,.0f}",
        "" if full else f"{share:.3f}",
        f"{mean(rows, 'all') / 1e3:,.0f}",
        f"{8 * mean(rows, 'all') / LINE:.3f}",
        f"{statistics.mean(losses):.4f}{spread}",
        more,
    ]
    return "| " + " | ".join(cells) + " |"


def mean(rows: list[dict[str, Any]], what: str) -> float:
    return statistics.mean(row[what] for row in rows)


if __name__ == "__main__":
    main()
