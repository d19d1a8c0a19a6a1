"""Does training in blocks end as well as synchronous training?

    python benchmarks/blocks_quality.py --data FOLDER    # mnist.npz, tinyshakespeare.txt.xz; writes
    python benchmarks/blocks_quality.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_quality.py --draw           # the page from the results so far

One worker that takes the whole batch, and 4 or 8 workers that step on their own part of it and
synchronize every H steps. Same number of steps, samples, schedule and inner optimizer (AdamW, or
Muon with AdamW); loss on held-out data, at the end. Each finished run is one line in
results/blocks-quality.jsonl, and the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers

peers.this_checkout()

import json_lines  # noqa: E402
import torch  # noqa: E402
from blocks.learning import TASKS, WORKERS, Task, run  # noqa: E402
from blocks_codecs import less_than_ddp  # noqa: E402
from quality.workloads import shakespeare  # noqa: E402

from manyhands._core.codec import CODECS  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-quality.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "blocks-quality.md"
SEEDS = (0, 1, 2)
SYNCHRONOUS = "synchronous"
SAME_SAMPLES = "synchronous, on the workers' samples"
LENGTHS = (8, 32, 128)
OUTER: dict[str, dict[str, Any]] = {
    "LocalSGD": {},
    "BMUF": {"block_lr": 1.0, "block_momentum": 0.75, "nesterov": True},
    "DiLoCo": {"lr": 1.0, "momentum": 0.8},
}
AT_32: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "fp4": {"codec": "fp4"},
    "topk": {"codec": "topk", "lr": 6.0, "momentum": 0.0},
    "overlap": {"overlap": 4},
    "overlap, mixing": {"overlap": 4, "mixing": 0.5},
    "int8, overlap": {"codec": "int8", "overlap": 4},
    "state averaged": {"state": "average"},
    "moments averaged at 3 and 6": {"state": {"exp_avg": 3, "exp_avg_sq": 6}},
}
WITHIN = 0.01  # of the synchronous loss
WITHIN_SPARSE = 0.005
EIGHT = Task("Shakespeare, 8 workers", batch=4, steps=4800, lr=2e-3, load=shakespeare, workers=8)
EIGHT_MUON = replace(EIGHT, name=f"{EIGHT.name}, Muon", inner="Muon")
ON_EIGHT: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    EIGHT.name: {
        "DiLoCo, H = 32": (32, {}),
        "DiLoCo, H = 32, topk": (32, {**AT_32["topk"], "lr": 8.0}),
        "DiLoCo, H = 160, ternary": (160, {"codec": "ternary"}),
    },
    EIGHT_MUON.name: {
        "DiLoCo, H = 160 in 5 fragments, ternary": (160, {"codec": "ternary", "fragments": 5})
    },
}
TABLES = {**TASKS, EIGHT.name: EIGHT, EIGHT_MUON.name: EIGHT_MUON}


def methods(task: Task) -> dict[str, dict[str, Any] | None]:
    """By the name of a line in the table. None is one worker."""
    found: dict[str, dict[str, Any] | None] = {SYNCHRONOUS: None}
    if task.name in ON_EIGHT:
        if task.name == EIGHT_MUON.name:
            found[SAME_SAMPLES] = None
        for name, (length, more) in ON_EIGHT[task.name].items():
            found[name] = made(task, "DiLoCo", length, {**OUTER["DiLoCo"], **more})
        return found
    plain = {**OUTER["BMUF"], "nesterov": False}
    found["BMUF, H = 32, momentum without Nesterov"] = made(task, "BMUF", 32, plain)
    for kind, options in OUTER.items():
        for length in LENGTHS:
            found[f"{kind}, H = {length}"] = made(task, kind, length, options)
        for name in {"LocalSGD": ["overlap", "overlap, mixing"], "BMUF": ["int8, overlap"]}.get(
            kind, AT_32
        ):
            more = AT_32[name]
            found[f"{kind}, H = 32, {name}"] = made(task, kind, 32, {**options, **more})
    return found


def made(task: Task, kind: str, length: int, options: dict[str, Any]) -> dict[str, Any]:
    """All begin with a quarter of the run together."""
    return {"kind": kind, "every": length, "warmup": task.steps // 4, **options}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--task", choices=list(TABLES), action="append", help="only this one")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.draw:
        PAGE.write_text(page(rows()))
        return
    if options.data is None:
        parser.error("--data FOLDER is needed: where mnist.npz and tinyshakespeare.txt.xz are")
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # what it imports is not imported again
    for name in options.task or list(TABLES):
        train_all(TABLES[name], options.data, options.quick)
    if not options.quick:
        PAGE.write_text(page(rows()))


def train_all(task: Task, folder: Path, quick: bool) -> None:
    if quick:
        task = replace(task, steps=40)
    planned = methods(task)
    task.load(folder)  # in this process, whose forks have it
    done = {} if quick else {row["key"]: row for row in rows()}
    seeds = SEEDS[: 1 if quick else None]
    runs = [(seed, name, method) for seed in seeds for name, method in planned.items()]
    if task.name in TASKS:  # what there are bars for comes first
        runs.sort(key=lambda one: not (one[1] == SYNCHRONOUS or one[1].endswith("int8, overlap")))
    for seed, name, method in runs:
        key = f"{task.name}/{task.steps}/{task.lr}/{task.batch}/{name}/{method}/{seed}"
        if key in done:
            continue
        loss = run(replace(task, same_samples=name == SAME_SAMPLES), folder, seed, method)
        print(f"{task.name}, seed {seed}, {name}: {loss:.4f}", flush=True)
        if not quick:
            line = {"key": key, "task": task.name, "name": name, "seed": seed, "loss": loss}
            json_lines.append(RESULTS, line)


def rows() -> list[dict[str, Any]]:
    return json_lines.read(RESULTS)


def page(found: list[dict[str, Any]]) -> str:
    known = {row["task"] for row in found}
    tables = "\n".join(table(name, found) for name in TABLES if name in known)
    return f"""# Blocks: the quality of training

