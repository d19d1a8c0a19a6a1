"""Compare AdaScale and AdamScale with fixed rules for the learning rate, at larger batches.

    python benchmarks/quality.py --data FOLDER    an hour; writes the tables

Each rule is given (A) as many samples as the run at scale 1, and (B) as many steps as AdaScale
(AdamScale) took. With AdamW and more seeds, compares AdamScale and AdaScale, and the square root in
their steps; with Muon and Adadelta AdaScale alone. Each finished run is one line in
results/quality.jsonl or quality_adam.jsonl: the same command continues where it was interrupted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pages
import torch
from quality.training import FIXED, Run, comparison, rules_around, train
from quality.workloads import OTHERS, WORKLOADS, Workload

RESULTS = pages.RESULTS / "quality.jsonl"
ADAM_RESULTS = pages.RESULTS / "quality_adam.jsonl"
SEEDS, ADAM_SEEDS, OTHER_SEEDS = 3, 10, 5
ADAMW = [workload for workload in WORKLOADS if workload.optimizer == "AdamW"]
Row = dict[str, Any]


def main() -> None:
    options = pages.parser(__doc__, "mnist.npz and tinyshakespeare.txt.xz").parse_args()
    torch.set_num_threads(1)
    if options.quick:
        few = [replace(w, steps=32, scales=(4,)) for w in WORKLOADS if w.name == "digits-sgd"]
        print(table(results_of(few, run(few, Path(), 1, []))))
        return
    rows = pages.read_rows(RESULTS)
    adam_rows = pages.read_rows(ADAM_RESULTS)
    if not options.draw:
        rows = run(WORKLOADS, options.data, SEEDS, rows, RESULTS)
        for some, seeds in ((OTHERS, OTHER_SEEDS), (ADAMW, ADAM_SEEDS)):
            adam_rows = run(some, options.data, seeds, adam_rows, ADAM_RESULTS, rules_around)
    sgd = table(results_of([w for w in WORKLOADS if w.optimizer == "SGD"], rows))
    adamw = rules_table(results_of(ADAMW, adam_rows), ["AdamScale", "AdaScale"])
    others = rules_table(results_of(OTHERS, adam_rows), ["AdaScale"])
    pages.fill("quality", SGD=sgd, AdamW=adamw, others=others)


def run(
    workloads: Sequence[Workload],
    folder: Path,
    seeds: int,
    rows: list[dict[str, Any]],
    results: Path | None = None,
    runs: Callable[[Workload, int], Iterator[Run]] = comparison,
) -> list[dict[str, Any]]:
    done = {Run(*(row[name] for name in Run.__annotations__)): row for row in rows}
    for workload in workloads:
        for one in runs(workload, seeds):
            if one in done:
                continue
            steps = steps_of(one, workload, done)
            row = {**asdict(one), **train(workload, workload.load(folder), one, steps)}
            done[one] = row
            print(*row.values(), flush=True)
            if results:
                pages.add_row(results, row)
    return list(done.values())


def steps_of(one: Run, workload: Workload, done: dict[Run, dict[str, Any]]) -> int | None:
    """None: until the progress is T."""
    if one.budget == "base":
        return workload.steps
    if one.budget == "samples":
        return round(workload.steps / one.scale)
    if one.budget == "progress":
        return None
    rule = workload.adaptive if one.budget == "steps" else one.budget.removesuffix("'s steps")
    return int(done[replace(one, method=rule, budget="progress")]["steps"])


@dataclass(frozen=True)
class Cell:
    """The same run with several seeds. `mean` and `spread` are over those that have a score."""

    workload: Workload
    rows: Sequence[Row]

    @property
    def good(self) -> list[float]:
        return [row["score"] for row in self.rows if not self.workload.failure(row["score"])]

    def __str__(self) -> str:
        places = 2 if self.workload.higher_is_better else 3
        parts = [self.fate()] if self.fate() else []
        good = self.good
        spread = f" ± {statistics.stdev(good):.{places}f}" if len(good) > 1 else ""
        if good:
            parts.append(f"{statistics.mean(good):.{places}f}{spread}")
        return "; ".join(parts)

    def fate(self) -> str:
        """Describe the runs without a score."""
        failed = [found for row in self.rows if (found := self.workload.failure(row["score"]))]
        some = f"{len(failed)} of {len(self.rows)} " if self.good else ""
        return some + " or ".join(sorted(set(failed))) if failed else ""

    def steps(self) -> str:
        steps = [row["steps"] for row in self.rows]
        spread = statistics.stdev(steps) if len(steps) > 1 else 0.0
        return f"{statistics.mean(steps):,.0f}" + (f" ± {spread:,.0f}" if spread >= 0.5 else "")


@dataclass(frozen=True)
class Results:
    workload: Workload
    rows: Sequence[Row]

    def cell(self, method: str, scale: int, budget: str) -> Cell:
        """Under the budget "steps", AdaScale's runs are its own progress runs."""
        if method == self.workload.adaptive and budget == "steps":
            budget = "progress"
        wanted = {"method": method, "scale": scale, "budget": budget}
        found = [row for row in self.rows if all(row[k] == v for k, v in wanted.items())]
        return Cell(self.workload, found)

    @property
    def base(self) -> Cell:
        return self.cell("plain", 1, "base")

    @property
    def methods(self) -> list[str]:
        return [*FIXED, self.workload.adaptive]


def results_of(workloads: Sequence[Workload], rows: Sequence[Row]) -> list[Results]:
    found = (Results(w, [row for row in rows if row["workload"] == w.name]) for w in workloads)
    return [results for results in found if results.rows]


def table(found: Sequence[Results]) -> str:
    """Return a table of all methods in equal numbers of steps, a line per workload and scale."""
    lines = []
    for results in found:
        for scale in results.workload.scales:
            cells = [results.cell(method, scale, "steps") for method in results.methods]
            lines.append([title(results), scale, results.base, *cells, cells[-1].steps()])
    methods = " | ".join(found[0].methods)
    return pages.table(f"workload | S | scale 1 | {methods} | steps", lines)


def title(results: Results) -> str:
    """Return the workload's data, optimizer and unit."""
    data = results.workload.title.split(", ")[0]
    unit = results.workload.metric.split(", ")[-1]
    return f"{data}, {results.workload.optimizer}, {unit}"


def rules_table(found: Sequence[Results], rules: list[str]) -> str:
    """A line for each workload; of the seeds that all methods have."""
    columns = [("plain", "base"), *((rule, "progress") for rule in rules)]
    columns += [("sqrt", f"{rule}'s steps") for rule in rules]
    lines = []
    for results in found:
        runs = [[r for r in results.rows if (r["method"], r["budget"]) == c] for c in columns]
        seeds = set.intersection(*({row["seed"] for row in each} for each in runs))
        cells = [Cell(results.workload, [r for r in each if r["seed"] in seeds]) for each in runs]
        lines.append([title(results), len(seeds), *(f"{cell} ({cell.steps()})" for cell in cells)])
    heads = ("scale 1", *rules, *(f"sqrt, {rule}'s steps" for rule in rules))
    return pages.table(" | ".join(["S = 16", "seeds", *heads]), lines)


if __name__ == "__main__":
    main()
