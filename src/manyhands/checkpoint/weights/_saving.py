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
from collections.abc import Callable, Iterable, Sequence
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
    files = list(in_groups(entries, lambda entry: entry.nbytes, max_size)) or [[]]
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    # Aligned, as `checkpoint/_writing.py` does.
    sort = [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]
    return dict(zip(names if count > 1 else [SINGLE], sort, strict=True))


def write_file(
    path: Path, entries: Sequence[TensorEntry], get_tensor: Callable[[str], Tensor]
) -> None:
    """Write one file; `get_tensor` is called for each name in turn."""

    def numbered(number: int) -> Tensor:
        return get_tensor(entries[number].name)

    file = NewFile(path)
    try:
        # transformers refuses a file without this metadata.
        _format.write(file, entries, numbered, {"format": "pt"}, checked=False)
    except BaseException:
        file.discard()
        raise


def publish(scratch: Path, folder: Path, files: dict[str, list[TensorEntry]], config: str) -> None:
    """Move complete files to their place, with index and config, and remove those of before."""
    if lacking := [name for name in files if not (scratch / name).exists()]:
        raise FileNotFoundError(
            f"rank 0 cannot see {list_names(lacking)} in {folder}, which other ranks wrote. Give a "
            "folder that all ranks share."
        )
    for old in folder.glob("model-*-of-*.safetensors"):
        if old.name not in files:
            old.unlink()
    for name in files:
        os.replace(scratch / name, folder / name)
    (folder / (SINGLE if len(files) > 1 else INDEX)).unlink(missing_ok=True)
    if len(files) > 1:
        total = sum(entry.nbytes for entries in files.values() for entry in entries)
        where = {entry.name: file for file, entries in files.items() for entry in entries}
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
            gathered = Gathered(tensors, [entry.name for entry in inside])
            # Buffers are rank 0's, as under DistributedDataParallel: others have other averages.
            has_buffers = any(entry.name in names.buffers for entry in inside)
            if own == (first if has_buffers else writers[number % len(writers)]):
                try:
                    write_file(scratch / file, inside, gathered.next)
                except Exception as error:  # raised once the others have their tensors
                    problem = problem or error
            gathered.finish(take_part=own in writers)
        if problem is not None:
            raise problem

    try:
        run_on_all(ranks, write)
        run_on_all(
            ranks,
            lambda: publish(scratch, folder, files, names.config) if ranks.rank == 0 else None,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [folder / file for file in files]


class Gathered:
    """The whole tensors of one file, in its order; all ranks of a copy ask for the same ones."""

    def __init__(self, tensors: dict[str, Tensor], names: Sequence[str]) -> None:
        self._tensors = tensors
        self._names = names
        self._done = 0

    def next(self, name: str) -> Tensor:
        assert name == self._names[self._done]
        self._done += 1
        tensor = self._tensors[name].detach()
        return tensor.full_tensor() if is_dtensor(tensor) else tensor

    def finish(self, *, take_part: bool) -> None:
        """Take part in gathering the rest."""
        while take_part and self._done < len(self._names):
            self.next(self._names[self._done])


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
