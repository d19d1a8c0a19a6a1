"""Is a batch that sets itself as fast as the best fixed batch, and the model as good?

    python benchmarks/ramp.py --data FOLDER            every workload; writes the page
    python benchmarks/ramp.py --draw                   the page from the rows so far
    python benchmarks/ramp.py --quick                  a smoke test: writes nothing

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
from pathlib import Path
from statistics import mean, median
from typing import Any

import pages
import torch
from quality.training import cosine
from quality.workloads import WORKLOADS, Workload, loss_of
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands.ramp import _observed

RESULTS = pages.RESULTS / "ramp.jsonl"
FIXED = (1, 2, 4, 8, 16, 32, 64, 128)
OVERHEADS = (1, 4, 32)
SEEDS = 3
MAX_SCALE = 128
PREDICTED_STEPS = 10


@dataclass(frozen=True)
class Row:
    """One run, trained to the progress of the small batch's whole run."""

    workload: str
    overhead: float
    way: str
    batch: int  # micro-batches of every step, or of the first
    seed: int
    time: float  # in passes: overhead + passes, summed over the steps
    steps: int
    samples: int  # in small batches
    largest: int
    score: float
    prediction_error: float = 0.0  # median of |predicted / actual progress - 1|


class StatedClock:
    """What `Ramp` reads instead of the time: steps take `overhead + passes`."""

    def __init__(self, overhead: float) -> None:
        self.overhead, self.now = overhead, 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, passes: int) -> None:
        self.now += self.overhead + passes


WAYS = {"ramp": {}, "samples": {"goal": "samples"}}


def train(workload: Workload, data: Any, overhead: float, way: str, batch: int, seed: int) -> Row:
    """Train until the progress is that of `workload.steps` small-batch steps."""
    torch.manual_seed(seed)
    model = data.model()
    batches = data.batches(seed, workload.batch)
    rule = mh.AdaScale if workload.optimizer == "SGD" else mh.AdamScale
    optimizer = rule(workload.make_optimizer(model.parameters()), num_gradients_to_accumulate=batch)
    clock = StatedClock(overhead)
    _observed.time = clock  # type: ignore[assignment]
    ramp = mh.Ramp(optimizer, MAX_SCALE, **WAYS[way]) if way in WAYS else None
    schedule = mh.ProgressScheduler(
        LambdaLR(optimizer, lambda k: cosine(k, workload.steps)), optimizer, end=workload.steps
    )
    steps = samples = largest = 0
    noise, predicted, before, errors = None, 0.0, 0.0, []
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
        if steps % PREDICTED_STEPS == 0:
            if noise is not None:
                errors.append(abs(predicted / (optimizer.progress - before) - 1.0))
            noise = optimizer.noise if optimizer.noise.measured else None
            predicted, before = 0.0, optimizer.progress
        steps, samples, largest = steps + 1, samples + passes, max(largest, passes)
    of_run = (workload.name, overhead, way, batch, seed)
    error = median(errors) if errors else 0.0
    return Row(*of_run, clock.now, steps, samples, largest, data.score(model), error)


def run(folder: Path) -> None:
    """Add the runs that are missing to the results, one line each."""
    done = {(r.workload, r.overhead, r.way, r.batch, r.seed) for r in read()}

    def add(workload: Workload, overhead: float, way: str, batch: int, seed: int) -> None:
        if (workload.name, overhead, way, batch, seed) not in done:
            row = train(workload, workload.load(folder), overhead, way, batch, seed)
            print(row, flush=True)
            pages.add_row(RESULTS, asdict(row))

    for seed in range(SEEDS):
        for workload in WORKLOADS:
            for batch in FIXED:
                add(workload, 0.0, "fixed", batch, seed)
            add(workload, 0.0, "samples", 1, seed)
            for overhead in map(float, OVERHEADS):
                add(workload, overhead, "ramp", 1, seed)


def read() -> list[Row]:
    return [Row(**row) for row in pages.read_rows(RESULTS)]


def score_cell(workload: Workload, found: Sequence[Row]) -> str:
    scores = [r.score for r in found]
    digits = 2 if workload.higher_is_better else 3
    return f"{mean(scores):.{digits}f} ({min(scores):.{digits}f}–{max(scores):.{digits}f})"


