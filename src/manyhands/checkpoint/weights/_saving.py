"""Write a model as safetensors files of a stated size, with an index, as transformers reads them.

The files are planned by names and bytes only, so every rank has the same plan. Ranks that hold the
same copy of the model write files in turn. Sharded tensors are gathered one after the other; ranks
that do not write take part. Files have other names until all of them are complete.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from manyhands._optimizers.modules import TORCH_WRAPPERS, ModuleWrapper
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import in_groups, is_dtensor
from manyhands.checkpoint import _format
from manyhands.checkpoint._folder import NewFile, sync
from manyhands.checkpoint._format import TensorEntry
from manyhands.checkpoint._model import find_names, list_names
from manyhands.checkpoint.weights._files import INDEX, SINGLE

CONFIG = "config.json"


def split_into_files(entries: Iterable[TensorEntry], max_size: int) -> dict[str, list[TensorEntry]]:
    """Return which file has which tensors, in their order."""
    groups = list(in_groups(entries, lambda entry: entry.nbytes, max_size)) or [[]]
    files = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else SINGLE
        # Aligned, as `checkpoint/_writing.py` does.
        files[name] = sorted(group, key=lambda entry: -entry.dtype.itemsize)
    return files


def write_file(
    path: Path, entries: Sequence[TensorEntry], get_tensor: Callable[[str], Tensor]
) -> None:
    """Write one file; `get_tensor` is called for each name in turn."""

    file = NewFile(path)
    try:
        # transformers refuses a file without this metadata.
        get = lambda number: get_tensor(entries[number].name)  # noqa: E731
        _format.write(file, entries, get, {"format": "pt"}, checked=False)
    except BaseException:
        file.discard()
        raise


def publish(scratch: Path, folder: Path, files: dict[str, list[TensorEntry]], config: str) -> None:
    """Move complete files to their place, with index and config, and remove those of before."""
    lacking = [name for name in files if not (scratch / name).exists()]
    if lacking:
        raise FileNotFoundError(
            f"rank 0 cannot see {list_names(lacking)} in {folder}, which other ranks wrote. Give a "
            "folder that all ranks share."
        )
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
    """Write the files of a model; return their paths."""
    names = run_on_all(ranks, lambda: find_names(model))
    tensors = names.tensors
    entries = [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    listed = [f"{entry.name} {entry.shape} {entry.dtype}" for entry in entries]
    advice = "Give the same model and arguments on every rank."
    agree(ranks, {"tensors": listed, "values of max_shard_size": max_size}, advice)
    files = split_into_files(entries, max_size)
    own = dist.get_rank() if dist.is_initialized() else 0
    # Rank 0's copy is written: between sync rounds of blocks, others have other values.
    facts = json.dumps([uuid.uuid4().hex, own, holders_of_copy(tensors, model, own)])
    token, first, writers = json.loads(ranks.all_gather_text(facts)[0])
    scratch = folder / f".partial-{token}"

    def write() -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        problem: Exception | None = None
        for number, (file, inside) in enumerate(files.items()):
            writer = writers[number % len(writers)]
            # Buffers are rank 0's, as under DistributedDataParallel: others have other averages.
            if any(entry.name in names.buffers for entry in inside):
                writer = first
            try:
                if own in writers:
                    _write_or_gather(scratch / file, inside, tensors, writes=own == writer)
            except Exception as error:  # raised once the others have their tensors
                problem = problem or error
        if problem is not None:
            raise problem

    def publish_on_first() -> None:
        if ranks.rank == 0:
            publish(scratch, folder, files, names.config)

    try:
        run_on_all(ranks, write)
        run_on_all(ranks, publish_on_first)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [folder / file for file in files]


def _write_or_gather(
    path: Path, entries: Sequence[TensorEntry], tensors: Mapping[str, Tensor], *, writes: bool
) -> None:
    """Write a file, or take part in gathering the tensors for the rank that does."""
    rest = iter([tensors[entry.name].detach() for entry in entries])
    try:
        if writes:
            write_file(path, entries, lambda _: _gather(next(rest)))
    finally:
        for tensor in rest:
            _gather(tensor)


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def holders_of_copy(tensors: dict[str, Tensor], model: nn.Module, own: int) -> list[int]:
    """Return the ranks, among all processes, that surely hold the same model as this one."""
    for tensor in tensors.values():
        if is_dtensor(tensor):
            return list(tensor.device_mesh.mesh.flatten().tolist())
    for module in model.modules():
        ours = isinstance(module, ModuleWrapper) and module.averages_gradients
        if (ours or isinstance(module, TORCH_WRAPPERS)) and dist.is_initialized():
            return RankGroup.of(getattr(module, "process_group", None)).ranks
    return [own]
