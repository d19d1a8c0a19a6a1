"""Does training in blocks end as well as synchronous training?

    python benchmarks/blocks_quality.py --data FOLDER    # mnist.npz, tinyshakespeare.txt.xz; writes
    python benchmarks/blocks_quality.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_quality.py --draw           # the page from the results so far

One worker that takes the whole batch, and 4 or 8 workers that step on their own part of it and
synchronize every H steps. Same number of steps, samples, schedule and inner optimizer (AdamW, or
Muon with AdamW); loss on held-out data, at the end. Each finished run is one line in
results/blocks-quality.jsonl, and the same command goes on where it was interrupted. Ten short runs
of 4 simulated workers (`blocks/short.py`) are in results/blocks-short.jsonl.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pages
import peers

peers.this_checkout()

import torch  # noqa: E402
from blocks.learning import TASKS, WORKERS, Task, run  # noqa: E402
from blocks.short import SHORT, Setting, simulate  # noqa: E402
from quality.workloads import shakespeare  # noqa: E402

from manyhands.blocks._anchor import Average, BlockMomentum  # noqa: E402
from manyhands.blocks.averaging._codec import CODECS  # noqa: E402

RESULTS = pages.RESULTS / "blocks-quality.jsonl"
SEEDS = (0, 1, 2)
SYNCHRONOUS = "synchronous"
LENGTHS = (8, 32, 128)
OUTER: dict[str, dict[str, Any]] = {
    "LocalSGD": {},
    "BMUF": {"block_lr": 1.0, "block_momentum": 0.75, "nesterov": True},
    "DiLoCo": {"lr": 1.0, "momentum": 0.8},
}
AT_32: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "overlap": {"overlap": 4},
    "int8, overlap": {"codec": "int8", "overlap": 4},
    "state averaged": {"state": "average"},
    "int8, 5 % warm-up": {"codec": "int8", "warmup": 60},
    "ternary, 5 % warm-up": {"codec": "ternary", "warmup": 60},
    "int8, momentum 0.5, 5 % warm-up": {"codec": "int8", "momentum": 0.5, "warmup": 60},
}
WITHIN = 0.01  # of the synchronous loss
WITHIN_SPARSE = 0.005
WARMUP = 0.25  # of a run's steps
EIGHT = Task("Shakespeare, 8 workers", batch=4, steps=4800, lr=2e-3, load=shakespeare, workers=8)
EIGHT_MUON = replace(EIGHT, name=f"{EIGHT.name}, Muon", inner="Muon")
ON_EIGHT: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    EIGHT.name: {
        "DiLoCo, H = 32": (32, {}),
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
        for name, (length, more) in ON_EIGHT[task.name].items():
            found[name] = made(task, "DiLoCo", length, {**OUTER["DiLoCo"], **more})
        return found
    for kind, options in OUTER.items():
        for length in LENGTHS:
            found[f"{kind}, H = {length}"] = made(task, kind, length, options)
        for name in {"LocalSGD": ["overlap"], "BMUF": ["int8, overlap"]}.get(kind, AT_32):
            more = AT_32[name]
            found[f"{kind}, H = 32, {name}"] = made(task, kind, 32, {**options, **more})
    return found


def made(task: Task, kind: str, length: int, options: dict[str, Any]) -> dict[str, Any]:
    """All begin with a quarter of the run together, unless the options say otherwise."""
    return {"kind": kind, "every": length, "warmup": int(WARMUP * task.steps), **options}


def main() -> None:
    args = pages.parser(__doc__, data="mnist.npz and tinyshakespeare.txt.xz").parse_args()
    if not args.draw:
        for task in TABLES.values():
            train_all(task, args.data, args.quick)
        train_short(args.data, args.quick)
    if not args.quick:
        draw(pages.read_rows(RESULTS))


def train_all(task: Task, folder: Path, quick: bool) -> None:
    if quick:
        task = replace(task, steps=40)
    planned = methods(task)
    task.load(folder)  # in this process, whose forks have it
    done = {row["key"] for row in pages.read_rows(RESULTS)} if not quick else set()
    seeds = SEEDS[: 1 if quick else None]
    runs = [(seed, name, method) for seed in seeds for name, method in planned.items()]
    if task.name in TASKS:  # what there are bars for comes first
        runs.sort(key=lambda one: not (one[1] == SYNCHRONOUS or one[1].endswith("int8, overlap")))
    for seed, name, method in runs:
        key = f"{task.name}/{task.steps}/{task.lr}/{task.batch}/{name}/{method}/{seed}"
        if key in done:
            continue
        loss = run(task, folder, seed, method)
        print(f"{task.name}, seed {seed}, {name}: {loss:.4f}", flush=True)
        if not quick:
            line = {"key": key, "task": task.name, "name": name, "seed": seed, "loss": loss}
            pages.add_row(RESULTS, line)


SHORT_RESULTS = pages.RESULTS / "blocks-short.jsonl"
INNERS = ("AdamW", "SGD")
RATES = (1.0, 0.25)  # of the one for synchronous training
ROUNDS, SHARES = (5, 10, 20, 40, 80), (0, 10, 25)  # % of the steps in the warm-up
STEPS = {
    "DiLoCo, default (0.7, 0.9)": BlockMomentum(0.7, 0.9, nesterov=True),
    "DiLoCo (1, 0.8)": BlockMomentum(1.0, 0.8, nesterov=True),
    "DiLoCo (1, 0.5)": BlockMomentum(1.0, 0.5, nesterov=True),
    "LocalSGD": Average(),
    "BMUF, default": BlockMomentum(),
}


def settings(steps: int, rate: float) -> dict[str, Setting]:
    """By "outer step/rounds/share"; below the rate, only what has a Nesterov momentum."""
    found: dict[str, Setting] = {SYNCHRONOUS: (steps, steps, Average())}
    for share, rounds, (name, outer) in product(SHARES, ROUNDS, STEPS.items()):
        if (share < 25 or "default" not in name) and (rate == 1 or "DiLoCo" in name):
            warmup = steps * share // 100
            every = max(1, round((steps - warmup) / rounds))
            found[f"{name}/{rounds}/{share}"] = (every, warmup, outer)
    return found


def train_short(folder: Path, quick: bool) -> None:
    """Train what is missing; a run that is not finite has no points."""
    done = [(row["task"], row["rate"], row["seed"]) for row in pages.read_rows(SHORT_RESULTS)]
    for seed, rate, task in product(SEEDS[:2], RATES, SHORT):
        if quick or (task.name, rate, seed) not in done:
            chosen = replace(task, lr=rate * task.lr, steps=40 if quick else task.steps)
            planned = settings(chosen.steps, rate)
            ends = simulate(chosen, folder, seed, list(planned.values()))
            points = {n: round(end, 2) for n, end in zip(planned, ends, strict=True)}
            print(task.name, rate, seed, points, flush=True)
            if quick:
                return
            row = {"task": task.name, "rate": rate, "seed": seed, "points": points}
            pages.add_row(SHORT_RESULTS, row)


def lost(rows: list[dict[str, Any]], rate: float, name: str) -> list[float]:
    """By how many points each task ends below synchronous training at the tuned rate."""
    ends: defaultdict[Any, list[float]] = defaultdict(list)
    for row in rows:
        for each in (name, SYNCHRONOUS):
            ends[row["task"], row["rate"], each].append(row["points"].get(each))
    of = {key: statistics.mean(points) for key, points in ends.items() if None not in points}
    return [of[t.name, 1, SYNCHRONOUS] - of[t.name, rate, name] for t in SHORT]


def told(points: list[float]) -> str:
    kinds = [[x for x, t in zip(points, SHORT, strict=True) if t.inner == i] for i in INNERS]
    medians = " / ".join(f"{statistics.median(kind):.1f}" for kind in kinds)
    return f"{medians} ({sum(x <= 1 for x in points)})"


def short_table(rows: list[dict[str, Any]], rate: float) -> str:
    cells = []
    for name, share in product(STEPS, SHARES):
        if f"{name}/5/{share}" in settings(400, rate):
            each = [lost(rows, rate, f"{name}/{rounds}/{share}") for rounds in ROUNDS]
            cells.append([name, f"{share} %", *map(told, each)])
    heads = " | ".join(f"{rounds} rounds" for rounds in ROUNDS)
    return pages.table(f"outer step | warm-up | {heads}", cells)


PAGE = """# Blocks: the quality of training

