"""How alike are the movements of the workers in a block, with AdamW and with Muon inside?

    python benchmarks/blocks_cosine.py --data FOLDER    # tinyshakespeare.txt.xz; ten minutes
    python benchmarks/blocks_cosine.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_cosine.py --draw           # the page and the figure from the results

The batch of a step is the same in all runs, and is divided among 2 to 16 workers, which step with
DiLoCo, or taken by one (synchronous). Muon or AdamW updates the matrices of the transformer's
blocks, and AdamW the rest. Each finished run is one line in results/blocks-cosine.jsonl, and the
same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.this_checkout()

import json_lines  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import (  # noqa: E402
    INNER,
    TASKS,
    Transformer,
    divided,
    in_processes,
    loss_of,
    lr_at,
)
from torch import nn  # noqa: E402
from torch.optim import AdamW  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402

import manyhands as mh  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "blocks-cosine.jsonl"
PAGE = ROOT / "docs" / "benchmarks" / "blocks-cosine.md"
FIGURE = ROOT / "docs" / "figures" / "blocks-cosine.svg"
TASK = TASKS["Shakespeare"]
BATCH, WIDTH, LAYERS = 16, 64, 2
STEPS, EVERY, WARMUP, LR = 512, 32, 128, 2e-3
OUTER: dict[str, Any] = {"lr": 1.0, "momentum": 0.8}
COUNTS, SEEDS = (1, 2, 4, 8, 16), (0, 1, 2)  # workers; one is the synchronous run
COLOURS = {"AdamW": "#3a8fd0", "Muon": "#e0700a"}
INK = "#808080"  # legible on white and on black


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the data set")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        if options.data is None:
            parser.error("--data FOLDER is needed: where tinyshakespeare.txt.xz is")
        train_all(options.data, options.quick)
    if not options.quick:
        write(complete(json_lines.read(RESULTS)))


def train_all(folder: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    AdamW([nn.Parameter(torch.ones(1))])  # what it imports is not imported again by the forks
    TASK.load(folder)
    done = set() if quick else {row["key"] for row in json_lines.read(RESULTS)}
    steps, warmup = (3 * EVERY, EVERY) if quick else (STEPS, WARMUP)
    for seed in SEEDS[: 1 if quick else None]:
        for workers in (1, 2) if quick else COUNTS:
            for inner in INNER:
                key = f"{inner}/{workers}/{steps}/{warmup}/{LR}/{BATCH}/{OUTER}/{seed}"
                if key in done:
                    continue
                seen = run(folder, inner, workers, seed, steps, warmup)
                print(f"seed {seed}, {inner}, {workers} workers: {seen}", flush=True)
                if not quick:
                    row = {"key": key, "inner": inner, "workers": workers, "seed": seed, **seen}
                    json_lines.append(RESULTS, row)


def run(
    folder: Path, inner: str, workers: int, seed: int, steps: int, warmup: int
) -> dict[str, float]:
    """Train on so many forks of this process; return what the first of them has seen."""

    def work() -> dict[str, float]:
        return train(folder, inner, seed, steps, warmup)

    (first, *_) = in_processes(workers, work, f"{inner} on {workers} workers")
    return {name: value for name, value in first.items() if name != "rank"}


def train(folder: Path, inner: str, seed: int, steps: int, warmup: int) -> dict[str, float]:
    """Return the loss at the end, and the mean cosine over the blocks, of the matrices."""
    torch.set_num_threads(1)
    data, workers, rank = TASK.load(folder), dist.get_world_size(), dist.get_rank()
    torch.manual_seed(seed)
    model = Transformer(data.symbols, 64, width=WIDTH, layers=LAYERS)
    matrices, rest = divided(model)
    optimizers: list[Any] = [INNER[inner](matrices, LR), INNER["AdamW"](rest, LR)]
    if workers > 1:
        blocks = {"every": EVERY, "warmup": warmup, **OUTER}
        optimizers = [mh.DiLoCo(optimizer, **blocks) for optimizer in optimizers]
    schedules = [LambdaLR(each, lambda step: lr_at(step, steps)) for each in optimizers]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    cosines, rounds = [], 0
    for _ in range(steps):
        x, y = TASK.draw(data, BATCH // workers, generator)
        model.zero_grad()
        loss_of(model, x, y).backward()
        for each in (*optimizers, *schedules):
            each.step()
        if workers > 1 and (seen := optimizers[0].snapshot())["rounds"] > rounds:
            rounds = seen["rounds"]
            cosines.append(seen["cosine"])
    if workers > 1:
        for optimizer in optimizers:
            optimizer.synchronize()
    loss = TASK.loss_at_the_end(data, model) if rank == 0 else 0.0
    return {"loss": loss, **({"cosine": statistics.mean(cosines)} if cosines else {})}


# -- the page --------------------------------------------------------------------------------------


def values(rows: Sequence[dict[str, Any]], inner: str, workers: int, name: str) -> list[float]:
    return [r[name] for r in rows if (r["inner"], r["workers"]) == (inner, workers)]


def relative(rows: Sequence[dict[str, Any]], inner: str, workers: int) -> float:
    """The loss over that of the synchronous run with the same inner optimizer."""
    base = statistics.mean(values(rows, inner, 1, "loss"))
    return statistics.mean(values(rows, inner, workers, "loss")) / base - 1


def complete(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the seeds with which all runs have finished."""
    counts = Counter(row["seed"] for row in rows)
    return [row for row in rows if counts[row["seed"]] == len(COUNTS) * len(INNER)]


