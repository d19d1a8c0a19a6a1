"""`manyhands checkpoint`: show what a checkpoint contains, or turn it into plain files."""

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
    help="Show what a checkpoint of mh.save contains, or turn it into plain files.",
)

SOURCE = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE", help="A checkpoint, or a folder of checkpoints: the newest is taken."
    ),
]


@checkpoint.command()
def inspect(
    source: SOURCE,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte with its checksum.")
    ] = False,
) -> None:
    """Show what a checkpoint contains. With --verify, the exit code is 1 if it is damaged."""
    # Imported here: torch.distributed.checkpoint takes long, and --help does not need it.
    from manyhands.checkpoint import _consolidate

    try:
        folder = _folder.find_newest(source)
        index, _ = _index.read(folder)
    except (OSError, ValueError) as error:
        _stop("inspect", str(error))
    console = Console(highlight=False)
    table = Table(title=_make_printable(str(folder)), title_justify="left")
    table.add_column("name", overflow="fold")
    for name in ("shape", "type", "bytes", "slices"):
        table.add_column(name, justify="right")
    section = ""
    # Keys begin with model/, optimizer.0/, random/ ...: a line between these.
    for key, tensor in sorted(index.tensors.items()):
        if section and key.partition("/")[0] != section:
            table.add_section()
        section = key.partition("/")[0]
        shape = " × ".join(map(str, tensor.shape)) or "a number"
        slices = str(len(tensor.slices))
        table.add_row(_make_printable(key), shape, tensor.dtype, f"{tensor.nbytes:,}", slices)
    console.print(table)
    for line in _summary(index):
        console.print(_make_printable(line), soft_wrap=True)
    if not verify:
        return
    total = sum(tensor.nbytes for tensor in index.tensors.values())
    with _progress_bar(console) as progress:
        task = progress.add_task("verifying", total=total)
        problems = _consolidate.verify(folder, index, lambda n: progress.advance(task, n))
    for problem in problems:
        console.print(f"[red]{_make_printable(problem)}[/red]", soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    console.print(f"[bold]all checksums match: {total:,} bytes[/bold]")


@checkpoint.command()
def consolidate(
    source: SOURCE,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder for the files; it is created.")
    ],
) -> None:
    """Write model.safetensors and optimizer.pt, as a run on one worker would have saved them.

    The optimizer's file loads with torch.load(weights_only=True), into the plain optimizer. One
    process does it, and never holds more than one tensor in memory.
    """
    from manyhands.checkpoint import _consolidate

    console = Console(highlight=False)
    try:
        index, _ = _index.read(_folder.find_newest(source))
        # An upper bound: the outer state of blocks and further replicas are not written.
        prefixes = ("model/", "optimizer.")
        total = sum(t.nbytes for key, t in index.tensors.items() if key.startswith(prefixes))
        with _progress_bar(console) as progress:
            task = progress.add_task("writing", total=total)
            written = _consolidate.consolidate(
                source, target, lambda _, nbytes: progress.advance(task, nbytes)
            )
    except (OSError, ValueError, RuntimeError) as error:
        _stop("consolidate", str(error))
    for path in written:
        console.print(
            f"wrote {_make_printable(str(path))}, {path.stat().st_size:,} bytes", soft_wrap=True
        )


def _make_printable(text: str) -> str:
    """Return text from a file, or a path, without commands to the terminal or to rich."""
    return escape(printable(text))


def _summary(index: Index) -> list[str]:
    """Return a few lines about the run: when it was saved, and by which optimizer."""
    step = "" if index.step is None else f"step {index.step:,}, "
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(index.time))
    lines = [
        f"{step}saved {saved} by {index.workers} rank(s) with torch {index.versions['torch']} "
        f"and manyhands {index.versions['manyhands']}",
        f"{len(index.files)} file(s) of tensors, {index.nbytes:,} bytes",
    ]
    for meta in index.optimizers:
        rule = "" if meta["rule"] is None else f" under {meta['rule']['class']}"
        blocks = ""
        if meta.get("blocks") is not None:
            # `replicas` lists those after the first.
            blocks = f" in blocks, {1 + len(meta['replicas'])} replica(s)"
        groups = f"{len(meta['groups'])} parameter group(s)"
        lines.append(f"optimizer {meta['class']}{rule}{blocks}, {groups}")
    lines += [f"scheduler {meta['class']}" for meta in index.schedulers]
    if index.values:
        lines.append(f"values: {', '.join(sorted(index.values))}")
    return lines


def _progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _stop(command: str, message: str) -> NoReturn:
    typer.echo(f"manyhands checkpoint {command}: {printable(message)}", err=True)
    raise typer.Exit(2)