def table(rows: Sequence[Row]) -> str:
    """A row for each workload and overhead: `Ramp` beside two fixed batches, means over seeds.

    One is the fastest; the other the fastest whose mean score is no worse than `Ramp`'s.
    """
    cells = []
    for workload in WORKLOADS:
        own = [r for r in rows if r.workload == workload.name]
        fixed = {b: [r for r in own if r.way == "fixed" and r.batch == b] for b in FIXED}
        sign = 1.0 if workload.higher_is_better else -1.0
        for overhead in map(float, OVERHEADS):
            ramp = [r for r in own if r.way == "ramp" and r.overhead == overhead]
            score, time = sign * mean(r.score for r in ramp), mean(r.time for r in ramp)
            # the same run at every overhead: only its time differs
            times = {b: mean(r.samples + r.steps * overhead for r in fixed[b]) for b in FIXED}
            best = min(times, key=times.__getitem__)
            as_good = [b for b in FIXED if sign * mean(r.score for r in fixed[b]) >= score]
            same = min(as_good, key=times.__getitem__, default=None)
            cells.append(
                [
                    *(workload.title, f"{overhead:g}", f"{times[1] / times[best]:.2f}", best),
                    *(f"{time / times[best]:.2f}", score_cell(workload, fixed[best])),
                    *(score_cell(workload, ramp), "none" if same is None else same),
                    "" if same is None else f"{time / times[same]:.2f}",
                ]
            )
    return pages.table(HEAD, cells)


def samples_table(rows: Sequence[Row]) -> str:
    """`goal="samples"` beside scale 1."""
    cells = []
    for workload in WORKLOADS:
        own = [r for r in rows if r.workload == workload.name]
        found = [r for r in own if r.way == "samples"]
        one = [r for r in own if r.way == "fixed" and r.batch == 1]
        steps, samples = (
            mean(getattr(r, what) for r in found) / mean(getattr(r, what) for r in one)
            for what in ("steps", "samples")
        )
        scores = (score_cell(workload, some) for some in (found, one))
        cells.append([workload.title, f"{1 - steps:.0%}", f"{samples:.2f}", *scores])
    head = "workload | fewer steps than scale 1 | samples over scale 1's | score | at scale 1"
    return pages.table(head, cells)


HEAD = (
    "workload | overhead | scale 1's time over the best | best fixed batch | Ramp's time over it "
    "| its score | Ramp's score | fastest no worse than Ramp | Ramp's time over it"
)
TEXT = """# Ramp and the best fixed batch size

**The time is simulated.** A step takes `overhead + passes`, so the best fixed batch depends on the
noise of the gradients and not on a machine. [Time to a target loss](time_to_loss.md) has measured
times. `Ramp` is compared with the best of eight fixed batches (1, 2, 4, …, 128 micro-batches),
which had to be found by search. All use AdaScale (SGD) or AdamScale (AdamW), with the small
batch's learning rate and schedule, and end at the progress of the small batch's whole run. Means
over {seeds} seeds, and the range of the scores: accuracy in %, or loss on Shakespeare.

```bash
python benchmarks/ramp.py --data FOLDER
```

{table}

Where `Ramp` saves most time, its model is worse than that of the best fixed batch: the ranges of
the scores are disjoint for Shakespeare, SGD at overheads 4 and 32. The last two columns compare it
with the fastest fixed batch whose mean score is no worse than its own.

The fixed batches of Shakespeare are older than the limit on a step's noise. 11 of their 48 runs
were repeated with it, and took 0.999 to 1.014 of the time.

## Few steps for few samples: `goal="samples"`

The batch is sqrt(0.8 noise scale), the best one if each step has a fixed cost of 0.8 small batches.

{samples}

## Predictions

The progress of the next 10 steps is predicted from the noise known before them. The median error
of a run is {middle:.1%} in the middle of {runs} runs, and {worst:.1%} in the worst.
"""


def write(rows: Sequence[Row]) -> None:
    errors = [r.prediction_error for r in rows if r.way == "ramp"]
    parts = {"table": table(rows), "samples": samples_table(rows)}
    known = {"middle": median(errors), "worst": max(errors), "runs": len(errors), "seeds": SEEDS}
    pages.write("ramp", TEXT, {**parts, **known})


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
    write(read())


if __name__ == "__main__":
    main()
