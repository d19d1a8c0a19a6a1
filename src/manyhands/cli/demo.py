"""`manyhands demo`: train one network on one worker and on four, and compare the results.

The training is `examples/digits.py`, in a process of its own or in several under torchrun. This
file starts it, follows the record that it writes, and compares the records at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import manyhands
from manyhands.cli import stop
from manyhands.record import Run, read_record
from manyhands.record._run import Line
from manyhands.report import write_report

BATCH = 4  # images in a small batch


@dataclass(frozen=True)
class Training:
    """One call of the script."""

    file: str
    name: str
    workers: int
    options: tuple[str, ...]
    counts_gain: bool = False  # a step moves the schedule by its gain, or else by the scale


def demo(
    out: Annotated[Path, typer.Option(help="Folder for records and the page.")] = Path("runs/demo"),
    workers: Annotated[int, typer.Option(min=1, help="Workers that share the large batch.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per worker and step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the baseline.")] = 4800,
    seed: Annotated[int, typer.Option(help="For the network and the batches.")] = 0,
) -> None:
    """Train a small network with a batch and with 32 times that batch, and compare."""
    for package, module in (("plotly", "plotly"), ("scikit-learn", "sklearn")):
        if find_spec(module) is None:  # found out now, and not after minutes of training
            stop(
                "demo",
                f'it needs {package}, which is not installed: pip install "manyhands[cli]"',
                code=1,
            )
    console = Console(highlight=False)
    console.print(
        f"Handwritten digits, {steps:,} steps of {BATCH} images: the baseline. Then batches "
        f"{workers * accumulate} times as large, from {workers} workers with {accumulate} batches "
        "each, with the same learning rate and schedule, adapted by a scaling rule. Ramp begins "
        "with the small batch and lets it grow.\n"
    )
    script = _script_path()
    out.mkdir(parents=True, exist_ok=True)
    shared = (f"--steps={steps}", f"--seed={seed}", f"--batch-size={BATCH}")
    with _progress_bars(console) as bars:
        runs = [
            _train(training, [str(script), *shared], out, bars, steps)
            for training in _trainings(workers, accumulate)
        ]
    page = write_report(runs, out / "report.html", title="manyhands demo")
    console.print(_comparison_table(runs))
    console.print(_verdict(runs, workers, accumulate))
    console.print(f"\nThe curves: {page.resolve()}", soft_wrap=True)


def _trainings(workers: int, accumulate: int) -> list[Training]:
    """Return the baseline, and four ways to train with larger batches."""
    scale, several = workers * accumulate, f"--accumulate={accumulate}"
    return [
        Training("baseline", "baseline", 1, (), counts_gain=True),
        Training("adascale", f"AdaScale ×{scale}", workers, (several,), counts_gain=True),
        Training(
            "ramp", f"Ramp, up to ×{scale}", workers, (f"--max-scale={scale}",), counts_gain=True
        ),
        Training("linear", f"linear ×{scale}", workers, (several, "--rule=linear")),
        Training(
            "linear-warmup",
            f"linear ×{scale}, warm-up",
            workers,
            (several, "--rule=linear", "--warmup=0.2"),
        ),
    ]


def _script_path() -> Path:
    """Return the path of examples/digits.py: inside the package in a wheel, or next to src."""
    package = Path(manyhands.__file__).parent
    places = [folder / "examples" / "digits.py" for folder in (package, package.parents[1])]
    for place in places:
        if place.exists():
            return place
    stop(
        "demo",
        f"its training script is missing: neither {places[0]} nor {places[1]} is there.",
        code=1,
    )


# -- one training ------------------------------------------------------------------------------


def _train(training: Training, script: Sequence[str], out: Path, bars: Progress, steps: int) -> Run:
    """Run the script to its end. Meanwhile, show the newest values of its record."""
    record, log = (out / f"{training.file}.{kind}" for kind in ("jsonl", "log"))
    record.unlink(missing_ok=True)  # an earlier demo's
    command = [sys.executable]
    if training.workers > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={training.workers}"]
    command += [*script, *training.options, f"--record={record}", f"--name={training.name}"]
    bar = bars.add_task(training.name, total=steps, shown="starting")
    newest: Line = {}
    with _run_process(command, log) as process:
        lines = _follow_record(record)
        running = True
        while running:
            running = process.poll() is None
            for line in next(lines):
                newest.update(line)
            bars.update(
                bar, completed=_schedule_position(training, newest), shown=_newest_accuracy(newest)
            )
            time.sleep(0.1 if running else 0.0)
    bars.stop_task(bar)
    if process.returncode:
        typer.echo(log.read_text(encoding="utf-8", errors="replace"), err=True)
        stop(
            "demo",
            f"{training.name} ended with exit code {process.returncode}. Its output is "
            f"above and in {log}. The command was",
            f"    {' '.join(command)}",
            code=1,
        )
    if not bars.console.is_terminal:
        bars.console.print(f"{training.name}: {_newest_accuracy(newest)}")
    return read_record(record)


@contextmanager
def _run_process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and end it with the block, even if the block raises."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C reaches only this process, which then sends torchrun one signal. A second one
            # would stop torchrun while it stops its workers.
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def _follow_record(record: Path) -> Iterator[list[Line]]:
    """Yield the lines that were completed since the last `next`."""
    while not record.exists():
        yield []
    rest = b""  # of a line that is being written
    with record.open("rb") as file:
        while True:
            *complete, rest = (rest + file.read()).split(b"\n")
            yield [json.loads(line) for line in complete]


def _schedule_position(training: Training, line: Line) -> float:
    """Return the position in the schedule, in steps of the baseline."""
    if training.counts_gain:
        return float(line.get("progress", 0.0))
    return float(line.get("step", 0) * line.get("scale", 0.0))


# -- what is shown -----------------------------------------------------------------------------


def _progress_bars(console: Console) -> Progress:
    """Return the bars that the terminal shows, one for each training."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[shown]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _newest_accuracy(line: Line) -> str:
    if "accuracy" not in line:
        return "starting"
    return f"{line['accuracy']:.1%} right after {line['step']:,} steps"


