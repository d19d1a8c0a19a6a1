"""Does a probe say what whole runs would? Its verdicts against full training at each scale.

    python benchmarks/probe.py --data FOLDER           every workload; writes the page (minutes)
    python benchmarks/probe.py --data FOLDER --only mnist-adamw
    python benchmarks/probe.py --data FOLDER --quick   a smoke test: writes nothing

The truth: each workload of `quality/workloads.py` is trained for T small-batch steps' worth of
samples at each scale, with as many seeds. The rate falls to zero by a cosine over the samples.
A seed has the same first parameters and the same samples at every scale, so the differences between
scales are paired. A scale is level in truth if its mean final test loss is behind that of scale 1
by less than the margin of the probe's own rule: 0.954 standard deviations of scale 1's final losses
over the seeds. It is called unclear if its difference is within a standard error of the margin.

The probes: one run at scale 1 for each seed, with a probe at each of `MOMENTS`. Each of them alone
costs at most 5 % of the run's samples: a picture that is evaluated counts as a third of one that is
trained on. It evaluates on pictures of the test set, and trains at the rate that the schedule has
reached.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import json_lines
import torch
from quality.training import cosine
from quality.workloads import WORKLOADS, Workload, loss_of

import manyhands as mh
from manyhands.probe._verdict import MEANINGFUL

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "probe.jsonl"
PAGE = ROOT / "docs" / "benchmarks" / "probe.md"
NAMES = ("mnist-sgd", "mnist-adamw")
SCALES = (1, 2, 4, 8)
MOMENTS = (0.1, 0.4, 0.7)  # of the run
SEEDS = 3
REPEATS = 5
VERDICTS = ("level", "undecided", "worse", "diverged")
LENGTH = 20_000  # small batches of each run
HELD_OUT, PICTURES = 7, 64


@dataclass(frozen=True)
class Line:
    """One run to the end (`moment` is None), or one probe."""

    workload: str
    seed: int
    scale: int  # of the run; of a probe, the largest level one
    moment: float | None
    loss: float  # on the test set, at the end; of a probe, that of scale 1
    worse: float  # of a probe: the first scale that is surely worse
    samples: float  # that were trained on; of a probe, with a third of those evaluated
    verdicts: str


def make(workload: Workload, data: Any, seed: int, scale: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = data.model()
    rule = mh.AdaScale if workload.optimizer == "SGD" else mh.AdamScale
    optimizer = rule(workload.make_optimizer(model.parameters()), num_gradients_to_accumulate=scale)
    return model, optimizer


def stream(workload: Workload, data: Any, seed: int) -> Iterator[Any]:
    batches = data.batches(seed, workload.batch)
    while True:
        yield batches.take(1)


def probe_stream(workload: Workload, data: Any, seed: int) -> Iterator[Any]:
    """The held-out micro-batches, from the test set, and others than the run's to train on."""
    x, y = data.test
    for start in range(0, HELD_OUT * PICTURES, PICTURES):
        yield x[start : start + PICTURES], y[start : start + PICTURES]
    yield from stream(workload, data, 1000 + seed)


def loss(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model, *batch)


@torch.no_grad()
def test_loss(model: Any, data: Any) -> float:
    return float(loss_of(model, *data.test))


