"""Compare the loss of training in blocks with that of synchronous training.

    python benchmarks/blocks_quality.py --data FOLDER    # mnist.npz, tinyshakespeare.txt.xz

Each finished run is one line in results/blocks-quality.jsonl, and the same command goes on where it
was interrupted. Ten short runs of 4 simulated workers (`blocks/short.py`) are in
results/blocks-short.jsonl.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pages
import peers

peers.this_checkout()

import torch  # noqa: E402
from blocks.learning import TASKS, Method, Task, run  # noqa: E402
from blocks.short import SHORT, Setting, simulate  # noqa: E402
from quality.workloads import python_code, shakespeare  # noqa: E402

from manyhands.blocks._anchor import Average, BlockMomentum  # noqa: E402
from manyhands.blocks.averaging._codec import CODECS  # noqa: E402

RESULTS = pages.RESULTS / "blocks-quality.jsonl"
SEEDS = (0, 1, 2)
SYNCHRONOUS = "synchronous"
OUTER: dict[str, dict[str, Any]] = {
    "LocalSGD": {},
    "BMUF": {"block_lr": 1.0, "block_momentum": 0.75, "nesterov": True},
    "DiLoCo": {"lr": 1.0, "momentum": 0.8},
}
WARMUP = 0.25  # of a run's steps, unless the options say otherwise
Options = tuple[str, int, dict[str, Any]]  # method, steps in a block, and options
FEW_BYTES: dict[str, Options] = {
    "DiLoCo, two phases, int4": ("DiLoCo", 32, {"codec": "int4", "warmup": 0, "first": WARMUP}),
}
ON_FOUR: dict[str, Options] = {
    "LocalSGD, H = 32": ("LocalSGD", 32, {}),
    "BMUF, H = 32, int8, overlap": ("BMUF", 32, {"codec": "int8", "overlap": 4}),
    "DiLoCo, H = 8": ("DiLoCo", 8, {}),
    "DiLoCo, H = 32": ("DiLoCo", 32, {}),
    "DiLoCo, H = 128": ("DiLoCo", 128, {}),
    "DiLoCo, H = 32, int8": ("DiLoCo", 32, {"codec": "int8"}),
    "DiLoCo, H = 32, int4": ("DiLoCo", 32, {"codec": "int4"}),
    "DiLoCo, H = 32, state averaged": ("DiLoCo", 32, {"state": "average"}),
    "DiLoCo, H = 32, int8, 5 % warm-up": ("DiLoCo", 32, {"codec": "int8", "warmup": 60}),
    **FEW_BYTES,
}
EIGHT = Task("Shakespeare, 8 workers", batch=4, steps=4800, lr=2e-3, load=shakespeare, workers=8)
EIGHT_MUON = replace(EIGHT, name=f"{EIGHT.name}, Muon", inner="Muon")
TERNARY_IN_FIVE = {"codec": "ternary", "fragments": 5}
ON_EIGHT: dict[str, dict[str, Options]] = {
    EIGHT.name: {
        "DiLoCo, H = 32": ("DiLoCo", 32, {}),
        "DiLoCo, H = 160, ternary": ("DiLoCo", 160, {"codec": "ternary"}),
        **FEW_BYTES,
    },
    EIGHT_MUON.name: {
        "DiLoCo, H = 160 in 5 fragments, ternary": ("DiLoCo", 160, TERNARY_IN_FIVE),
    },
}
FINE_TUNING = Task(
    "fine-tuning", batch=4, steps=400, lr=3e-4, load=python_code, after=TASKS["Shakespeare"]
)
BEFORE = "pretrained with "  # a method; all other lines are pretrained synchronously
TABLES = {**TASKS, EIGHT.name: EIGHT, EIGHT_MUON.name: EIGHT_MUON, FINE_TUNING.name: FINE_TUNING}


def methods(task: Task) -> dict[str, Method]:
    """By the name of a line in the table. None is one worker."""
    found: dict[str, Method] = {SYNCHRONOUS: None}
    lines = FEW_BYTES if task.after else ON_EIGHT.get(task.name, ON_FOUR)
    for name, options in lines.items():
        found[name] = made(task, *options)
    if task.after:
        for name in lines:
            found[f"{BEFORE}{name}"] = None
    return found


def made(task: Task, kind: str, length: int, options: dict[str, Any]) -> dict[str, Any]:
    quarter = int(WARMUP * task.steps)
    method = {"kind": kind, "every": length, "warmup": quarter, **OUTER[kind], **options}
    if "first" in method:
        method["first"] = quarter
    return method


def main() -> None:
    args = pages.parser(__doc__, data="mnist.npz and tinyshakespeare.txt.xz").parse_args()
    if not args.draw:
        for task in TABLES.values():
            train_all(task, args.data, args.quick)
        train_short(args.data, args.quick)
    if not args.quick:
        found = pages.read_rows(RESULTS)
        parts = (four_workers(found), eight_workers(found), fine_tuning(found))
        tables = "\n\n".join(parts)
        rows = pages.read_rows(SHORT_RESULTS)
        pages.fill("blocks-quality", tables=tables, short=short_table(rows))


def train_all(task: Task, folder: Path, quick: bool) -> None:
    seeds: Sequence[int] = SEEDS
    done = {row["key"] for row in pages.read_rows(RESULTS)}
    if quick:
        after = replace(task.after, steps=40) if task.after else None
        task = replace(task, steps=40, after=after)
        seeds = SEEDS[:1]
        done = set()
    task.load(folder)  # in this process, whose forks have it
    for seed, (name, method) in product(seeds, methods(task).items()):
        key = f"{task.name}/{task.steps}/{task.lr}/{task.batch}/{name}/{method}/{seed}"
        if key in done:
            continue
        before = None
        if name.startswith(BEFORE):
            before = methods(task.after or task)[name.removeprefix(BEFORE)]
        loss = run(task, folder, seed, method, before)
        print(f"{task.name}, seed {seed}, {name}: {loss:.4f}", flush=True)
        if not quick:
            line = {"key": key, "task": task.name, "name": name, "seed": seed, "loss": loss}
            pages.add_row(RESULTS, line)


SHORT_RESULTS = pages.RESULTS / "blocks-short.jsonl"
INNERS = ("AdamW", "SGD")
RATES = (1.0, 0.25)  # of the one for synchronous training
ROUNDS = (5, 10, 20, 40, 80)
SHARES = (0, 10, 25)  # % of the steps in the warm-up
STEPS = {
    "DiLoCo, default (0.7, 0.9)": BlockMomentum(0.7, 0.9, nesterov=True),
    "DiLoCo (1, 0.8)": BlockMomentum(1.0, 0.8, nesterov=True),
    "DiLoCo (1, 0.5)": BlockMomentum(1.0, 0.5, nesterov=True),
    "LocalSGD": Average(),
    "BMUF, default": BlockMomentum(),
}
SHOWN = (  # outer step and share on the page; the file has all settings
    ("DiLoCo, default (0.7, 0.9)", 0),
    ("DiLoCo (1, 0.5)", 25),
    ("LocalSGD", 25),
    ("BMUF, default", 0),
)


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


def lost(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return each task's points below synchronous training, at the rate tuned for the latter."""

    def points(task: str, name: str) -> float:
        found = [row for row in rows if (row["task"], row["rate"]) == (task, 1)]
        return statistics.mean(row["points"][name] for row in found)

    return [points(t.name, SYNCHRONOUS) - points(t.name, name) for t in SHORT]