def _comparison_table(runs: Sequence[Run]) -> Table:
    """Return the table of the trainings' results."""
    table = Table("", title="On images that no run was trained on", title_justify="left")
    for heading in ("accuracy", "steps", "samples", "time", "average gain"):
        table.add_column(heading, justify="right")
    for run in runs:
        last = run.lines[-1]
        table.add_row(
            run.name,
            f"{last['accuracy']:.1%}",
            f"{_steps(run):,}",
            f"{_samples_seen(run):,.0f}",
            f"{last['time']:.1f} s",
            f"{last['progress'] / last['step']:.1f}",
        )
    return table


def _verdict(runs: Sequence[Run], workers: int, accumulate: int) -> str:
    """Return what the table says about AdaScale, good or bad, and what it does not say."""
    baseline, adascale, *_ = runs
    points = 100 * (adascale.lines[-1]["accuracy"] - baseline.lines[-1]["accuracy"])
    lines = [
        f"AdaScale against the baseline: {points:+.1f} points of accuracy (another --seed shows "
        f"how much of that is chance), steps divided by {_steps(baseline) / _steps(adascale):.1f}, "
        f"samples multiplied by {_samples_seen(adascale) / _samples_seen(baseline):.1f}.",
        "Ramp chooses the batch of each step for the most progress in a second on this machine.",
        "The linear runs see as many samples as the baseline.",
    ]
    cores, batches = os.cpu_count() or 1, workers * accumulate
    if cores < batches:
        lines.append(
            f"The times are of this machine, whose {cores} core(s) take turns with the {batches} "
            "batches of a step. With a worker for each batch, the number of steps decides."
        )
    return "\n".join(lines)


def _steps(run: Run) -> int:
    return int(run.lines[-1]["step"])


def _samples_seen(run: Run) -> float:
    return float(run.lines[-1]["samples"])
