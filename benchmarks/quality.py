"""Does training at a larger batch end as well as at the small one? In how many steps?

    python benchmarks/quality.py --data FOLDER          # mnist.npz, tinyshakespeare.txt.xz
    python benchmarks/quality.py                        # scikit-learn's digits only
    python benchmarks/quality.py --quick                # a smoke test, seconds
    python benchmarks/quality.py --data FOLDER --study  # also: fewer gradients, other smoothing
    python benchmarks/quality.py --plot docs/figures    # figures of the results so far

Compares AdaScale and AdamScale with fixed rules for the learning rate. Each rule is given

    (A) as many samples as the run at scale 1: T / S steps
    (B) as many steps as AdaScale (AdamScale) took: much of what it gains over linear scaling
        at equal samples is that it takes more steps

All use the same base learning rate and a cosine over their own length. The batch of S workers
is made in one process by accumulation. Each finished run is one line in the results file
(.jsonl beside `--out`): the same command continues where it was interrupted. The key of a line
knows the workload's settings but not the version of the library: `--again` after changing it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from quality import check, tables
from quality.plan import Run, comparison, study
from quality.store import Store
from quality.training import train
from quality.workloads import WORKLOADS, Data, Workload

STUDIED = {"mnist-sgd": 3, "shakespeare-sgd": 1}  # seeds at most
QUICK: dict[str, Any] = {"steps": 32, "scales": (4,)}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    workloads = [replace(w, **QUICK) if options.quick else w for w in WORKLOADS]
    store = Store(options.out.with_suffix(".jsonl"))
    if options.plot:
        from quality import figures  # matplotlib is needed only here

        figures.write(workloads, store, options.plot)
        tables.write(workloads, store, options.out)
        if options.page:
            tables.into_page(tables.markdown(workloads, store), options.page)
        return
    chosen = [workload for workload in workloads if workload.name in options.workload]
    if options.again:
        store.forget(options.workload)
    data = {workload: found for workload in chosen if (found := data_of(workload, options.data))}
    for workload in data:
        check.fixed_rules(workload, data[workload])
    for workload, run in runs(list(data), options):
        if run not in store:
            outcome = train(workload, data[workload], run, steps_of(run, workload, store))
            store.add(run, outcome)
            report(store[run])
            tables.write(workloads, store, options.out)
    print(tables.markdown(workloads, store))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--data", type=Path, help="folder with mnist.npz, tinyshakespeare.txt.xz")
    parser.add_argument("--workload", nargs="+", choices=names, default=names, metavar="NAME",
                        help="of " + ", ".join(names))  # fmt: skip
    parser.add_argument("--seeds", type=int, help="3 by default, 1 with --quick")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/quality.json")
    parser.add_argument("--study", action="store_true",
                        help="also fewer gradients, other smoothing, other factors")  # fmt: skip
    parser.add_argument("--again", action="store_true",
                        help="forget the stored runs of these workloads")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="32 steps, scale 4, one seed: a smoke test")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write figures, run nothing")
    parser.add_argument("--page", type=Path, help="with --plot: the page to renew the tables of")
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.quick else 3)
    default = "quality-quick.json" if options.quick else "quality.json"
    options.out = options.out or RESULTS / default
    return options


def data_of(workload: Workload, folder: Path | None) -> Data | None:
    """The data, or None with a line that says what is left out and why."""
    if workload.needs is None:
        return workload.load(Path())
    if folder is None:
        print(f"left out: {workload.name} (needs --data FOLDER with {workload.needs})")
        return None
    if not (folder / workload.needs).exists():
        print(f"left out: {workload.name} ({folder} has no {workload.needs})")
        return None
    return workload.load(folder)


def runs(
    workloads: Sequence[Workload], options: argparse.Namespace
) -> Iterator[tuple[Workload, Run]]:
    """The comparisons of all workloads first, then the studies."""
    for workload in workloads:
        yield from ((workload, run) for run in comparison(workload, options.seeds))
    for workload in workloads:
        if options.study and workload.name in STUDIED:
            seeds = min(options.seeds, STUDIED[workload.name])
            yield from ((workload, run) for run in study(workload, seeds))


def steps_of(run: Run, workload: Workload, store: Store) -> int | None:
    """None: until the progress is T."""
    if run.budget == "base":
        return workload.steps
    if run.budget == "samples":
        return round(workload.steps / run.scale)
    if run.budget == "progress":
        return None
    adaptive = replace(
        run, method=workload.adaptive, budget="progress", passes=run.scale, smoothing=None
    )
    return int(store[adaptive]["steps"])


def report(row: dict[str, Any]) -> None:
    score = "NaN" if row["score"] is None else f"{row['score']:.3f}"
    print(f"{row['key']}  {row['steps']} steps  {score}  {row['cpu_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
