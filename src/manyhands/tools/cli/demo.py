"""Define `manyhands demo`, which trains one network on one worker and on four.

The training is `examples/digits.py`, in a separate process or in several under torchrun. This
file starts it, follows the record that it writes, and compares the records at the end.
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
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import manyhands
from manyhands.tools.cli import stop
from manyhands.tools.record import Run, read_record
from manyhands.tools.record._run import Line, parse_line
from manyhands.tools.report import write_report

BATCH = 4  # images in a small batch
SILENCE = 10.0  # seconds between two lines, where there are no bars


@dataclass(frozen=True)
class Training:
    """One call of the script."""

    file: str
    name: str
    workers: int
    options: tuple[str, ...]
    in_steps: int | None = None  # the schedule is stretched over this number of steps
    counts_gain: bool = False  # a step moves the schedule by its gain, or else by the scale


def demo(
    out: Annotated[Path, typer.Option(help="Folder for records and the page.")] = Path("runs/demo"),
    workers: Annotated[int, typer.Option(min=1, help="Workers that share the large batch.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per worker and step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the baseline.")] = 4800,
    seed: Annotated[int, typer.Option(help="For the network and the batches.")] = 0,
    step_cost: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds to average gradients once; assumed, for a column."),
    ] = 1.0,
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
        f"How many steps does a batch of {workers * accumulate * BATCH} images save, over one of "
        f"{BATCH}? Handwritten digits: {steps:,} steps of the small batch are the baseline. The "
        f"others have {workers} workers with {accumulate} small batches each, and the baseline's "
        "learning rate and schedule, adapted by a rule. Ramp lets the batch grow.\n"
    )
    script = [str(_script_path()), f"--steps={steps}", f"--seed={seed}", f"--batch-size={BATCH}"]
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / f"{name}.jsonl").unlink(missing_ok=True)  # of an earlier demo
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
        _print_comparison(console, runs, workers * accumulate, step_cost / 1000)
        console.print(f"\nThe curves: {page.resolve()}", soft_wrap=True)
    if interrupted:
        left = "nothing was trained yet"
        if runs:
            left = "the page has what there is"
        stop("demo", f"interrupted; {left}.", code=130)


FILES = ("baseline", "adascale", "ramp", "linear-samples", "linear-steps")


def _trainings(workers: int, accumulate: int, done: Sequence[Run]) -> Iterator[Training]:
    """Yield the baseline, and four ways to train with larger batches. `done` has those before."""
    scale = workers * accumulate
    several = f"--accumulate={accumulate}"
    yield Training(FILES[0], "baseline", 1, (), counts_gain=True)
    yield Training(FILES[1], f"AdaScale ×{scale}", workers, (several,), counts_gain=True)
    growing = (f"--max-scale={scale}",)
    yield Training(FILES[2], f"Ramp, up to ×{scale}", workers, growing, counts_gain=True)
    linear = (several, "--rule=linear", "--warmup=0.2")
    yield Training(FILES[3], f"linear ×{scale}, equal samples", workers, linear)
    as_many = _steps(done[1])
    longer = (*linear, f"--in-steps={as_many}")
    yield Training(FILES[4], f"linear ×{scale}, equal steps", workers, longer, as_many)


def _records(out: Path) -> list[Run]:
    """Return the runs of this demo that have taken a step."""
    runs = []
    for name in FILES:
        path = out / f"{name}.jsonl"
        if not path.exists():
            continue
        run = read_record(path)
        if run.lines:
            runs.append(run)
    return runs


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
    record = out / f"{training.file}.jsonl"
    log = out / f"{training.file}.log"
    command = [sys.executable]
    if training.workers > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={training.workers}"]
    command += [*script, *training.options, f"--record={record}", f"--name={training.name}"]
    bar = bars.add_task(training.name, total=steps, shown="starting")
    newest: Line = {}
    said = time.monotonic()
    with _run_process(command, log) as process:
        read = 0  # bytes of the record
        running = True
        while running:
            running = process.poll() is None
            lines = _complete_lines(record, read)
            read += len(lines)
            for line in lines.splitlines():
                newest.update(parse_line(line, record, 2))
            position = _schedule_position(training, newest, steps)
            bars.update(bar, completed=position, shown=_newest_accuracy(newest))
            if not bars.console.is_terminal and time.monotonic() > said + SILENCE:
                said = time.monotonic()
                bars.console.print(f"{training.name}: {min(position / steps, 1):.0%} done")
            if running:
                time.sleep(0.1)
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


def _complete_lines(record: Path, start: int) -> bytes:
    """Return the complete lines from byte `start` on of a record that may not exist yet."""
    if not record.exists():
        return b""
    with record.open("rb") as file:
        file.seek(start)
        data = file.read()
    return data[: data.rfind(b"\n") + 1]


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


def _schedule_position(training: Training, line: Line, steps: int) -> float:
    """Return the position in the schedule, in steps of the baseline."""
    if training.counts_gain:
        return float(line.get("progress", 0.0))
    if training.in_steps:
        return float(line.get("step", 0) * steps / training.in_steps)
    return float(line.get("step", 0) * line.get("scale", 0.0))


# -- what is shown -----------------------------------------------------------------------------


def _progress_bars(console: Console) -> Progress:
    """Return the bars that the terminal shows, one for each training."""
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
    return f"{line['accuracy']:.1%} right after {line['step']:,} steps"


def _print_comparison(console: Console, runs: Sequence[Run], batches: int, cost: float) -> None:
    """Print the table of the trainings, what its computed column means, and the conclusion."""
    table = Table("", title="On images that no run was trained on", title_justify="left")
    alone = runs[0].lines[-1]["time"] / _steps(runs[0])  # a pass and an update, measured
    computed = f"{batches} workers*"
    for heading in ("steps", computed, "accuracy", "samples", "this machine"):
        table.add_column(heading, justify="right")
    for number, run in enumerate(runs):
        last = run.lines[-1]
        seconds = alone
        if number:  # the baseline averages no gradients
            seconds += cost
        accuracy = ""
        if "accuracy" in last:
            accuracy = f"{last['accuracy']:.1%}"
        table.add_row(
            run.name,
            f"{_steps(run):,}",
            f"{_steps(run) * seconds:.1f} s",
            accuracy,
            f"{_samples_seen(run):,.0f}",
            f"{last['time']:.1f} s",
        )
    console.print(table)
    console.print(
        f"* Computed, not measured: one worker for each small batch. A step then takes as long as "
        f"the baseline's, {1000 * alone:.2f} ms here, and {1000 * cost:g} ms to average gradients, "
        "which is assumed (--step-cost). Here, "
        f"{os.cpu_count() or 1} core(s) take turns with the {batches} batches of a step."
    )
    if len(runs) == len(FILES):
        console.print(_conclusion(runs))


def _conclusion(runs: Sequence[Run]) -> str:
    """Return what the table says about AdaScale, good or bad."""
    baseline, adascale, *_, linear = runs
    right = [f"{run.lines[-1]['accuracy']:.1%}" for run in (adascale, baseline, linear)]
    return (
        f"\nAdaScale took {_steps(adascale):,} steps instead of {_steps(baseline):,}, read "
        f"{_samples_seen(adascale) / _samples_seen(baseline):.1f} times the samples, and was "
        f"right on {right[0]} instead of {right[1]}; linear scaling of the same learning "
        f"rate in as many steps on {right[2]} (another --seed shows how much of that is chance)."
    )


def _steps(run: Run) -> int:
    return int(run.lines[-1]["step"])


def _samples_seen(run: Run) -> float:
    return float(run.lines[-1]["samples"])
