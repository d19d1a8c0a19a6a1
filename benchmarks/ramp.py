"""Compare `Ramp` with fixed batches, by time and by the model at the end.

    python benchmarks/ramp.py --data FOLDER            every workload; writes the page

One process trains each workload of `quality/workloads.py` until its progress is T small-batch
steps, under AdaScale (SGD) or AdamScale (AdamW):

    fixed     1, 2, 4, ... 128 micro-batches in every step
    ramp      `Ramp(optimizer, 128)`
    samples   `Ramp(optimizer, 128, goal="samples")`

The time of a step is not measured here but stated: `overhead + passes`, so that the best fixed
batch is a fact of the noise and not of this machine. `Ramp` sees that time on its clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import pages
import torch
from quality.training import cosine
from quality.workloads import WORKLOADS, Workload, loss_of
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands.ramp import _observed

RESULTS = pages.RESULTS / "ramp.jsonl"
FIXED = (1, 2, 4, 8, 16, 32, 64, 128)
OVERHEADS = (1.0, 4.0, 32.0)
SEEDS = 3
MAX_SCALE = 128
PREDICTED_STEPS = 10


@dataclass
class Row:
    """One run, trained to the progress of the small batch's whole run."""

    workload: str
    overhead: float
    way: str
    batch: int  # micro-batches of every step, or of the first
    seed: int
    time: float = 0.0  # in passes: overhead + passes, summed over the steps
    steps: int = 0
    samples: int = 0  # in small batches
    largest: int = 0
    score: float = 0.0
    prediction_error: float = 0.0  # median of |predicted / actual progress - 1|


class StatedClock:
    """The clock of `Ramp`, from now on: steps take `overhead + passes`."""

    def __init__(self, overhead: float) -> None:
        self.overhead = overhead
        self.now = 0.0
        mock.patch.object(_observed, "time", self).start()

    def perf_counter(self) -> float:
        return self.now

    def step(self, passes: int) -> None:
        self.now += self.overhead + passes


WAYS: dict[str, dict[str, Any]] = {"ramp": {}, "samples": {"goal": "samples"}}


def train(workload: Workload, data: Any, overhead: float, way: str, batch: int, seed: int) -> Row:
    """Train until the progress is that of `workload.steps` small-batch steps."""
    torch.manual_seed(seed)
    model = data.model()
    batches = data.batches(seed, workload.batch)
    rule = mh.AdaScale if workload.optimizer == "SGD" else mh.AdamScale
    optimizer = rule(workload.make_optimizer(model.parameters()), num_gradients_to_accumulate=batch)
    clock = StatedClock(overhead)
    ramp = mh.Ramp(optimizer, MAX_SCALE, **WAYS[way]) if way in WAYS else None
    schedule = mh.ProgressScheduler(
        LambdaLR(optimizer, lambda k: cosine(k, workload.steps)), optimizer, end=workload.steps
    )
    row = Row(workload.name, overhead, way, batch, seed)
    noise = None
    predicted = 0.0  # progress since the last prediction
    before = 0.0
    errors = []
    while not schedule.done:
        passes = batch if ramp is None else ramp.passes
        for _ in range(passes):
            (loss_of(model, *batches.take(1)) / passes).backward()
        clock.step(passes)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if noise is not None:
            predicted += noise.gain(passes)
        if row.steps % PREDICTED_STEPS == 0:
            if noise is not None:
                errors.append(abs(predicted / (optimizer.progress - before) - 1.0))
            noise = optimizer.noise if optimizer.noise.measured else None
            predicted = 0.0
            before = optimizer.progress
        row.steps += 1
        row.samples += passes
        row.largest = max(row.largest, passes)
    row.time = clock.now
    row.score = data.score(model)
    row.prediction_error = median(errors) if errors else 0.0
    return row


