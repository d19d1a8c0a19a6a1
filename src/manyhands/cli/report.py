"""`manyhands report`: draw records on one page with figures."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli import printable, stop
from manyhands.record import Run, read_record
from manyhands.report import write_report


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Files that mh.Record wrote.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Training runs",
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Compare recorded runs on one page with figures. The page opens without a network."""
    read = [_read_run(path) for path in runs]
    if any(out.resolve() == path.resolve() for path in runs):
        stop("report", f"--out {out} is one of the runs, and would be overwritten.")
    try:
        page = write_report(read, out, title=title)
    except (OSError, ImportError) as error:
        stop("report", f"the page cannot be written: {error}")
    typer.echo(f"wrote {printable(str(page))}")
    if show:
        webbrowser.open(page.resolve().as_uri())


def _read_run(path: Path) -> Run:
    try:
        return read_record(path)
    except (OSError, ValueError) as error:
        stop("report", str(error))
