"""`manyhands checkpoint`: show a checkpoint, or convert it to plain files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manyhands._arguments import one_of, parse_bytes
from manyhands.tools.cli._terminal import printable, show_progress, stop

if TYPE_CHECKING:
    from manyhands.checkpoint._format import Commit
    from manyhands.checkpoint._reader import Reader

checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Show a checkpoint of mh.save, or convert it to plain files.\n\n"
    "Example: `manyhands checkpoint inspect runs/checkpoints`",
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="A checkpoint, or a folder of checkpoints; the newest is used."
    ),
]


@checkpoint.command()
def inspect(
    source: Source,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the checksum of every byte.")
    ] = False,
) -> None:
    """List the contents of a checkpoint. With --verify, exit code 1 reports damage.

    Example: `manyhands checkpoint inspect runs/checkpoints --verify`
    """
    _check_exists("inspect", source)
    console = Console(highlight=False)
    try:
        with show_progress(f"reading {source}"):
            from manyhands.tools.cli._consolidate import open_newest

            reader = open_newest(source)
    except (OSError, ValueError) as error:
        stop("checkpoint inspect", str(error))
    with reader:
        _print_contents(reader, console)
        if verify and not _verify(reader, console):
            raise typer.Exit(1)


@checkpoint.command()
def consolidate(
    source: Source,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder for the files; it is created.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="plain|hf", help="Plain files, or a folder for transformers."),
    ] = "plain",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="With --to hf: the largest size of a file.")
    ] = "5GB",
) -> None:
    """Convert a checkpoint to model.safetensors and optimizer.pt, for use without manyhands.

    With --to hf, write only the model, in the format of transformers.

    Example: `manyhands checkpoint consolidate runs/checkpoints exported`
    """
    try:
        one_of("--to", to, ("plain", "hf"))
        size = parse_bytes(max_shard_size)
    except ValueError as error:
        stop("checkpoint consolidate", str(error))
    _check_exists("consolidate", source)
    try:
        with show_progress(f"reading {source}"):
            from manyhands.tools.cli import _consolidate

            prefixes: tuple[str, ...] = ("model/",)
            if to == "plain":
                prefixes = ("model/", "optimizer.")
            total = 0  # an upper bound, with outer state of blocks and all replicas
            with _consolidate.open_newest(source) as reader:
                for key, tensor in reader.tensors.items():
                    if key.startswith(prefixes):
                        total += tensor.nbytes
        with show_progress(f"writing {target}", total) as advance:
            if to == "hf":
                written = _consolidate.write_hf_files(source, target, size, advance)
            else:
                written = _consolidate.write_plain_files(source, target, advance)
    except (OSError, ValueError, RuntimeError) as error:
        stop("checkpoint consolidate", str(error))
    for path in written:
        typer.echo(f"wrote {printable(str(path))}, {path.stat().st_size:,} bytes")


def _check_exists(command: str, source: str) -> None:
    """End the command if a local path does not exist."""
    if "://" not in source and not Path(source).exists():
        stop(f"checkpoint {command}", f"{source} does not exist.")


def _print_contents(reader: Reader, console: Console) -> None:
    table = Table(title=_make_printable(str(reader.path)), title_justify="left")
    table.add_column("name", overflow="fold")
    for name in ("shape", "type", "bytes", "slices"):
        table.add_column(name, justify="right")
    section = ""
    for key, tensor in sorted(reader.tensors.items()):
        if section and key.partition("/")[0] != section:
            table.add_section()
        section = key.partition("/")[0]
        shape = " × ".join(map(str, tensor.shape)) or "a number"
        numbers = (f"{tensor.nbytes:,}", str(tensor.slice_count))
        table.add_row(_make_printable(key), shape, tensor.dtype, *numbers)
    console.print(table)
    for line in _summary(reader.commit):
        typer.echo(printable(line))


def _verify(reader: Reader, console: Console) -> bool:
    total = reader.commit.nbytes
    problems = []
    with show_progress("verifying", total) as advance:
        for rank, (nbytes, _, _) in enumerate(reader.commit.files):
            problem = reader.find_damage(rank)
            if problem:
                problems.append(problem)
            advance(nbytes)
    for problem in problems:
        console.print(f"[red]{_make_printable(problem)}[/red]", soft_wrap=True)
    if not problems:
        console.print(f"[bold]all checksums match: {total:,} bytes[/bold]")
    return not problems


def _make_printable(text: str) -> str:
    return escape(printable(text))


def _summary(commit: Commit) -> list[str]:
    step = ""
    if commit.step is not None:
        step = f"step {commit.step:,}, "
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.time))
    lines = [
        f"{step}saved {saved} by {commit.workers} rank(s) with torch {commit.versions['torch']} "
        f"and manyhands {commit.versions['manyhands']}",
        f"{commit.workers} file(s) of tensors, {commit.nbytes:,} bytes",
    ]
    for meta in commit.optimizers:
        rule = ""
        if meta["rule"] is not None:
            rule = f" under {meta['rule']['class']}"
        blocks = ""
        if meta.get("blocks") is not None:
            blocks = f" in blocks, {meta['replicas']} replica(s)"
        groups = f"{len(meta['groups'])} parameter group(s)"
        lines.append(f"optimizer {meta['class']}{rule}{blocks}, {groups}")
    lines += [f"scheduler {meta['class']}" for meta in commit.schedulers]
    if commit.values:
        lines.append(f"values: {', '.join(sorted(commit.values))}")
    return lines
