"""`manyhands probe`: the largest batch that loses nothing, from a checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manyhands.checkpoint import load
from manyhands.cli._terminal import import_object, printable, stop
from manyhands.probe import ProbeResult, probe_batch
from manyhands.scaling._rule_base import ScalingRuleBase


def probe(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns (model, optimizer, loss, batches), as mh.probe_batch "
            "takes them.",
        ),
    ],
    budget: Annotated[
        int,
        typer.Option(
            min=1, help="The most passes on each rank; a twentieth of the run's is 5 % of it."
        ),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Begin from this checkpoint of mh.save.")
    ] = None,
    scales: Annotated[str, typer.Option(help="Batches, in units of the present one.")] = "1,2,4,8",
    repeats: Annotated[int, typer.Option(help="How often each branch is trained.")] = 6,
    held_out: Annotated[int, typer.Option(help="Micro-batches to evaluate on.")] = 32,
    confidence: Annotated[float, typer.Option(help="Of each of the test's bounds.")] = 0.95,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with a figure.")
    ] = None,
) -> None:
    """Train branches of a run at 1, 2, 4 and 8 times its batch, and test which are level.

    Nothing is saved: the checkpoint stays as it is.
    """
    if figure is not None:
        _check_can_draw(figure)  # before the work, not after it
    made = import_object("probe", factory)()
    if not isinstance(made, tuple) or len(made) != 4:
        what = type(made).__name__
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"an object of type {what}"
        stop("probe", f"{factory} must return (model, optimizer, loss, batches), got {got}.")
    model, optimizer, loss, batches = made
    try:
        if checkpoint is not None:
            load(checkpoint, model=model, optimizer=optimizer)
            if isinstance(optimizer, ScalingRuleBase) and not optimizer._batch.counts_passes:
                passes = optimizer._continue_batch()  # a Ramp may have grown it
                typer.echo(f"the checkpoint's batch: {passes} pass(es) in each step")
        found = probe_batch(
            model,
            optimizer,
            loss,
            batches,
            budget=budget,
            scales=_parse_scales(scales),
            repeats=repeats,
            held_out=held_out,
            confidence=confidence,
        )
        if optimizer._ranks.rank > 0:  # under torchrun, where the function began the group
            return
    except (OSError, TypeError, ValueError) as error:
        stop("probe", str(error))
    _print_result(found)
    if figure is not None:
        try:
            found.figure().write_html(figure)
        except OSError as error:
            stop("probe", str(error))
        typer.echo(f"wrote {printable(str(figure))}")


def _check_can_draw(figure: Path) -> None:
    if find_spec("plotly") is None:
        stop(
            "probe",
            '--figure is drawn with plotly, which is not installed: pip install "manyhands[cli]"',
        )
    if not figure.parent.is_dir():
        stop("probe", f"--figure={figure}: there is no folder {str(figure.parent)!r}.")


def _parse_scales(text: str) -> list[int]:
    try:
        return [int(scale) for scale in text.split(",")]
    except ValueError:
        stop("probe", f"--scales takes whole numbers, such as 1,2,4,8, got {text!r}.")


def _print_result(found: ProbeResult) -> None:
    console = Console(highlight=False)
    heading, *lines = found.cells
    table = Table(title=found.title, title_justify="left")
    for name in heading:
        table.add_column(name, justify="right")
    for row, line in zip(found.rows, lines, strict=True):
        table.add_row(*line, style="bold" if row.scale == found.largest else "")
    console.print(table)
    console.print(f"[bold]{escape(found.conclusion)}[/bold]", soft_wrap=True)
