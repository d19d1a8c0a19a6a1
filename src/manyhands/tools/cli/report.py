"""`manyhands report`: draw records as an HTML page."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from manyhands.tools.cli._terminal import printable, show_progress, stop
from manyhands.tools.record import read_record
from manyhands.tools.report import write_report
from manyhands.tools.report._follow import FollowedRecords
from manyhands.tools.report._page import write_following

EVERY = 5.0  # seconds between two pages
REST = 4.0  # minimum pause between two pages, as a multiple of the time to draw a page


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Records of mh.Record; with --follow also folders."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Training runs",
    follow: Annotated[
        bool, typer.Option("--follow", help="Rewrite the page every few seconds until Ctrl-C.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Compare recorded runs on a page with figures. The page opens offline.

    With --follow, the page reloads, and shows all *.jsonl files of a folder, the age of each
    worker's last line, and silent workers.

    Example: `manyhands report runs/a.jsonl runs/b.jsonl --open`
    """
    if follow:
        _follow(runs, out, title, show)
        return
    try:
        with show_progress(f"reading {len(runs)} record(s)", len(runs)) as advance:
            read = []
            for path in runs:
                read.append(read_record(path))
                advance(1)
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}. Give records of mh.Record."
        stop("report", problem)
    except ValueError as error:
        stop("report", str(error))
    _check_is_no_run(out, runs)
    try:
        with show_progress("drawing"):
            page = write_report(read, out, title=title)
    except (OSError, ImportError) as error:
        stop("report", f"the page cannot be written: {error}")
    typer.echo(f"wrote {printable(str(page))}")
    if show:
        webbrowser.open(page.resolve().as_uri())


def _check_is_no_run(out: Path, runs: list[Path]) -> None:
    if any(out.resolve() == path.resolve() for path in runs):
        stop("report", f"--out {out} is one of the runs, and would be overwritten.")


def _follow(paths: list[Path], out: Path, title: str, show: bool) -> None:
    """Rewrite the page until Ctrl-C; the last page does not reload."""
    for path in paths:
        if not path.exists():
            stop(
                "report",
                f"{path} does not exist. --follow takes records, and folders in which records "
                "appear later.",
            )
    page = out.resolve()  # a symbolic link stays, and its target is replaced
    if page.exists() and not page.is_file():
        stop("report", f"--out {out} is not a regular file, which --follow needs to replace it.")
    records = FollowedRecords(paths)
    try:
        began = time.monotonic()
        with show_progress("drawing"):
            damaged = [worker.text for worker in records.states() if worker.state == "damaged"]
            if damaged:
                stop("report", *damaged)
            _write_states(records, page, title, reload=EVERY)
        typer.echo(f"following: {printable(str(out))} is rewritten until Ctrl-C")
        if show:
            webbrowser.open(page.as_uri())
        while True:
            pause = max(EVERY, REST * (time.monotonic() - began))
            time.sleep(pause)
            began = time.monotonic()
            _write_states(records, page, title, reload=pause)
    except KeyboardInterrupt:
        _write_states(records, page, title, reload=None)
        typer.echo(f"wrote {printable(str(out))}")


def _write_states(records: FollowedRecords, page: Path, title: str, reload: float | None) -> None:
    workers = records.states()
    _check_is_no_run(page, [worker.path for worker in workers])
    try:
        write_following(workers, page, title, reload)
    except (OSError, ImportError) as error:
        stop("report", f"the page cannot be written: {error}")
