"""`manyhands demo`: train a small network with a small and a large batch.

The command runs `examples/digits.py`, follows the records, and compares them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import manyhands
from manyhands.tools.cli._terminal import stop
from manyhands.tools.record import Run, read_record
from manyhands.tools.record._run import Line, parse_line
from manyhands.tools.report import write_report

BATCH = 4  # images in a small batch
SILENCE = 10.0  # seconds between two lines, without a terminal
FILES = ("baseline", "adascale", "ramp", "linear-samples", "linear-steps")


@dataclass(frozen=True)
class Training:
    file: str
    name: str
    workers: int
    options: tuple[str, ...]
    steps: int | None = None  # the number of steps, if the progress does not end the run


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the records and the page.")] = Path(
        "runs/demo"
    ),
    workers: Annotated[int, typer.Option(min=1, help="Workers of the large batch.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Small batches per worker and step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the baseline.")] = 4800,
    seed: Annotated[int, typer.Option(help="Seed of the network and the batches.")] = 0,
    step_cost: Annotated[
        float,
        typer.Option(min=0, help="Assumed milliseconds to average gradients, for a column."),
    ] = 1.0,
) -> None:
    """Train a small network with a batch and with 32 times that batch, and compare.

    Takes a few minutes, and writes a page with figures.

    Example: `manyhands demo --steps 1200`
    """
    for package, module in (("plotly", "plotly"), ("scikit-learn", "sklearn")):
        if find_spec(module) is None:  # before minutes of training
            stop(
                "demo",
                f'it needs {package}, which is not installed: pip install "manyhands[cli]"',
                code=1,
            )
    console = Console(highlight=False)
    scale = workers * accumulate
    console.print(
        f"Train on handwritten digits. The baseline takes {steps:,} steps with batches of {BATCH} "
        f"images. Four more runs use {workers} workers with up to {accumulate} such batches per "
        f"step ({scale * BATCH} images), and the learning rate and schedule of the baseline, "
        "adapted by a scaling rule. Ramp lets the batch grow.\n"
    )
    script = [str(_script_path()), f"--steps={steps}", f"--seed={seed}", f"--batch-size={BATCH}"]
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / f"{name}.jsonl").unlink(missing_ok=True)  # from an earlier demo
    runs: list[Run] = []
    interrupted = False
    with _progress_bars(console) as bars:
        try:
            for training in _trainings(workers, accumulate, runs):
                runs.append(_train(training, script, out, bars, steps))
        except KeyboardInterrupt:
            runs = _records(out)
            interrupted = True
    if runs:
        page = write_report(runs, out / "report.html", title="manyhands demo")
        _print_comparison(console, runs, scale, step_cost / 1000)
        console.print(f"\nFigures: {page.resolve()}", soft_wrap=True)
    if interrupted:
        left = "no step was recorded"
        if runs:
            left = "the page shows all recorded steps"
        stop("demo", f"interrupted; {left}.", code=130)


def _trainings(workers: int, accumulate: int, done: Sequence[Run]) -> Iterator[Training]:
    scale = workers * accumulate
    several = f"--accumulate={accumulate}"
    yield Training(FILES[0], "baseline", 1, ())
    yield Training(FILES[1], f"AdaScale ×{scale}", workers, (several,))
    growing = (f"--max-scale={scale}",)
    yield Training(FILES[2], f"Ramp, up to ×{scale}", workers, growing)
    linear = (several, "--rule=linear", "--warmup=0.2")
    fewest = ceil(_steps(done[0]) / scale)
    yield Training(FILES[3], f"linear ×{scale}, equal samples", workers, linear, fewest)
    steps = _steps(done[1])
    longer = (*linear, f"--in-steps={steps}")
    yield Training(FILES[4], f"linear ×{scale}, equal steps", workers, longer, steps)


def _records(out: Path) -> list[Run]:
    runs = []
    for name in FILES:
        path = out / f"{name}.jsonl"
        if path.exists():
            run = read_record(path)
            if run.lines:
                runs.append(run)
    return runs


def _script_path() -> Path:
    """Return the path of examples/digits.py, in the package (a wheel) or next to src."""
    package = Path(manyhands.__file__).parent
    places = [folder / "examples" / "digits.py" for folder in (package, package.parents[1])]
    for place in places:
        if place.exists():
            return place
    stop("demo", f"the training script is missing: {places[0]} or {places[1]}.", code=1)


# -- a single run ----------------------------------------------------------------------------------


def _train(training: Training, script: Sequence[str], out: Path, bars: Progress, steps: int) -> Run:
    record = out / f"{training.file}.jsonl"
    log = out / f"{training.file}.log"
    command = [sys.executable]
    if training.workers > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={training.workers}"]
    command += [*script, *training.options, f"--record={record}", f"--name={training.name}"]
    total = training.steps or steps
    bar = bars.add_task(training.name, total=total, shown="starting")
    newest: Line = {}
    printed = time.monotonic()
    with _run_process(command, log) as process:
        read = 0  # bytes of the record
        running = True
        while running:
            running = process.poll() is None
            lines = _complete_lines(record, read)
            read += len(lines)
            for line in lines.splitlines():
                newest.update(parse_line(line, record, 2))
            done = newest.get("step" if training.steps else "progress", 0)
            bars.update(bar, completed=done, shown=_newest_accuracy(newest))
            if not bars.console.is_terminal and time.monotonic() > printed + SILENCE:
                printed = time.monotonic()
                bars.console.print(f"{training.name}: {min(done / total, 1):.0%} done")
            if running:
                time.sleep(0.1)
    bars.stop_task(bar)
    if process.returncode:
        typer.echo(log.read_text(encoding="utf-8", errors="replace"), err=True)
        stop(
            "demo",
            f"{training.name} ended with exit code {process.returncode}. The output is above and "
            f"in {log}. The command was",
            f"    {' '.join(command)}",
            code=1,
        )
    if not bars.console.is_terminal:
        bars.console.print(f"{training.name}: {_newest_accuracy(newest)}")
    return read_record(record)


def _complete_lines(record: Path, start: int) -> bytes:
    """Return the complete lines of a record from byte `start`."""
    if not record.exists():
        return b""
    with record.open("rb") as file:
        file.seek(start)
        data = file.read()
    return data[: data.rfind(b"\n") + 1]


@contextmanager
def _run_process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C must not reach torchrun: a second signal would stop torchrun before the
            # workers.
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


# -- output ----------------------------------------------------------------------------------------


def _progress_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[shown]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _newest_accuracy(line: Line) -> str:
    if "accuracy" not in line:
        return "starting"
    return f"accuracy {line['accuracy']:.1%} after {line['step']:,} steps"


def _print_comparison(console: Console, runs: Sequence[Run], batches: int, cost: float) -> None:
    table = Table("", title="Accuracy on images that no run was trained on", title_justify="left")
    alone = runs[0].lines[-1]["time"] / _steps(runs[0])  # a pass and an update, measured
    for heading in ("steps", f"{batches} workers*", "accuracy", "samples", "this machine"):
        table.add_column(heading, justify="right")
    seconds = alone  # the baseline averages no gradients
    for run in runs:
        last = run.lines[-1]
        accuracy = ""
        if "accuracy" in last:
            accuracy = f"{last['accuracy']:.1%}"
        table.add_row(
            run.name,
            f"{_steps(run):,}",
            f"{_steps(run) * seconds:.1f} s",
            accuracy,
            f"{last['samples']:,.0f}",
            f"{last['time']:.1f} s",
        )
        seconds = alone + cost
    console.print(table)
    console.print(
        "* Computed, not measured: the time with a worker per small batch. Each step then takes "
        f"as long as a step of the baseline ({1000 * alone:.2f} ms on this machine) plus "
        f"{1000 * cost:g} ms to average gradients (assumed, see --step-cost). This machine "
        f"computes the {batches} batches of a step on {os.cpu_count() or 1} core(s)."
    )
    if len(runs) < len(FILES):
        return
    baseline, adascale, *_, linear = [run.lines[-1] for run in runs]
    console.print(
        f"\nAdaScale took {adascale['step']:,} steps instead of {baseline['step']:,}, and read "
        f"{adascale['samples'] / baseline['samples']:.1f} times the samples. The accuracy is "
        f"{adascale['accuracy']:.1%} instead of {baseline['accuracy']:.1%}. Linear scaling in the "
        f"same number of steps reaches {linear['accuracy']:.1%}. Other seeds (--seed) show the "
        "random variation."
    )


def _steps(run: Run) -> int:
    return int(run.lines[-1]["step"])
