"""Is a batch that sets itself as fast as the best fixed batch, and the model as good?

    python benchmarks/ramp.py --data FOLDER            every workload; writes the page
    python benchmarks/ramp.py --data FOLDER --only digits-sgd --overhead 4
    python benchmarks/ramp.py --data FOLDER --quick    a smoke test: writes nothing

One process trains each workload of `quality/workloads.py` until its progress is T small-batch
steps, under AdaScale (SGD) or AdamScale (AdamW):

    fixed     1, 2, 4, ... 128 micro-batches in every step
    ramp      `Ramp(optimizer, 128)`
    samples   `Ramp(optimizer, 128, goal="samples")`
    doubling  by hand, as OLMo: the best fixed batch, twice that from 28 % of the progress on, four
              times from 83 % on (Merrill et al. 2025)
    seesaw    by hand: the best fixed batch, and where the cosine lowers the rate the batch grows
              (Meterez et al. 2025): `Ramp(optimizer, 128, goal=None, decay="batch")`

The time of a step is not measured here but stated: `overhead + passes`, so that the best fixed
batch is a fact of the noise and not of this machine. `Ramp` sees that time on its clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import json_lines
import torch
from quality.training import cosine
from quality.workloads import WORKLOADS, Workload, loss_of
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands.ramp import _step_times

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ramp.jsonl"
PAGE = ROOT / "docs" / "benchmarks" / "ramp.md"
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


DOUBLINGS = ((0.28, 2), (0.83, 4))  # from this part of the progress on, so many times the batch
WAYS = {
    "ramp": {},
    "samples": {"goal": "samples"},
    "seesaw": {"goal": None, "decay": "batch"},
}


def train(workload: Workload, data: Any, overhead: float, way: str, batch: int, seed: int) -> Row:
    """Train until the progress is that of `workload.steps` small-batch steps."""
    torch.manual_seed(seed)
    model = data.model()
    batches = data.batches(seed, workload.batch)
    rule = mh.AdaScale if workload.optimizer == "SGD" else mh.AdamScale
    optimizer = rule(workload.make_optimizer(model.parameters()), num_gradients_to_accumulate=batch)
    clock = StatedClock(overhead)
    _step_times.time = clock  # type: ignore[assignment]
    ramp = mh.Ramp(optimizer, MAX_SCALE, **WAYS[way]) if way in WAYS else None
    schedule = mh.ProgressScheduler(
        LambdaLR(optimizer, lambda k: cosine(k, workload.steps)), optimizer, end=workload.steps
    )
    steps = samples = largest = 0
    noise, predicted, before, errors = None, 0.0, 0.0, []
    while not schedule.done:
        if ramp is not None:
            passes = ramp.passes
        elif way == "doubling":
            done = optimizer.progress / workload.steps
            factor = max([1, *(times for part, times in DOUBLINGS if done >= part)])
            passes = min(batch * factor, MAX_SCALE)
            if passes != optimizer.passes:
                optimizer.set_num_gradients_to_accumulate(passes)
        else:
            passes = batch
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
    error = median(errors) if errors else 0.0
    return Row(
        *(workload.name, overhead, way, batch, seed, clock.now, steps, samples, largest),
        data.score(model),
        error,
    )


def run(
    workloads: Sequence[Workload], folder: Path, overheads: Sequence[float], seeds: int
) -> None:
    """Add the runs that are missing to the results, one line each."""
    done = {(r.workload, r.overhead, r.way, r.batch, r.seed) for r in read()}

    def add(workload: Workload, overhead: float, way: str, batch: int, seed: int) -> None:
        if (workload.name, overhead, way, batch, seed) not in done:
            append(train(workload, workload.load(folder), overhead, way, batch, seed))

    for seed in range(seeds):
        for workload in workloads:
            for batch in FIXED:  # the same run at every overhead: only its time differs
                add(workload, 0.0, "fixed", batch, seed)
            add(workload, 0.0, "samples", 1, seed)
            for overhead in overheads:
                add(workload, overhead, "ramp", 1, seed)
    for workload in workloads:  # by hand, from the batch that was found by search
        for overhead in overheads:
            best = best_fixed(read(), workload, overhead)
            for seed in range(seeds):
                for way in ("doubling", "seesaw"):
                    add(workload, overhead, way, best, seed)


def append(row: Row) -> None:
    print(row, flush=True)
    json_lines.append(RESULTS, asdict(row))


def read() -> list[Row]:
    return [Row(**row) for row in json_lines.read(RESULTS)]


def at_overhead(row: Row, overhead: float) -> float:
    """The time of a fixed batch's run at this overhead."""
    return row.samples + row.steps * overhead


