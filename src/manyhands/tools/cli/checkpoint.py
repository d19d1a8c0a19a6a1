"""Define `manyhands checkpoint`, which shows a checkpoint, or turns it into plain files.

The plain files are

    model.safetensors   every parameter and buffer by its plain name
    optimizer.pt        the plain optimizer's state dict, for torch.load(weights_only=True)

or, with `--to hf`, a folder as `save_weights` writes it.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from manyhands._arguments import one_of, parse_bytes
from manyhands.checkpoint import folder_at
from manyhands.checkpoint._folder import sync
from manyhands.checkpoint._format import Commit, ModelMeta, OptimizerMeta, TensorEntry
from manyhands.checkpoint._optimizer import (
    decode_dict,
    saved_options,
    saved_rule,
    saved_state,
)
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import EXACT_ENTRY
from manyhands.checkpoint._values import decode
from manyhands.checkpoint.weights._saving import publish, split_into_files, write_file
from manyhands.tools.cli import printable, stop

IN_A_FILE = 2**20  # bytes of a tensor that is put together in a mapped file

checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Show what a checkpoint of mh.save contains, or turn it into plain files.",
)

SOURCE = Annotated[
    str,
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
        reader = open_newest(source)
    except (OSError, ValueError) as error:
        stop("checkpoint inspect", str(error))
    with reader:
        problems = _inspect(reader, Console(highlight=False), verify)
    if problems:
        raise typer.Exit(1)


def open_newest(source: str | os.PathLike[str]) -> Reader:
    """Open a checkpoint, or the newest one in a folder."""
    folder = folder_at(source)
    return Reader(folder, folder.find_newest())


def _inspect(reader: Reader, console: Console, verify: bool) -> list[str]:
    """Print what there is; return what is damaged."""
    table = Table(title=_make_printable(str(reader.path)), title_justify="left")
    table.add_column("name", overflow="fold")
    for name in ("shape", "type", "bytes", "slices"):
        table.add_column(name, justify="right")
    section = ""
    # Keys begin with model/, optimizer.0/, random/ ...: a line between these.
    for key, tensor in sorted(reader.tensors.items()):
        if section and key.partition("/")[0] != section:
            table.add_section()
        section = key.partition("/")[0]
        shape = " × ".join(map(str, tensor.shape)) or "a number"
        numbers = f"{tensor.nbytes:,}", str(tensor.slice_count)
        table.add_row(_make_printable(key), shape, tensor.dtype, *numbers)
    console.print(table)
    for line in _summary(reader.commit):
        console.print(_make_printable(line), soft_wrap=True)
    if not verify:
        return []
    total = reader.commit.nbytes
    with _progress_bar(console) as progress:
        task = progress.add_task("verifying", total=total)
        problems: list[str] = []
        for rank, (nbytes, _, _) in enumerate(reader.commit.files):
            problems += filter(None, [reader.find_damage(rank)])
            progress.advance(task, nbytes)
    for problem in problems:
        console.print(f"[red]{_make_printable(problem)}[/red]", soft_wrap=True)
    if not problems:
        console.print(f"[bold]all checksums match: {total:,} bytes[/bold]")
    return problems


@checkpoint.command()
def consolidate(
    source: SOURCE,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder for the files; it is created.")
    ],
    to: Annotated[
        str, typer.Option("--to", help="plain, or hf for a folder that transformers reads.")
    ] = "plain",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Bytes of tensors in a file, with --to hf.")
    ] = "5GB",
) -> None:
    """Write model.safetensors and optimizer.pt, as a run on one worker would have saved them.

    With --to hf: the model alone, in files of a stated size with an index, and its config.json.
    """
    # The optimizer's file loads with torch.load(weights_only=True), into the plain optimizer. One
    # process does it, and never holds more than one tensor in memory.
    console = Console(highlight=False)
    try:
        one_of("--to", to, ("plain", "hf"))
        size = parse_bytes(max_shard_size)
        with open_newest(source) as reader:
            # An upper bound: the outer state of blocks and further replicas are not written.
            prefixes: tuple[str, ...] = ("model/",)
            if to == "plain":
                prefixes = ("model/", "optimizer.")
            total = sum(t.nbytes for key, t in reader.tensors.items() if key.startswith(prefixes))
        with _progress_bar(console) as progress:
            advance = partial(progress.advance, progress.add_task("writing", total=total))
            if to == "hf":
                written = write_hf_files(source, target, size, advance)
            else:
                written = write_plain_files(source, target, advance)
    except (OSError, ValueError, RuntimeError) as error:
        stop("checkpoint consolidate", str(error))
    for path in written:
        console.print(
            f"wrote {_make_printable(str(path))}, {path.stat().st_size:,} bytes", soft_wrap=True
        )


def _make_printable(text: str) -> str:
    """Return text from a file, or a path, without commands to the terminal or to rich."""
    return escape(printable(text))


def _summary(commit: Commit) -> list[str]:
    """Return a few lines about the run: when it was saved, and by which optimizer."""
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


def _progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


# -- plain files -----------------------------------------------------------------------------------

OnTensor = Callable[[int], None]  # called with a tensor's bytes when it is done


def write_plain_files(
    source: str | os.PathLike[str], target: Path, on_tensor: OnTensor = lambda nbytes: None
) -> list[Path]:
    """Write the files for the model and the optimizer, if there is one, and return their paths."""
    with _open_with_scratch(source, target) as (reader, scratch):
        commit = reader.commit
        written = []
        if commit.model is not None:
            keys = _keys_of(commit.model)
            # `load_state_dict` wants a tied tensor under each of its names.
            keys |= {other: keys[first] for other, first in commit.model["aliases"].items()}
            for name in _write_model(reader, keys, sys.maxsize, scratch, on_tensor):
                written.append(scratch / name)
        for number, meta in enumerate(commit.optimizers):
            path = scratch / f"optimizer.{number}.pt"
            if len(commit.optimizers) == 1:
                path = scratch / "optimizer.pt"
            written.append(_write_optimizer(reader, number, meta, path, on_tensor))
        results = []
        # Only when all are complete: an error leaves earlier files as they were.
        for path in written:
            os.replace(path, target / path.name)
            results.append(target / path.name)
        sync(target)
        return results


def write_hf_files(
    source: str | os.PathLike[str], target: Path, max_size: int, on_tensor: OnTensor
) -> list[Path]:
    """Write the model as `save_weights` does, and return the paths of its files."""
    with _open_with_scratch(source, target) as (reader, scratch):
        if reader.commit.model is None:
            raise ValueError(f"{reader.path} was saved without model=.")
        keys = _keys_of(reader.commit.model)
        files = _write_model(reader, keys, max_size, scratch, on_tensor)
        # Of an earlier release, the checkpoint has no config.
        publish(scratch, target, files, reader.commit.model.get("config", ""))
        return [target / name for name in files]


@contextmanager
def _open_with_scratch(
    source: str | os.PathLike[str], target: Path
) -> Iterator[tuple[Reader, Path]]:
    """Open the newest checkpoint, and a folder for incomplete files."""
    # It works tensor by tensor. A large tensor is put together in a temporary file that is mapped
    # into memory, so that neither the model nor a single tensor has to fit into memory.
    with open_newest(source) as reader, reader.explain():
        target.mkdir(parents=True, exist_ok=True)
        # In the target, so that the finished files can be renamed on the same file system.
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as scratch:
            yield reader, Path(scratch)


def _keys_of(meta: ModelMeta) -> dict[str, str]:
    """Return the key of each of a model's tensors, by name."""
    return {name: f"model/{name}" for name in (*meta["params"], *meta["buffers"])}