```bash
python benchmarks/blocks_quality.py --data FOLDER  # mnist.npz and tinyshakespeare.txt.xz
```

One worker takes the whole batch at each step; 4 or 8 workers step on their own part of it and
synchronize every H steps. All take as many steps on as many samples, with the same schedule and
inner optimizer: AdamW, and in the last table Muon for the matrices of the transformer's blocks and
AdamW for the rest. **The first quarter of each run, or 5 % where it says so, is a warm-up in which
all step together.** BMUF has `nesterov=True` and the block momentum that its paper advises for
{workers} workers, 0.75; DiLoCo an outer rate of 1 and a momentum of 0.8. With overlap a mean
arrives 4 steps after it was sent. "State averaged" is AdamW's, at each sync round. "H = 160 in 5
fragments" synchronizes a fifth of the model every 32 steps.

Losses are in nats, on held-out data, at the end: mean ± standard deviation of {seeds} seeds,
and how much more it is than the synchronous loss of the same seeds. The inner learning rate is the
same for all; where a loss is far below the synchronous one, a larger rate would have helped
synchronous training as well.

"Bytes" are how many times fewer a worker sends than with DDP, counting payload ("state averaged"
sends the optimizer's state too, which is not counted). On the wire, the short messages of this
small model made it 2,717 instead of 3,080
([measured once](../notes-distributed.md#blocks-bytes-and-time)). In the warm-up a worker sends as
much as with DDP, so the whole run sends at most 4 times less, and 20 times with a warm-up of 5 %.

{verdicts}

{tables}

## Short runs

Ten tasks of 400 to 800 steps: MLPs, CNNs, an LSTM, a GRU and a transformer on small MNIST, an LSTM
and a transformer on Shakespeare, and a regression; five with SGD (momentum 0.9) and five with
AdamW. 4 workers with batches of 4 or 8 are simulated in one process; a test compares this with
ranks. "Rounds" are the sync rounds after the warm-up, in which all step together. A figure is how
many points a run ends below synchronous training in as many steps (points are % of the labels, or
of the variance, on held-out data; mean of {short_seeds} seeds): the median of the five tasks with
AdamW, of the five with SGD, and in brackets how many of the ten lose at most one point.

**At the learning rate for synchronous training**, which is tuned to a factor of two:

{short}

**At a quarter of it**, against synchronous training at the whole rate:

{quarter}
"""


def draw(found: list[dict[str, Any]]) -> None:
    """Write the page of these results."""
    parts: dict[str, Any] = {"seeds": len(SEEDS), "workers": WORKERS}
    parts["tables"] = "\n\n".join(table(name, found) for name in TABLES)
    rows = pages.read_rows(SHORT_RESULTS)
    parts["short_seeds"] = len({row["seed"] for row in rows})
    parts |= {"short": short_table(rows, 1), "quarter": short_table(rows, 0.25)}
    pages.write("blocks-quality", PAGE, verdicts="\n".join(verdicts(found)), **parts)


def losses(
    found: list[dict[str, Any]], task: str, name: str, seeds: Collection[int] = SEEDS
) -> list[float]:
    rows = [row for row in found if (row["task"], row["name"]) == (task, name)]
    return [row["loss"] for row in rows if row["seed"] in seeds]


def less_than_ddp(task: Task, method: dict[str, Any]) -> tuple[float, float]:
    """How many times fewer bytes than DDP a worker sends: after the warm-up, in the whole run."""
    elements, codec = 10_000_000, CODECS[method.get("codec", "float32")]
    after = 4 * method["every"] * elements / codec.size(elements, torch.float32)  # both 2(N-1)/N
    share = method.get("warmup", WARMUP * task.steps) / task.steps
    return after, 1 / (share + (1 - share) / after)


def excess(found: list[dict[str, Any]], task: str, name: str) -> float:
    """Return how much more the loss is than the synchronous loss of the same seeds."""
    seeds = {row["seed"] for row in found if (row["task"], row["name"]) == (task, name)}
    base = statistics.mean(losses(found, task, SYNCHRONOUS, seeds))
    return statistics.mean(losses(found, task, name)) / base - 1


def verdicts(found: list[dict[str, Any]]) -> Iterator[str]:
    for task in TASKS:
        for name in [f"{kind}, H = 32, int8, overlap" for kind in ("BMUF", "DiLoCo")]:
            more = excess(found, task, name)
            yield (
                f"- {task}, {name}: loss {abs(more):.1%} {'higher' if more > 0 else 'lower'} than "
                f"synchronous training (target: at most {WITHIN:.0%} higher; "
                f"{'met' if more <= WITHIN else '**not met**'})."
            )
    for task, rows_of_task in ON_EIGHT.items():
        for name, (length, options) in rows_of_task.items():
            if "codec" not in options:
                continue
            more = excess(found, task, name)
            after, whole = less_than_ddp(TABLES[task], {"every": length, **options})
            yield (
                f"- {task}, {name}, {after:,.0f} times fewer bytes than DDP after the warm-up and "
                f"{whole:.1f} times in the whole run: loss {more:+.1%}, "
                f"{'met' if more <= WITHIN_SPARSE else '**not met**'} (target: at most "
                f"+{WITHIN_SPARSE:.1%})."
            )


def table(task: str, found: list[dict[str, Any]]) -> str:
    about = TABLES[task]
    cells = []
    for name, method in methods(about).items():
        ours = losses(found, task, name)
        spread = f"± {statistics.stdev(ours):.4f}" if len(ours) > 1 else ""
        if len(ours) < len(SEEDS):
            spread += f" ({len(ours)} of {len(SEEDS)} seeds)"
        more, bytes_ = "", ["", ""]
        if method:
            more = f"{excess(found, task, name):+.1%}"
            after, whole = less_than_ddp(about, method)
            bytes_ = [f"{after:,.0f}", f"{whole:.1f}"]
        cells.append([name, f"{statistics.mean(ours):.4f} {spread}", more, *bytes_])
    rounds = (about.steps - int(WARMUP * about.steps)) // 32
    head = " | loss | more than synchronous | bytes after the warm-up | in the whole run"
    return (
        f"## {task}\n\n{MODELS[task]}, {about.steps:,} steps ({rounds} sync rounds at H = 32), "
        f"{about.workers} workers with batches of {about.batch}, learning rate {about.lr:g} "
        f"at most.\n\n{pages.table(head, cells)}"
    )


MODELS = {
    "Shakespeare": "A transformer for characters with 0.6 M parameters",
    "MNIST": "An MLP with 0.1 M parameters",
    EIGHT.name: "The same transformer",
    EIGHT_MUON.name: "The same, and Muon for the matrices of its blocks",
}


if __name__ == "__main__":
    main()