def times_of_fixed(rows: Sequence[Row], workload: Workload, overhead: float) -> dict[int, float]:
    """The mean time of each fixed batch, over the seeds that `Ramp` was run with."""
    seeds = {r.seed for r in rows if r.workload == workload.name and r.way == "ramp"}
    fixed = [
        r
        for r in rows
        if r.workload == workload.name and r.way == "fixed" and r.seed in (seeds or {r.seed})
    ]
    return {
        batch: mean(at_overhead(r, overhead) for r in fixed if r.batch == batch)
        for batch in FIXED
        if any(r.batch == batch for r in fixed)
    }


def best_fixed(rows: Sequence[Row], workload: Workload, overhead: float) -> int:
    times = times_of_fixed(rows, workload, overhead)
    return min(times, key=times.__getitem__)


def score_cell(workload: Workload, found: Sequence[Row]) -> str:
    scores = [r.score for r in found]
    digits = 2 if workload.higher_is_better else 3
    return f"{mean(scores):.{digits}f} ({min(scores):.{digits}f}–{max(scores):.{digits}f})"


def table(rows: Sequence[Row], workload: Workload, overhead: float) -> list[str]:
    """The page's rows of one workload at one overhead: means over seeds."""
    own = [r for r in rows if r.workload == workload.name]
    times = times_of_fixed(rows, workload, overhead)
    if not times:
        return []
    best = min(times, key=times.__getitem__)

    def line(name: str, found: Sequence[Row]) -> str:
        time = mean(at_overhead(r, overhead) for r in found)
        return (
            f"| {workload.title} | {overhead:g} | {name} | {time:,.0f} | {time / times[best]:.2f} "
            f"| {mean(r.steps for r in found):,.0f} | {mean(r.samples for r in found):,.0f} "
            f"| {score_cell(workload, found)} |"
        )

    def of(way: str) -> list[Row]:
        return [r for r in own if r.way == way and r.overhead == overhead]

    seeds = {r.seed for r in of("ramp")} or {r.seed for r in own}
    fixed = {
        b: [r for r in own if r.way == "fixed" and r.batch == b and r.seed in seeds]
        for b in (1, best)
    }
    named = [
        ("scale 1", fixed[1]),
        (f"best fixed: {best}", fixed[best]),
        ("Ramp", of("ramp")),
        ("doubling by hand", of("doubling")),
        ("Seesaw by hand", of("seesaw")),
    ]
    return [line(name, found) for name, found in named if found]


def quality_table(rows: Sequence[Row]) -> list[str]:
    """`Ramp` beside the fastest fixed batch whose mean score is no worse than its own."""
    lines = []
    for workload in WORKLOADS:
        own = [r for r in rows if r.workload == workload.name]
        sign = 1.0 if workload.higher_is_better else -1.0
        for overhead in map(float, OVERHEADS):
            ramp = [r for r in own if r.way == "ramp" and r.overhead == overhead]
            times = times_of_fixed(rows, workload, overhead)
            if not ramp or not times:
                continue
            seeds, score = {r.seed for r in ramp}, sign * mean(r.score for r in ramp)
            fixed = [r for r in own if r.way == "fixed" and r.seed in seeds]
            scores = {b: sign * mean(r.score for r in fixed if r.batch == b) for b in times}
            time = mean(r.time for r in ramp)
            as_good = [b for b in times if scores[b] >= score]
            fastest = min(as_good, key=times.__getitem__, default=None)
            beside = "none | " if fastest is None else f"{fastest} | {time / times[fastest]:.2f}"
            lines.append(
                f"| {workload.title} | {overhead:g} | {time / min(times.values()):.2f} | {beside} |"
            )
    return lines