def train(workload: Workload, data: Any, seed: int, scale: int, probes: bool) -> list[Line]:
    """Train for the workload's length; return the run's line, and those of its probes."""
    model, optimizer = make(workload, data, seed, scale)
    batches, lines = stream(workload, data, seed), []
    moments = [round(moment * LENGTH) for moment in MOMENTS] if probes else []
    for seen in range(0, LENGTH, scale):
        if seen in moments:
            lines.append(probe(workload, data, seed, model, optimizer, seen / LENGTH))
        optimizer.param_groups[0]["lr"] = workload.lr * cosine(seen, LENGTH)
        for batch in islice(batches, scale):
            (loss(model, batch) / scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    final, samples = test_loss(model, data), float(LENGTH * workload.batch)
    return [*lines, Line(workload.name, seed, scale, None, final, 0.0, samples, "")]


def probe(
    workload: Workload, data: Any, seed: int, model: Any, optimizer: Any, moment: float
) -> Line:
    result = mh.probe_batch(
        model,
        optimizer,
        loss,
        probe_stream(workload, data, seed),
        scales=SCALES,
        budget=LENGTH // 20,
        repeats=REPEATS,
        held_out=HELD_OUT,
    )
    assert result.samples is not None
    evaluated = len(SCALES) * REPEATS * HELD_OUT * PICTURES
    return Line(
        workload.name,
        seed,
        result.largest,
        moment,
        result.rows[0].loss,
        result.interval[1],
        result.samples + evaluated / 3,
        " ".join(row.verdict for row in result.rows[1:]),
    )


def run(names: tuple[str, ...], folder: Path) -> None:
    """Add the runs that are missing to the results."""
    done = {(line.workload, line.seed, line.scale) for line in read() if line.moment is None}
    for seed in range(SEEDS):
        for workload in (w for w in WORKLOADS if w.name in names):
            data = workload.load(folder)
            for scale in SCALES:
                if (workload.name, seed, scale) not in done:
                    for line in train(workload, data, seed, scale, probes=scale == 1):
                        append(line)


def append(line: Line) -> None:
    print(line, flush=True)
    json_lines.append(RESULTS, asdict(line))


def read() -> list[Line]:
    return [Line(**row) for row in json_lines.read(RESULTS)]


def write(lines: list[Line]) -> None:
    rows, agreed, costs = [], Counter[tuple[str, str]](), []
    for workload in (w for w in WORKLOADS if w.name in NAMES):
        own = [line for line in lines if line.workload == workload.name]
        finals = {
            k: {line.seed: line.loss for line in own if line.moment is None and line.scale == k}
            for k in SCALES
        }
        if any(len(losses) < SEEDS for losses in finals.values()):
            continue
        small = [loss for _, loss in sorted(finals[1].items())]
        margin = MEANINGFUL * stdev(small)
        for k in SCALES[1:]:
            large = [loss for _, loss in sorted(finals[k].items())]
            differences = [ours - theirs for ours, theirs in zip(large, small, strict=True)]
            behind, error = fmean(differences), stdev(differences) / math.sqrt(SEEDS)
            truth = "level" if behind < margin else "worse"
            truth = "unclear" if abs(behind - margin) < error else truth
            cells = []
            for moment in MOMENTS:
                probes = [line for line in own if line.moment == moment]
                verdicts = [line.verdicts.split()[SCALES.index(k) - 1] for line in probes]
                agreed.update((truth, verdict) for verdict in verdicts)
                cells.append(", ".join(verdicts))
            rows.append(
                f"| {workload.title} | {k} | {behind:+.4f} ± {error:.4f} | {margin:.4f} | {truth} "
                f"| {' | '.join(cells)} |"
            )
        run = LENGTH * workload.batch
        costs += [line.samples / run for line in own if line.moment is not None]
    if not rows:
        return
    at = " | ".join(f"probe at {moment:.0%}" for moment in MOMENTS)
    summary = "".join(
        f"| {truth} | {' | '.join(str(agreed[truth, verdict]) for verdict in VERDICTS)} |\n"
        for truth in ("level", "unclear", "worse")
    )
    PAGE.write_text(
        "# A probe, and whole runs\n\n"
        "Does a [probe](../probe.md) say what whole runs would? For each seed, a run was trained\n"
        "to its end at every scale. Beside these are the verdicts of probes of the run at scale\n"
        "1, one for each seed, after 10, 40 and 70 % of the run.\n\n"
        "```bash\npython benchmarks/probe.py --data ../shared/data\n```\n\n"
        f"{SEEDS} seeds, {LENGTH:,} small batches of 16 in each run, {REPEATS} repeats in each "
        f"probe. The dearest\nprobe cost {max(costs):.1%} of its run's samples, where a picture "
        "that is evaluated counts as a third\nof one that is trained on.\n\n"
        f"| workload | scale | behind scale 1 | margin | whole runs | {at} |\n"
        "|---|--:|--:|--:|---|" + "---|" * len(MOMENTS) + "\n" + "\n".join(rows) + "\n\n"
        "*Behind* is the mean difference of the final test losses, with its standard error over "
        "the seeds. *Unclear*:\nit is within a standard error of the margin.\n\n"
        "How often a probe said what, by what the whole runs say:\n\n"
        f"| whole runs | {' | '.join(VERDICTS)} |\n|---|" + "--:|" * len(VERDICTS) + f"\n{summary}"
    )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", help="one workload's name")
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = NAMES if arguments.only is None else (arguments.only,)
    if arguments.quick:
        workload = next(w for w in WORKLOADS if w.name == names[0])
        for line in train(workload, workload.load(arguments.data), 0, 1, probes=True):
            print(line)
        return
    run(names, arguments.data)
    write(read())


if __name__ == "__main__":
    main()
