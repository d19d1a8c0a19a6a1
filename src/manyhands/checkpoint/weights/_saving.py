"""Write a model as safetensors files of limited size, with an index, as in transformers.

All ranks gather the tensors one by one, and rank 0 writes them into a hidden folder. Complete files
then move to the target folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from torch import Tensor, nn

from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import in_groups, is_dtensor
from manyhands.checkpoint import _format
from manyhands.checkpoint._folder import Folder, sync
from manyhands.checkpoint._format import TensorEntry
from manyhands.checkpoint._model import find_names
from manyhands.checkpoint.weights._loading import INDEX, SINGLE

CONFIG = "config.json"


def split_into_files(entries: Iterable[TensorEntry], max_size: int) -> dict[str, list[TensorEntry]]:
    groups = list(in_groups(entries, lambda entry: entry.nbytes, max_size)) or [[]]
    files = {}
    for number, group in enumerate(groups, 1):
        name = SINGLE
        if len(groups) > 1:
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Wide types first, which aligns tensors: see `checkpoint/_writing.py`.
        files[name] = sorted(group, key=lambda entry: -entry.dtype.itemsize)
    return files


def write_file(
    path: Path, entries: Sequence[TensorEntry], get_tensor: Callable[[str], Tensor]
) -> None:
    with Folder(path.parent).create("", path.name) as file:
        _format.write(file, entries, lambda each: get_tensor(each.name), checked=False)


def publish(scratch: Path, folder: Path, files: dict[str, list[TensorEntry]], config: str) -> None:
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX):
        if old.name not in files:
            old.unlink(missing_ok=True)
    total = 0
    where = {}
    for file, entries in files.items():
        os.replace(scratch / file, folder / file)
        for entry in entries:
            total += entry.nbytes
            where[entry.name] = file
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if config:
        (folder / CONFIG).write_text(config)
    sync(folder)


def write_model(model: nn.Module, folder: Path, max_size: int, ranks: RankGroup) -> list[Path]:
    names = run_on_all(ranks, lambda: find_names(model))
    entries = [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in names.tensors.items()]
    listed = [f"{entry.name} {entry.shape} {entry.dtype}" for entry in entries]
    advice = "Pass the same model and arguments on every rank."
    agree(ranks, {"tensors": listed, "values of max_shard_size": max_size}, advice)
    files = split_into_files(entries, max_size)
    rest = chain.from_iterable(files.values())  # the remaining tensors, in the order of all ranks

    def gather(entry: TensorEntry) -> Tensor:
        tensor = names.tensors[entry.name].detach()
        return tensor.full_tensor() if is_dtensor(tensor) else tensor

    def write() -> None:
        try:
            if ranks.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
                    for file, inside in files.items():
                        write_file(Path(scratch) / file, inside, lambda _: gather(next(rest)))
                    publish(Path(scratch), folder, files, names.config)
        finally:
            # Also after an error: all ranks take part in gathering each tensor.
            for entry in rest:
                gather(entry)

    run_on_all(ranks, write)
    return [folder / file for file in files]
