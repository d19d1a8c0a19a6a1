"""`manyhands watch`: running jobs, on a live page of this machine or in the terminal."""

from __future__ import annotations

import math
import time
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manyhands.cli import printable, stop
from manyhands.report._page import format_duration
from manyhands.watch import Jobs, JobState, serve

STYLES = {"running": "green", "silent": "yellow", "died": "red", "failed": "red", "damaged": "red"}
WIDEST = 16  # characters of a bar
LAST_EVENTS = 8

_duration = partial(format_duration, digits=2)


def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Records, also of jobs that have not begun, and folders: all *.jsonl in them.",
        ),
    ],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the page; 0 is any free one.")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show the jobs here instead of on a page.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Show the jobs here once, as they are now, and end.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Watch running jobs by their records: on a live page of this machine, or in the terminal.

    The page is served on 127.0.0.1 only, loads nothing from elsewhere, and changes nothing. With
    --once, the exit code is 1 if a job has died or failed.
    """
    jobs = Jobs(runs)
    if once:
        _show_once(jobs)
    elif terminal:
        _show_live(jobs)
    else:
        _serve(jobs, port, show)


def _serve(jobs: Jobs, port: int | None, show: bool) -> None:
    """Serve the page until Ctrl-C."""
    try:
        server = serve(jobs, port)
    except OSError as error:
        stop("watch", f"port {port} cannot be used: {error}", "Leave --port out for a free one.")
    with server:
        place = f"Watching {len(jobs.all)} record(s) at {server.url} (end with Ctrl-C)"
        try:
            typer.echo(place)
        except OSError:  # the disk is full, or nobody reads it: the page is there all the same
            typer.echo(place, err=True)
        if show:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped watching; the jobs go on")


def _show_once(jobs: Jobs) -> None:
    """Print what the jobs are doing now; the exit code is 1 if one has failed."""
    states = [job.state() for job in jobs.read(seconds=60.0)]
    try:
        Console(highlight=False).print(_view(states))
    except OSError as error:
        stop("watch", f"the jobs cannot be shown: {error}")
    if any(state.state in ("died", "failed", "damaged") for state in states):
        raise typer.Exit(1)


def _show_live(jobs: Jobs) -> None:
    """Show in the terminal what the jobs are doing, until Ctrl-C."""

    def view() -> RenderableType:
        states = [job.state() for job in jobs.read(seconds=0.5)]
        return _view(states)

    with Live(view(), console=Console(highlight=False), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(1.0)
                live.update(view(), refresh=True)
        except KeyboardInterrupt:
            return


def _view(states: Sequence[JobState]) -> RenderableType:
    """Return some lines for each job, and a table of what has happened last."""
    shown: list[RenderableType] = [_job_lines(state) for state in states]
    if not states:
        shown.append(Text("There is no record yet."))
    events = [(state.name, event) for state in states for event in state.events]
    if events:
        table = Table("job", "step", "event", box=None, title="What happened", title_justify="left")
        for name, event in events[-LAST_EVENTS:]:
            style = "red" if event.kind == "fault" else ""
            cells = (printable(name), f"{event.step:,}", printable(event.text))
            table.add_row(*map(Text, cells), style=style)
        shown.append(table)
    return Group(*shown)


def _job_lines(state: JobState) -> RenderableType:
    """Return what the terminal shows of one job."""
    head = Text.assemble(
        (printable(state.name), "bold"), "  ", (state.state, STYLES.get(state.state, "dim"))
    )
    if state.text:
        head.append(f"  {printable(state.text)}", style=STYLES.get(state.state, "dim"))
    lines = [head]
    if (done := _bar_of_done(state)) is not None:
        lines.append(Text(done))
    facts = [f"{name} {value}" for name, value in _facts_of_job(state)]
    lines.append(Text("  " + " · ".join(facts)))
    if state.parts:
        total = sum(state.parts.values()) or math.nan
        shares = [f"{part} {seconds / total:.0%}" for part, seconds in state.parts.items()]
        lines.append(Text(f"  a step takes {_duration(total)}: " + ", ".join(shares), style="dim"))
    return Group(*lines, Text())


def _bar_of_done(state: JobState) -> str | None:
    """Return a bar of what is done, and the time that is left."""
    if state.until is None:
        return None
    at = state.step if state.progress is None else state.progress
    share = min(1.0, max(0.0, at / state.until))
    bar = ("█" * round(WIDEST * share)).ljust(WIDEST, "░")
    left = "" if state.left is None or state.over else f", about {_duration(state.left)} left"
    return f"  {bar} {share:.0%} of {state.until:,.6g}{left}"


def _facts_of_job(state: JobState) -> list[tuple[str, str]]:
    """Return what there is to say of a job, the most important first."""
    latest = state.latest
    facts = [(printable(key), f"{latest[key]:.4g}") for key in state.own if key in latest]
    facts.append(("step", f"{state.step:,}"))
    if state.progress is not None:
        facts.append(("progress", f"{state.progress:,.5g}"))
    for key, form in (("gain", "{:.3g}"), ("efficiency", "{:.0%}")):
        if key in latest:
            facts.append((key, form.format(latest[key])))
    if state.batch is not None:
        facts.append(("batch", f"{state.batch:,.4g} {state.batch_unit}"))
    if state.samples_per_second is not None:
        facts.append(("samples/s", f"{state.samples_per_second:,.4g}"))
    if state.steps_per_second is not None:
        facts.append(("steps/s", f"{state.steps_per_second:.3g}"))
    if state.workers is not None:
        facts.append(("workers", f"{state.workers} {printable(state.members)}".rstrip()))
    if state.rounds is not None:
        facts.append(("rounds", f"{state.rounds:,}"))
    facts += [(kind.replace("_", " "), f"{count:,}") for kind, count in state.faults.items()]
    facts.append(("time", _duration(state.seconds)))
    return facts
