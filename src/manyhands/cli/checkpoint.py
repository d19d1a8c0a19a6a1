"""`manyhands checkpoint`: show what a checkpoint contains, or turn it into plain files.

The plain files are

    model.safetensors   every parameter and buffer by its plain name
    optimizer.pt        the plain optimizer's state dict, for torch.load(weights_only=True)
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from manyhands.checkpoint import _folder, _index, _safetensors
from manyhands.checkpoint._index import Reader
from manyhands.checkpoint._safetensors import TensorEntry
from manyhands.checkpoint._values import decode
from manyhands.cli import printable, stop

IN_A_FILE = 2**20  # bytes of a tensor that is put together in a mapped file

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
    try:
        folder = _folder.find_newest(source)
        index, _ = _index.read(folder)
    except (OSError, ValueError) as error:
        stop("checkpoint inspect", str(error))
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
        problems = _find_damage(folder, index, lambda n: progress.advance(task, n))
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
    console = Console(highlight=False)
    try:
        index, _ = _index.read(_folder.find_newest(source))
        # An upper bound: the outer state of blocks and further replicas are not written.
        prefixes = ("model/", "optimizer.")
        total = sum(t.nbytes for key, t in index.tensors.items() if key.startswith(prefixes))
        with _progress_bar(console) as progress:
            task = progress.add_task("writing", total=total)
            written = write_plain_files(
                source, target, lambda _, nbytes: progress.advance(task, nbytes)
            )
    except (OSError, ValueError, RuntimeError) as error:
        stop("checkpoint consolidate", str(error))
    for path in written:
        console.print(
            f"wrote {_make_printable(str(path))}, {path.stat().st_size:,} bytes", soft_wrap=True
        )


def _make_printable(text: str) -> str:
    """Return text from a file, or a path, without commands to the terminal or to rich."""
    return escape(printable(text))


def _summary(index: _index.Index) -> list[str]:
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


def _find_damage(
    checkpoint: Path, index: _index.Index, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> list[str]:
    """Compare every byte with its checksum, and return a message for each problem."""
    problems: dict[str, None] = {}  # a dict keeps the order; one bad file gives one message
    with Reader(checkpoint, index) as reader:
        for tensor in index.tensors.values():
            for stored in tensor.slices:
                try:
                    reader.check(stored, tensor.torch_dtype)
                except (ValueError, OSError) as error:
                    problems[str(error)] = None
                on_bytes(math.prod(stored.sizes) * tensor.torch_dtype.itemsize)
    return list(problems)


# -- plain files -----------------------------------------------------------------------------------

OnTensor = Callable[[str, int], None]  # called with a tensor's name and bytes when it is done


def write_plain_files(
    source: Path, target: Path, on_tensor: OnTensor = lambda name, nbytes: None
) -> list[Path]:
    """Write the files for the model and the optimizer, if there is one, and return their paths.

    It works tensor by tensor. A large tensor is put together in a temporary file that is mapped
    into memory, so that neither the model nor a single tensor has to fit into memory.
    """
    checkpoint = _folder.find_newest(source)
    with ExitStack() as stack:
        stack.enter_context(_folder.hold_for_reading(checkpoint))
        index, _ = _index.read(checkpoint)
        reader = stack.enter_context(Reader(checkpoint, index))
        target.mkdir(parents=True, exist_ok=True)
        # In the target, so that the finished files can be renamed on the same file system.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".partial-", dir=target))
        written = []
        if index.model is not None:
            written.append(_write_model(reader, index.model, Path(scratch), on_tensor))
        for number, meta in enumerate(index.optimizers):
            name = "optimizer.pt" if len(index.optimizers) == 1 else f"optimizer.{number}.pt"
            written.append(_write_optimizer(reader, meta, Path(scratch) / name, on_tensor))
        results = []
        # Only when all are complete: an error leaves earlier files as they were.
        for path in written:
            os.replace(path, target / path.name)
            results.append(target / path.name)
        _folder.sync(target)
        return results


def _write_model(
    reader: Reader, meta: _index.ModelMeta, scratch: Path, on_tensor: OnTensor
) -> Path:
    """Write the model as one safetensors file, tensor by tensor."""
    keys = {name: f"model/{name}" for name in (*meta["params"], *meta["buffers"])}
    # `load_state_dict` wants a tied tensor under each of its names.
    keys |= {other: keys[first] for other, first in meta["aliases"].items()}
    entries = [_entry_of(name, reader.index.tensors[key]) for name, key in keys.items()]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)  # aligned, as `_writing.py` does

    def get_tensor(number: int) -> Tensor:
        entry = entries[number]
        found = _read_tensor(reader, keys[entry.name], scratch)
        on_tensor(entry.name, entry.nbytes)
        return found

    path = scratch / "model.safetensors"
    # transformers refuses a file without this metadata.
    _safetensors.write(path, entries, get_tensor, {"format": "pt"})
    return path


def _entry_of(name: str, tensor: _index.StoredTensor) -> TensorEntry:
    return TensorEntry(name, tensor.torch_dtype, tensor.shape)


def _read_tensor(reader: Reader, key: str, scratch: Path) -> Tensor:
    """Return a tensor, compared with its checksums; a large one lies in an unnamed mapped file."""
    tensor = reader.index.tensors[key]
    if tensor.nbytes < IN_A_FILE:
        return reader.read_whole(key)
    for stored in tensor.slices:
        reader.check(stored, tensor.torch_dtype)
    descriptor, name = tempfile.mkstemp(dir=scratch)
    try:
        os.ftruncate(descriptor, tensor.nbytes)
        elements = math.prod(tensor.shape)
        flat = torch.from_file(name, shared=True, size=elements, dtype=tensor.torch_dtype)
    finally:
        os.close(descriptor)
        os.unlink(name)  # the mapping keeps the file's space until the tensor is freed
    result = flat.view(tensor.shape)
    reader.read_into(key, result)
    return result


def _write_optimizer(
    reader: Reader, meta: _index.OptimizerMeta, path: Path, on_tensor: OnTensor
) -> Path:
    """Write the state dict as the plain optimizer would have saved it."""

    def get_tensor(key: str) -> Tensor:
        on_tensor(key, reader.index.tensors[key].nbytes)
        return _read_tensor(reader, key, path.parent)

    groups: list[dict[str, object]] = []
    names: list[str] = []
    for group in meta["groups"]:
        # torch numbers the parameters through all groups.
        numbers = range(len(names), len(names) + len(group["names"]))
        names += group["names"]
        options = decode(group["options"], get_tensor)
        groups.append({**options, "params": list(numbers), "param_names": group["names"]})
    state = {
        number: {
            entry: decode(value, get_tensor)
            for entry, value in meta["state"][name].items()
            if entry != _index.EXACT_ENTRY  # ours: the plain optimizer does not know it
        }
        for number, name in enumerate(names)
        if meta["state"].get(name)
    }
    packed = {**decode(meta["other"], get_tensor), "state": state, "param_groups": groups}
    rule = meta["rule"]
    if rule is not None:
        scaling = decode(rule["state"], get_tensor)
        # Saved by name; a rule's own state dict has them in the order of the parameters.
        previous = scaling["previous"]
        scaling["previous"] = [previous.get(name) for name in names] if previous else []
        packed["manyhands"] = scaling
    with path.open("xb") as file:
        torch.save(packed, file)
        file.flush()
        os.fsync(file.fileno())
    return path