def samples_table(rows: Sequence[Row]) -> list[str]:
    """`goal="samples"` beside scale 1."""
    lines = []
    for workload in WORKLOADS:
        own = [r for r in rows if r.workload == workload.name]
        found = [r for r in own if r.way == "samples"]
        one = [r for r in own if r.way == "fixed" and r.batch == 1]
        if found and one:
            steps, samples = (
                mean(getattr(r, what) for r in found) / mean(getattr(r, what) for r in one)
                for what in ("steps", "samples")
            )
            lines.append(
                f"| {workload.title} | {1 - steps:.0%} | {samples:.2f} "
                f"| {score_cell(workload, found)} | {score_cell(workload, one)} |"
            )
    return lines


def write(rows: Sequence[Row]) -> None:
    lines = [line for w in WORKLOADS for o in OVERHEADS for line in table(rows, w, float(o))]
    errors = [r.prediction_error for r in rows if r.way == "ramp"]
    PAGE.write_text(
        "# A batch that sets itself\n\n"
        "Time to the same progress: with `Ramp`, with the best of eight fixed batches (1, 2, 4,\n"
        "…, 128 micro-batches), which had to be found by search, and with two ramps by hand that\n"
        "begin at that best fixed batch. *Doubling* is OLMo's: twice the batch from 28 % of the\n"
        "progress on, four times from 83 % on. *Seesaw* lets the batch grow where the cosine\n"
        "lowers the rate. All use AdaScale (SGD) or AdamScale (AdamW), and the small batch's\n"
        "learning rate and schedule. A step takes `overhead + passes`: a stated time, so that the\n"
        "best fixed batch is a fact of the noise and not of a machine. Every run ends at the\n"
        "progress of the small batch's whole run. Means over "
        f"{SEEDS} seeds, and the range of the scores.\n\n"
        "```bash\npython benchmarks/ramp.py --data ../shared/data\n```\n\n"
        "| workload | overhead | batch | time | over the best | steps | small batches | score |\n"
        "|---|--:|---|--:|--:|--:|--:|--:|\n" + "\n".join(lines) + "\n\n"
        "## At equal quality\n\n"
        "The best fixed batch above is the fastest, whatever its score. This one is the fastest\n"
        "of those whose mean score is no worse than `Ramp`'s.\n\n"
        "| workload | overhead | Ramp over the fastest | as good as Ramp | Ramp over it |\n"
        "|---|--:|--:|--:|--:|\n" + "\n".join(quality_table(rows)) + "\n\n"
        '## Few steps for few samples: `goal="samples"`\n\n'
        "The batch is sqrt(0.8 noise scale): the best one if a step costs 0.8 small batches\n"
        "more than it has.\n\n"
        "| workload | fewer steps than scale 1 | samples over scale 1's | score | at scale 1 |\n"
        "|---|--:|--:|--:|--:|\n" + "\n".join(samples_table(rows)) + "\n\n"
        "## Predictions\n\n"
        "The progress of the next 10 steps is predicted from the noise that is known before them,\n"
        "and their numbers of micro-batches. The median error of a run is\n"
        f"{median(errors):.1%} in the middle, and {max(errors):.1%} in the worst of "
        f"{len(errors)} runs.\n"
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
        for way, batch in (("ramp", 1), ("fixed", 1), ("fixed", 16), ("seesaw", 4)):
            print(train(digits, data, 4.0, way, batch, 0))
        return
    chosen = [w for w in WORKLOADS if arguments.only in (None, w.name)]
    overheads = OVERHEADS if arguments.overhead is None else (arguments.overhead,)
    run(chosen, arguments.data, [float(o) for o in overheads], arguments.seeds)
    write(read())


if __name__ == "__main__":
    main()
