"""Is a batch that sets itself as fast as the best fixed batch, and the model as good?

    python benchmarks/ramp.py --data FOLDER            every workload; writes the page
    python benchmarks/ramp.py --data FOLDER --only digits-sgd --overhead 4
    python benchmarks/ramp.py --data FOLDER --quick    a smoke test: writes nothing

One process trains each workload of `quality/workloads.py` until its progress is T small-batch
steps, once with `Ramp` and once with each fixed number of micro-batches, under AdaScale (SGD) or
AdamScale (AdamW). The time of a step is not measured here but stated: `overhead + passes`, so that
the best fixed batch is a fact of the noise and not of this machine. `Ramp` sees that time on its
clock.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from quality.training import cosine
from quality.workloads import WORKLOADS, Workload, loss_of
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands.ramp import _ramp

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ramp.jsonl"
PAGE = ROOT / "docs" / "benchmarks" / "ramp.md"
FIXED = (1, 2, 4, 8, 16, 32, 64, 128)
OVERHEADS = (1, 4, 32)
SEEDS = 3
MAX_SCALE = 128


@dataclass(frozen=True)
class Row:
    """One run, trained to the progress of the small batch's whole run."""

    workload: str
    overhead: float
    batch: int  # micro-batches of every step; 0: `Ramp`
    seed: int
    time: float  # in passes: overhead + passes, summed over the steps
    steps: int
    samples: int  # in small batches
    largest: int
    score: float


class StatedClock:
    """What `Ramp` reads instead of the time: steps take `overhead + passes`."""

    def __init__(self, overhead: float) -> None:
        self.overhead, self.now = overhead, 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, passes: int) -> None:
        self.now += self.overhead + passes


def train(workload: Workload, data: Any, overhead: float, batch: int, seed: int) -> Row:
    """Train until the progress is that of `workload.steps` small-batch steps."""
    torch.manual_seed(seed)
    model = data.model()
    batches = data.batches(seed, workload.batch)
    rule = mh.AdaScale if workload.optimizer == "SGD" else mh.AdamScale
    optimizer = rule(
        workload.make_optimizer(model.parameters()), num_gradients_to_accumulate=max(batch, 1)
    )
    clock = StatedClock(overhead)
    _ramp.time = clock  # type: ignore[assignment]
    ramp = None if batch else mh.Ramp(optimizer, MAX_SCALE)
    schedule = mh.ProgressScheduler(
        LambdaLR(optimizer, lambda k: cosine(k, workload.steps)), optimizer, end=workload.steps
    )
    steps = samples = largest = 0
    while not schedule.done:
        passes = batch or ramp.passes  # type: ignore[union-attr]
        for _ in range(passes):
            (loss_of(model, *batches.take(1)) / passes).backward()
        clock.step(passes)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        steps, samples, largest = steps + 1, samples + passes, max(largest, passes)
    return Row(
        workload.name, overhead, batch, seed, clock.now, steps, samples, largest, data.score(model)
    )


def run(
    workloads: Sequence[Workload], folder: Path, overheads: Sequence[float], seeds: int
) -> None:
    """Add the runs that are missing to the results, one line each."""
    done = {(r.workload, r.overhead if not r.batch else 0, r.batch, r.seed) for r in read()}
    for workload in workloads:
        data = workload.load(folder)
        for seed in range(seeds):
            for batch in FIXED:  # the same run at every overhead: only its time differs
                if (workload.name, 0, batch, seed) not in done:
                    append(train(workload, data, 0, batch, seed))
            for overhead in overheads:
                if (workload.name, overhead, 0, seed) not in done:
                    append(train(workload, data, overhead, 0, seed))


def append(row: Row) -> None:
    print(row, flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read() -> list[Row]:
    if not RESULTS.exists():
        return []
    return [Row(**json.loads(line)) for line in RESULTS.read_text().splitlines()]


def at_overhead(row: Row, overhead: float) -> float:
    """The time of a fixed batch's run at this overhead."""
    return row.samples + row.steps * overhead


def table(rows: Sequence[Row], workload: Workload, overhead: float) -> list[str]:
    """The page's rows of one workload at one overhead: means over seeds."""
    own = [r for r in rows if r.workload == workload.name]
    fixed = {b: [r for r in own if r.batch == b] for b in FIXED}
    fixed = {b: found for b, found in fixed.items() if found}
    times = {b: mean(at_overhead(r, overhead) for r in found) for b, found in fixed.items()}
    ramps = [r for r in own if r.batch == 0 and r.overhead == overhead]
    if not ramps or not times:
        return []
    best = min(times, key=times.__getitem__)

    def cells(name: str, found: Sequence[Row], time: float) -> str:
        scores = [r.score for r in found]
        return (
            f"| {workload.title} | {overhead:g} | {name} | {time:,.0f} | {time / times[best]:.2f} "
            f"| {mean(r.steps for r in found):,.0f} | {mean(r.samples for r in found):,.0f} "
            f"| {mean(scores):.2f} ({min(scores):.2f}–{max(scores):.2f}) |"
        )

    return [
        cells("scale 1", fixed[1], times[1]),
        cells(f"best fixed: {best}", fixed[best], times[best]),
        cells("Ramp", ramps, mean(r.time for r in ramps)),
    ]


def write(rows: Sequence[Row]) -> None:
    lines = [line for o in OVERHEADS for w in WORKLOADS for line in table(rows, w, float(o))]
    PAGE.write_text(
        "# A batch that sets itself\n\n"
        "Time to the same progress, with `Ramp` and with the best of eight fixed batches\n"
        "(1, 2, 4, …, 128 micro-batches), which had to be found by search. A step takes\n"
        "`overhead + passes`: a stated time, so that the best fixed batch is a fact of the noise\n"
        "and not of a machine. Every run ends at the progress of the small batch's whole run.\n"
        "Means over "
        f"{SEEDS} seeds, and the range of the scores.\n\n"
        "```bash\npython benchmarks/ramp.py --data ../shared/data\n```\n\n"
        "| workload | overhead | batch | time | over the best | steps | small batches | score |\n"
        "|---|--:|---|--:|--:|--:|--:|--:|\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", help="one workload's name")
    parser.add_argument("--overhead", type=float, help="one overhead; default all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        digits = next(w for w in WORKLOADS if w.name == "digits-sgd")
        data = digits.load(arguments.data)
        for batch in (0, 1, 16):
            print(train(digits, data, 4.0, batch, 0))
        return
    chosen = [w for w in WORKLOADS if arguments.only in (None, w.name)]
    overheads = OVERHEADS if arguments.overhead is None else (arguments.overhead,)
    run(chosen, arguments.data, [float(o) for o in overheads], arguments.seeds)
    write(read())


if __name__ == "__main__":
    main()