def lost_cell(points: list[float]) -> str:
    medians = []
    for inner in INNERS:
        kind = [x for x, task in zip(points, SHORT, strict=True) if task.inner == inner]
        medians.append(f"{statistics.median(kind):.1f}")
    return f"{' / '.join(medians)} ({sum(x <= 1 for x in points)})"


def short_table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for name, share in SHOWN:
        line = [name, f"{share} %"]
        for rounds in ROUNDS:
            line.append(lost_cell(lost(rows, f"{name}/{rounds}/{share}")))
        cells.append(line)
    heads = " | ".join(f"{rounds} rounds" for rounds in ROUNDS)
    return pages.table(f"outer step | warm-up | {heads}", cells)


def losses(
    found: list[dict[str, Any]], task: str, name: str, seeds: Collection[int] = SEEDS
) -> list[float]:
    rows = [row for row in found if (row["task"], row["name"]) == (task, name)]
    return [row["loss"] for row in rows if row["seed"] in seeds]


def less_than_ddp(task: Task, method: dict[str, Any]) -> tuple[float, float]:
    """Return DDP's bytes over those of blocks: after the warm-up, and in the whole run."""
    elements = 10_000_000
    codec = CODECS[method.get("codec", "float32")]
    after = 4 * method["every"] * elements / codec.size(elements, torch.float32)  # both 2(N-1)/N
    warmup = method["warmup"] / task.steps
    first = method.get("first", 0) / task.steps  # with a round after each step
    whole = warmup + first * method["every"] / after + (1 - warmup - first) / after
    return after, 1 / whole


def excess(found: list[dict[str, Any]], task: str, name: str) -> float:
    """Return the loss over the synchronous loss of the same seeds, minus 1."""
    seeds = {row["seed"] for row in found if (row["task"], row["name"]) == (task, name)}
    base = statistics.mean(losses(found, task, SYNCHRONOUS, seeds))
    return statistics.mean(losses(found, task, name)) / base - 1


def loss_cells(found: list[dict[str, Any]], task: str, name: str) -> list[str]:
    ours = losses(found, task, name)
    spread = f"± {statistics.stdev(ours):.4f}" if len(ours) > 1 else "(1 seed)"
    more = "" if name == SYNCHRONOUS else f"{excess(found, task, name):+.1%}"
    return [f"{statistics.mean(ours):.4f} {spread}", more]


def bytes_cell(task: Task, method: Method) -> str:
    if method is None:
        return ""
    after, whole = less_than_ddp(task, method)
    return f"{after:,.0f}; {whole:.1f}"


LEFT_OUT = ("DiLoCo, H = 32, int8",)  # of the page; the file has it
BYTES = "bytes: after the warm-up; in all"


def four_workers(found: list[dict[str, Any]]) -> str:
    cells = []
    for name, method in methods(TASKS["MNIST"]).items():
        if name not in LEFT_OUT:
            line = [name]
            for task in ("Shakespeare", "MNIST"):
                line += loss_cells(found, task, name)
            cells.append([*line, bytes_cell(TASKS["MNIST"], method)])
    head = f" | Shakespeare | more | MNIST | more | {BYTES}"
    return f"## Four workers\n\n{pages.table(head, cells)}"


def eight_workers(found: list[dict[str, Any]]) -> str:
    cells = []
    for task in (EIGHT, EIGHT_MUON):
        for name, method in methods(task).items():
            title = f"{task.inner}: {name}"
            cells.append([title, *loss_cells(found, task.name, name), bytes_cell(task, method)])
    return f"## Eight workers\n\n{pages.table(f' | loss | more | {BYTES}', cells)}"


def fine_tuning(found: list[dict[str, Any]]) -> str:
    cells = []
    for name in methods(FINE_TUNING):
        cells.append([name, *loss_cells(found, FINE_TUNING.name, name)])
    return f"## Fine-tuning\n\n{pages.table(' | loss | more', cells)}"


if __name__ == "__main__":
    main()