def _write_model(
    reader: Reader, keys: dict[str, str], max_size: int, scratch: Path, on_tensor: OnTensor
) -> dict[str, list[TensorEntry]]:
    """Write a model's tensors into files of at most this size, and return what each file has."""
    entries = []
    for name, key in keys.items():
        tensor = reader.tensors[key]
        entries.append(TensorEntry(name, tensor.torch_dtype, tensor.shape))

    def get_tensor(name: str) -> Tensor:
        found = _read_to_consolidate(reader, keys[name], scratch)
        on_tensor(found.nbytes)
        return found

    files = split_into_files(entries, max_size)
    for name, part in files.items():
        write_file(scratch / name, part, get_tensor)
    return files


def _read_to_consolidate(reader: Reader, key: str, scratch: Path) -> Tensor:
    """Return a tensor, compared with its checksums; a large one lies in an unnamed mapped file."""
    tensor = reader.tensors[key]
    if tensor.nbytes < IN_A_FILE:
        return reader.read_whole(key)
    reader.check_claim(key)
    descriptor, name = tempfile.mkstemp(dir=scratch)
    try:
        os.ftruncate(descriptor, tensor.nbytes)
        elements = math.prod(tensor.shape)
        flat = torch.from_file(name, shared=True, size=elements, dtype=tensor.torch_dtype)
    finally:
        os.close(descriptor)
        os.unlink(name)  # the mapping keeps the file's space until the tensor is freed
    return reader.read_whole(key, flat.view(tensor.shape))


def _write_optimizer(
    reader: Reader, number: int, meta: OptimizerMeta, path: Path, on_tensor: OnTensor
) -> Path:
    """Write the state dict as the plain optimizer would have saved it."""

    def get_tensor(key: str) -> Tensor:
        reader.take(key)
        on_tensor(reader.tensors[key].nbytes)
        return _read_to_consolidate(reader, key, path.parent)

    groups: list[dict[str, object]] = []
    names: list[str] = []
    options_by_group = saved_options(meta["groups"], get_tensor)
    for group, options in zip(meta["groups"], options_by_group, strict=True):
        # torch numbers the parameters through all groups.
        numbers = range(len(names), len(names) + len(group["names"]))
        names += group["names"]
        groups.append({**options, "params": list(numbers), "param_names": group["names"]})
    saved = saved_state(reader.tensors, f"optimizer.{number}", meta["groups"], get_tensor)
    state: dict[int, dict[str, object]] = {}
    for index, name in enumerate(names):
        if not saved.get(name):
            continue
        state[index] = {}
        for entry, value in saved[name].items():
            if entry != EXACT_ENTRY:  # unknown to the plain optimizer
                state[index][entry] = decode(value, get_tensor)
    other = decode_dict("rest of an optimizer", meta["other"], get_tensor)
    packed = {**other, "state": state, "param_groups": groups}
    rule = meta["rule"]
    if rule is not None:
        scaling = saved_rule(rule, get_tensor)
        # Saved by name; a rule's own state dict has them in the order of the parameters.
        previous = scaling["previous"]
        scaling["previous"] = []
        if previous:
            scaling["previous"] = [previous.get(name) for name in names]
        packed["manyhands"] = scaling
    with path.open("xb") as file:
        torch.save(packed, file)
        file.flush()
        os.fsync(file.fileno())
    return path