def run(folder: Path) -> None:
    done = {(r.workload, r.overhead, r.way, r.batch, r.seed) for r in read()}
    ways = [(0.0, "fixed", batch) for batch in FIXED]
    ways += [(0.0, "samples", 1)]
    ways += [(overhead, "ramp", 1) for overhead in OVERHEADS]
    for seed, workload, way in product(range(SEEDS), WORKLOADS, ways):
        if (workload.name, *way, seed) not in done:
            row = train(workload, workload.load(folder), *way, seed)
            print(row, flush=True)
            pages.add_row(RESULTS, asdict(row))


def read() -> list[Row]:
    return [Row(**row) for row in pages.read_rows(RESULTS)]


def fixed_runs(own: Sequence[Row]) -> dict[int, list[Row]]:
    return {b: [r for r in own if r.way == "fixed" and r.batch == b] for b in FIXED}


def label(workload: Workload) -> str:
    return f"{workload.title.split(', ')[0]}, {workload.optimizer}"


def mean_score(workload: Workload, found: Sequence[Row]) -> str:
    digits = 2 if workload.higher_is_better else 3
    return f"{mean(r.score for r in found):.{digits}f}"


def tables(rows: Sequence[Row]) -> tuple[str, str]:
    """Compare times and scores of `Ramp` with fixed batches, at each overhead.

    The fixed batches are the fastest, and the fastest with an equal or better score.
    """
    times_cells = []
    score_cells = []
    for workload in WORKLOADS:
        own = [r for r in rows if r.workload == workload.name]
        fixed = fixed_runs(own)
        sign = 1.0 if workload.higher_is_better else -1.0
        over_best = []
        over_equal = []
        scores = []
        for overhead in OVERHEADS:
            ramp = [r for r in own if r.way == "ramp" and r.overhead == overhead]
            score = sign * mean(r.score for r in ramp)
            time = mean(r.time for r in ramp)
            # A fixed batch is a single run for all overheads, with different times.
            times = {b: mean(r.samples + r.steps * overhead for r in fixed[b]) for b in FIXED}
            best = min(times, key=times.__getitem__)
            equal = [b for b in FIXED if sign * mean(r.score for r in fixed[b]) >= score]
            over_best.append(f"{time / times[best]:.2f}")
            over_equal.append(f"{time / min(times[b] for b in equal):.2f}" if equal else "none")
            scores += [mean_score(workload, ramp), mean_score(workload, fixed[best])]
        times_cells.append([label(workload), *over_best, *over_equal])
        score_cells.append([label(workload), *scores])
    heads = [f"{name}, {o:g}" for name in ("best", "equal score") for o in OVERHEADS]
    score_heads = [f"{name}, {o:g}" for o in OVERHEADS for name in ("Ramp", "best")]
    return (
        pages.table(" | ".join(["Ramp's time / fixed", *heads]), times_cells),
        pages.table(" | ".join(["score", *score_heads]), score_cells),
    )


def samples_table(rows: Sequence[Row]) -> str:
    """`goal="samples"` beside scale 1."""
    cells = []
    for workload in WORKLOADS:
        own = [r for r in rows if r.workload == workload.name]
        found = [r for r in own if r.way == "samples"]
        one = fixed_runs(own)[1]
        steps = mean(r.steps for r in found) / mean(r.steps for r in one)
        samples = mean(r.samples for r in found) / mean(r.samples for r in one)
        scores = [mean_score(workload, found), mean_score(workload, one)]
        cells.append([label(workload), f"{1 - steps:.0%}", f"{samples:.2f}", *scores])
    head = "workload | fewer steps | samples / scale 1 | score | scale 1's score"
    return pages.table(head, cells)


def main() -> None:
    arguments = pages.parser(__doc__, "mnist.npz and tinyshakespeare.txt.xz").parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        digits = next(w for w in WORKLOADS if w.name == "digits-sgd")
        for way, batch in (("ramp", 1), ("fixed", 16)):
            print(train(digits, digits.load(Path()), 4.0, way, batch, 0))
        return
    if not arguments.draw:
        run(arguments.data)
    rows = read()
    times, scores = tables(rows)
    pages.fill("ramp", times=times, scores=scores, samples=samples_table(rows))


if __name__ == "__main__":
    main()