def write(rows: Sequence[dict[str, Any]]) -> None:
    seeds = len({row["seed"] for row in rows})
    if not seeds:
        return
    PAGE.write_text(page(rows, seeds))
    if find_spec("matplotlib"):
        draw(rows)
    else:
        print(f"\nThe figure needs matplotlib, which is in the peers' environment: {peers.HOW}")


def page(rows: Sequence[dict[str, Any]], seeds: int) -> str:
    lines = [
        "| workers | cosine, AdamW | cosine, Muon | loss, AdamW | loss, Muon |",
        "|--:|--:|--:|--:|--:|",
    ]
    for workers in COUNTS:
        cells = []
        for inner in INNER:
            found = values(rows, inner, workers, "cosine") if workers > 1 else []
            cells.append(spread(found) if found else "")
        for inner in INNER:
            found = values(rows, inner, workers, "loss")
            more = f", {relative(rows, inner, workers):+.1%}" if workers > 1 else ""
            cells.append(spread(found) + more)
        name = "synchronous" if workers == 1 else str(workers)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    of = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    return f"""# Blocks: the cosine between workers

```bash
python benchmarks/blocks_cosine.py --data FOLDER  # tinyshakespeare.txt.xz
```

In a block each worker moves in a direction of its own. The *cosine* of the workers' movements is 1
if all have moved the same way, and 0 if their ways are unrelated: `snapshot()["cosine"]`. MuLoCo
([Thérien et al., 2025](https://arxiv.org/abs/2505.23725)) finds, with models of 150 M parameters
and more and with rates chosen for each, that under Muon the mean movement keeps its direction
better than under AdamW as the number of workers grows, and that Muon loses less to synchronous
training.

Here the batch of a step is {BATCH} windows of 64 characters in all runs, whatever the number of
workers: {BATCH // 2} on each of 2 workers, one on each of 16. A transformer for the characters of
Shakespeare with 0.1 M parameters takes {STEPS} steps, of which the first {WARMUP} are together.
DiLoCo has H = {EVERY}, an outer rate of {OUTER["lr"]:g} and a momentum of {OUTER["momentum"]:g}.
Muon or AdamW updates the matrices of the blocks (87 % of the parameters), and AdamW the rest, each
with a learning rate of {LR:g} at most. The cosine is that of these matrices, in the mean over the
blocks after the warm-up; the loss (in nats) is that of held-out data at the end, and how much more
it is than the synchronous one. {of[0].upper()}{of[1:]}.

{table}

{verdict(rows)}

![The cosine and the loss against the number of workers](../figures/blocks-cosine.svg)
"""


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Say with which of the two the movements are more alike, and how far the losses differ."""

    def where(more: Callable[[int], bool]) -> str:
        found = [str(workers) for workers in COUNTS[1:] if more(workers)]
        return f"with {', '.join(found)} workers" if found else "for no number of workers"

    def mean(inner: str, workers: int) -> float:
        return statistics.mean(values(rows, inner, workers, "cosine"))

    alike = where(lambda n: mean("Muon", n) > mean("AdamW", n))
    most = max(abs(relative(rows, "Muon", n) - relative(rows, "AdamW", n)) for n in COUNTS[1:])
    return "\n".join(
        [
            f"- The cosine is higher with Muon than with AdamW {alike}, at equal learning rates.",
            "- What Muon and AdamW lose, each to its own synchronous run, differs by at most "
            f"{100 * most:.1f} %.",
            "- The cosine is that between two workers. The more workers there are, the smaller is",
            "  the batch of each, and the noisier its gradient.",
        ]
    )


def spread(found: Sequence[float]) -> str:
    more = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.3f}{more}"


def draw(rows: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "manyhands"
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update({"savefig.transparent": True, **dict.fromkeys(names, INK)})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for inner, colour in COLOURS.items():
        several = COUNTS[1:]
        cosines = [statistics.mean(values(rows, inner, n, "cosine")) for n in several]
        left.plot(several, cosines, "o-", color=colour, label=inner)
        more = [100 * relative(rows, inner, n) for n in several]
        right.plot(several, more, "o-", color=colour, label=inner)
    left.set_ylabel("cosine between workers")
    left.set_ylim(bottom=0)
    right.set_ylabel("loss over synchronous, %")
    right.axhline(0, color=INK, linewidth=0.8)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(COUNTS[1:], [str(n) for n in COUNTS[1:]])
        axis.set_xlabel("workers")
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, labelcolor=INK)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
