"""Does training at a larger batch end as well as at the small one? In how many steps?

    python benchmarks/quality.py --data FOLDER    an hour; writes the tables
    python benchmarks/quality.py --quick          a smoke test, seconds

Compares AdaScale and AdamScale with fixed rules for the learning rate. Each rule is given

    (A) as many samples as the run at scale 1: T / S steps
    (B) as many steps as AdaScale (AdamScale) took: much of what it gains over linear scaling
        at equal samples is that it takes more steps

All use the same base learning rate and a cosine over their own length. The batch of S workers
is made in one process by accumulation. Each finished run is one line in results/quality.jsonl: the
same command continues where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pages
import torch
from quality import page
from quality.training import Run, comparison, train
from quality.workloads import WORKLOADS, Workload

RESULTS = pages.RESULTS / "quality.jsonl"
SEEDS = 3


def main() -> None:
    parser = pages.parser(__doc__, "mnist.npz and tinyshakespeare.txt.xz")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        few = [replace(w, steps=32, scales=(4,)) for w in WORKLOADS if w.name == "digits-sgd"]
        print(page.table(page.results_of(few, run(few, Path(), 1, []))[0]))
        return
    rows = pages.read_rows(RESULTS)
    if not options.draw:
        if options.data is None:
            parser.error("--data FOLDER is needed.")
        rows = run(WORKLOADS, options.data, SEEDS, rows, RESULTS)
    page.write(page.results_of(WORKLOADS, rows))


def run(
    workloads: Sequence[Workload],
    folder: Path,
    seeds: int,
    rows: list[dict[str, Any]],
    results: Path | None = None,
) -> list[dict[str, Any]]:
    """Add the missing runs to the rows, and store each at once."""
    done = {Run(*(row[name] for name in Run.__annotations__)): row for row in rows}
    for workload in workloads:
        for one in comparison(workload, seeds):
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
    return int(done[replace(one, method=workload.adaptive, budget="progress")]["steps"])


if __name__ == "__main__":
    main()
