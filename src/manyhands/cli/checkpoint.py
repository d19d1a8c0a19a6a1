"""`manyhands checkpoint`: look into a checkpoint, or make plain files of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from manyhands.checkpoint import _folder, _index
from manyhands.checkpoint._index import Index
from manyhands.cli._printable import printable

checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look into a checkpoint that mh.save wrote, or make plain files of it.",
)

SOURCE = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or the folder of them: the newest.")
]


@checkpoint.command()
def inspect(
    source: SOURCE,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte with its checksum.")
    ] = False,
) -> None:
    """Show what a checkpoint holds. With --verify the exit code is 1 if it is damaged."""
    from manyhands.checkpoint import _consolidate

    try:
        folder = _folder.newest(source)
        index, _ = _index.read(folder)
    except (OSError, ValueError) as error:
        _stop("inspect", str(error))
    console = Console(highlight=False)
    table = Table(title=_shown(str(folder)), title_justify="left")
    table.add_column("name", overflow="fold")
    for name in ("shape", "type", "bytes", "parts"):
        table.add_column(name, justify="right")
    part = ""
    for key, told in sorted(index.tensors.items()):
        if part and key.partition("/")[0] != part:
            table.add_section()
        part = key.partition("/")[0]
        shape = " × ".join(map(str, told.shape)) or "a number"
        table.add_row(_shown(key), shape, told.dtype, f"{told.nbytes:,}", str(len(told.chunks)))
    console.print(table)
    for line in _facts(index):
        console.print(_shown(line), soft_wrap=True)
    if not verify:
        return
    total = sum(told.nbytes for told in index.tensors.values())
    with _progress(console) as progress:
        task = progress.add_task("verifying", total=total)
        problems = _consolidate.verify(folder, index, lambda n: progress.advance(task, n))
    for problem in problems:
        console.print(f"[red]{_shown(problem)}[/red]", soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    console.print(f"[bold]all checksums are right: {total:,} bytes[/bold]")


@checkpoint.command()
def consolidate(
    source: SOURCE,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder for the files.")],
) -> None:
    """Write model.safetensors and optimizer.pt, as one worker would have them.

    The optimizer's file loads with torch.load(weights_only=True), into the plain optimizer. No
    workers are needed, and memory for no more than a tensor.
    """
    from manyhands.checkpoint import _consolidate

    console = Console(highlight=False)
    try:
        index, _ = _index.read(_folder.newest(source))
        wanted = ("model/", "optimizer.")
        total = sum(t.nbytes for key, t in index.tensors.items() if key.startswith(wanted))
        with _progress(console) as progress:
            task = progress.add_task("writing", total=total)
            made = _consolidate.consolidate(
                source, target, lambda _, nbytes: progress.advance(task, nbytes)
            )
    except (OSError, ValueError, RuntimeError) as error:
        _stop("consolidate", str(error))
    for path in made:
        console.print(f"wrote {_shown(str(path))}, {path.stat().st_size:,} bytes", soft_wrap=True)


def _shown(text: str) -> str:
    """Text from a file, or a path, as it may go to the console."""
    return escape(printable(text))


def _facts(index: Index) -> list[str]:
    step = "" if index.step is None else f"step {index.step:,}, "
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(index.time))
    lines = [
        f"{step}saved {saved} by {index.workers} worker(s) with torch {index.versions['torch']} "
        f"and manyhands {index.versions['manyhands']}",
        f"{len(index.files)} file(s) of tensors, {index.nbytes:,} bytes",
    ]
    for told in index.optimizers:
        rule = "" if told["rule"] is None else f" under {told['rule']['class']}"
        blocks = ""
        if told.get("blocks") is not None:
            blocks = f" in blocks, {1 + len(told['replicas'])} replica(s)"
        groups = f"{len(told['groups'])} parameter group(s)"
        lines.append(f"optimizer {told['class']}{rule}{blocks}, {groups}")
    lines += [f"scheduler {told['class']}" for told in index.schedulers]
    if index.values:
        lines.append(f"values: {', '.join(sorted(index.values))}")
    return lines


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _stop(command: str, message: str) -> NoReturn:
    typer.echo(f"manyhands checkpoint {command}: {printable(message)}", err=True)
    raise typer.Exit(2)