```bash
python benchmarks/blocks_quality.py --data FOLDER  # mnist.npz and tinyshakespeare.txt.xz
```

One worker that takes the whole batch at each step, and 4 or 8 workers that step on their own part
of it and synchronize every H steps: as many steps, as many samples, the same schedule and inner
optimizer. It is AdamW; in the last table, Muon for the matrices of the transformer's blocks and
AdamW for the rest, each in a `DiLoCo` of its own. **The first quarter of each run is a warm-up in
which all step together**: while the loss falls steeply workers that step alone fall behind, and in
so short a run the time to catch up is short, too ([the notes](../notes.md) have what shorter runs
and other settings gave).
Loss (in nats) on held-out data, at the end: mean ± standard deviation of {len(SEEDS)} seeds, and
how much more it is than the synchronous loss of the same seeds. BMUF has `nesterov=True` and the
block momentum that its paper advises for {WORKERS} workers, 0.75; DiLoCo an outer rate of 1 and a
momentum of 0.8, but with topk a rate of 6 (on 8 workers 8) and no momentum. With overlap a mean
arrives 4 steps after it was sent, and with mixing a worker's own parameters then count for a half.
"State averaged" is AdamW's, at each sync round; "moments averaged at 3 and 6" is
`state={{"exp_avg": 3, "exp_avg_sq": 6}}`: the first moment at each third round, the second at each
sixth. "H = 160 in 5 fragments": there is a sync round every 32 steps, about a fifth of the model.
How many times fewer bytes is said of the codes; in the sockets of so small a model, whose messages
are short, it is 2,717 instead of 3,080 ([more](../blocks.md#send-less)).

The inner learning rate is the same for all, and so is the outer step of a method. Mixing brakes
an outer momentum: the momentum carries the anchor ahead of the workers, and their own half pulls it
back. On a slope DiLoCo's anchor here moves 5 times as fast as the workers, and with mixing 1.6
times. Where a line is far below the synchronous loss, a larger rate would have helped the
synchronous run as well: an outer momentum makes longer steps. Not so with Muon: at twice the rate
synchronous training ended no lower, and at half of it 1.4 % higher (one seed,
[the notes](../notes.md)).

{chr(10).join(verdicts(found))}

{tables}"""


def losses(
    found: list[dict[str, Any]], task: str, name: str, seeds: Collection[int] = SEEDS
) -> list[float]:
    rows = [row for row in found if (row["task"], row["name"]) == (task, name)]
    return [row["loss"] for row in rows if row["seed"] in seeds]


def verdicts(found: list[dict[str, Any]]) -> Iterator[str]:
    wanted = [f"{kind}, H = 32, int8, overlap" for kind in ("BMUF", "DiLoCo")]
    for task in TABLES:
        base = losses(found, task, SYNCHRONOUS)
        for name in wanted:
            ours = losses(found, task, name)
            if base and ours:
                more = statistics.mean(ours) / statistics.mean(base) - 1
                word = "within 1 %" if more <= WITHIN else "**not** within 1 %"
                yield f"- {task}, {name}: {more:+.1%}, {word} of synchronous training."
    for task, rows_of_task in ON_EIGHT.items():
        for name, (length, options) in rows_of_task.items():
            if "codec" in options:
                times = less_than_ddp(CODECS[options["codec"]], TABLES[task].workers, length)
                yield from verdict_on_few_bytes(found, task, name, times)


def verdict_on_few_bytes(
    found: list[dict[str, Any]], task: str, name: str, times: float
) -> Iterator[str]:
    seeds = {row["seed"] for row in found if (row["task"], row["name"]) == (task, name)}
    base, ours = losses(found, task, SYNCHRONOUS, seeds), losses(found, task, name)
    if base and ours:
        more = statistics.mean(ours) / statistics.mean(base) - 1
        word = "met" if more <= WITHIN_SPARSE else "**not met**"
        yield (
            f"- {task}, {name}, {times:,.0f} times fewer bytes than DDP "
            f"after the warm-up: {more:+.1%}, {word} (at most +{WITHIN_SPARSE:.1%})."
            f"{pairs(found, task, name)}"
        )


def pairs(found: list[dict[str, Any]], task: str, name: str) -> str:
    """Say how much more the loss is, seed by seed, than that of synchronous training on the same
    samples. It is steadier than the losses, because a run depends on what it has drawn."""
    by_seed = [losses(found, task, each, [seed]) for seed in SEEDS for each in (SAME_SAMPLES, name)]
    if not all(by_seed):
        return ""
    found_pairs = zip(by_seed[::2], by_seed[1::2], strict=True)
    more = [ours / base - 1 for (base,), (ours,) in found_pairs]
    each = ", ".join(f"{one:+.1%}" for one in more)
    return (
        f" Against synchronous training on the same samples {statistics.mean(more):+.1%} ({each})."
    )


def rounds(task: Task, every: int = 32) -> int:
    """How many sync rounds follow the warm-up."""
    return (task.steps - task.steps // 4) // every


def table(task: str, found: list[dict[str, Any]]) -> str:
    about = TABLES[task]
    lines = [
        f"## {task}",
        "",
        f"{MODELS[task]}, {about.steps:,} steps ({rounds(about)} sync rounds at H = 32), "
        f"{about.workers} workers with batches of {about.batch}, learning rate {about.lr:g} "
        "at most.",
        "",
        "| | loss | more than synchronous |",
        "|---|--:|--:|",
    ]
    for name in methods(about):
        ours = losses(found, task, name)
        if not ours:
            continue
        mean = statistics.mean(ours)
        spread = f"± {statistics.stdev(ours):.4f}" if len(ours) > 1 else ""
        if len(ours) < len(SEEDS):
            spread += f" ({len(ours)} of {len(SEEDS)} seeds)"
        seeds = {row["seed"] for row in found if (row["task"], row["name"]) == (task, name)}
        base = statistics.mean(losses(found, task, SYNCHRONOUS, seeds))  # of the same seeds
        more = "" if name == SYNCHRONOUS else f"{mean / base - 1:+.1%}"
        lines.append(f"| {name} | {mean:.4f} {spread} | {more} |")
    return "\n".join(lines) + "\n"


MODELS = {
    "Shakespeare": "A transformer for characters with 0.6 M parameters",
    "MNIST": "An MLP with 0.1 M parameters",
    EIGHT.name: "The same transformer",
    EIGHT_MUON.name: "The same, and Muon for the matrices of its blocks",
}


if __name__ == "__main__":
    main()
