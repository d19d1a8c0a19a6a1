"""A save, step by step.

Every rank writes its slices, and rank 0 makes them a checkpoint:

    collect     what each rank has, without copies                 on every rank
    plan        which rank writes what (`_slices.py`)              one all_gather of text
    begin       a hidden folder that all ranks see                 rank 0
    write       its slices, to the disk; or to a copy first        every rank, its own file
    publish     the index, the final name; old checkpoints go      rank 0

If a step fails on any rank, every rank raises, and the hidden folder is removed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.optim import Optimizer

from manyhands._core.agreement import raise_if_different, run_on_all
from manyhands._core.flat import is_dtensor
from manyhands._core.random_state import random_state
from manyhands._core.ranks import RankGroup
from manyhands.checkpoint import _folder, _index, _safetensors
from manyhands.checkpoint._model import ModelNames, collect_model, find_names
from manyhands.checkpoint._optimizer import collect_optimizer
from manyhands.checkpoint._ranks import Replica, find_replicas, join_ranks, merge_replicas
from manyhands.checkpoint._slices import (
    Parts,
    SavePlanner,
    merge_plans,
    plan_to_text,
    put_new,
    to_parts,
)
from manyhands.checkpoint._values import HasState, check_has_state, check_value, encode, escape

SUFFIX = ".safetensors"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def begin_save(
    path: Path,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[HasState],
    values: Mapping[str, object],
    step: int | None,
    keep: int | None,
    wait: bool,
    process_group: dist.ProcessGroup | None,
) -> tuple[Path, Callable[[], None]]:
    """Do everything but the writing. Return the checkpoint's path, and the work that is left.

    Unless `wait` is True, that work does not look at the model or the optimizer any more.
    """
    ranks = join_ranks(process_group, "mh.save")
    replicas = find_replicas(optimizers, ranks)
    own = run_on_all(
        ranks, lambda: collect(model, optimizers, schedulers, values, ranks.rank, replicas)
    )
    arguments = {
        "step": step,
        "keep": keep,
        "wait": wait,
        # Objects themselves cannot be compared.
        "model": model is not None,
        "number of optimizers": len(optimizers),
        "number of schedulers": len(schedulers),
        "values": sorted(values),
    }
    planner = SavePlanner(own.tensors)
    plan, metadata, merged = _plan_together(arguments, planner, own, ranks)
    partial, name = _begin_folder(path, step, ranks)
    try:
        # `source` gives the writer its tensors: the run's own, or copies.
        source: TensorSource = (
            planner if wait else run_on_all(ranks, lambda: StagedCopies(plan, planner))
        )
    except BaseException:
        _drop(partial, ranks)
        raise

    def work() -> None:
        """Write this rank's file, wait for the other ranks', and let rank 0 publish them."""
        try:
            written = run_on_all(ranks, lambda: _write_file(partial, ranks.rank, plan, source))
            texts = ranks.all_gather_text(json.dumps(written))
            # Every rank waits here, so that none returns before the checkpoint is complete.
            run_on_all(
                ranks,
                lambda: (
                    _publish(partial, name, step, own, merged, metadata, texts, keep)
                    if ranks.rank == 0
                    else None
                ),
            )
        except BaseException:
            _drop(partial, ranks)
            raise

    return path / name, work


# -- collect and plan ------------------------------------------------------------------------------


@dataclass
class Contents:
    """What this rank contributes to a checkpoint: tensors by key, and JSON."""

    tensors: dict[str, Parts] = field(default_factory=dict)
    model: _index.ModelMeta | None = None
    optimizers: list[dict[str, object]] = field(default_factory=list)  # what this rank says of each
    schedulers: list[_index.StateMeta] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Parts]) -> None:
        for key, tensor in tensors.items():
            put_new(self.tensors, key, tensor)


def collect(
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[HasState],
    values: Mapping[str, object],
    rank: int,
    replicas: Sequence[Replica],
) -> Contents:
    """Return what this rank contributes to a checkpoint. Tensors are not copied."""
    contents = Contents()
    names: ModelNames | None = None
    if model is not None:
        names = find_names(model)
        contents.model, tensors = collect_model(names, "model", rank)
        contents.add(tensors)
    for number, (each, replica) in enumerate(zip(optimizers, replicas, strict=True)):
        saved = collect_optimizer(each, names, number, replica)
        contents.optimizers.append(saved.meta)
        contents.add(saved.tensors)

    def put(path: str, tensor: Tensor) -> str:
        """Add a tensor to what this rank contributes; return the key under which it is saved."""
        # Schedulers and values are rank 0's, but every rank has a shard of a DTensor.
        if rank == 0 or is_dtensor(tensor):
            contents.add({path: to_parts(tensor)})
        return path

    for number, scheduler in enumerate(schedulers):
        check_has_state("scheduler", scheduler)
        meta = encode(dict(scheduler.state_dict()), f"scheduler.{number}", put)
        contents.schedulers.append({"class": type(scheduler).__name__, "state": meta})
    for name, value in values.items():
        check_value(name, value)
        if isinstance(value, nn.Module):
            module, tensors = collect_model(find_names(value), f"value/{escape(name)}", rank)
            contents.values[name] = {"$": "module", "value": module}
            contents.add(tensors)
        else:
            contents.values[name] = encode(value, f"value/{escape(name)}", put)
    for generator, state in random_state().items():
        contents.add({f"random/{rank}/{generator}": to_parts(state)})
    # Now, rather than when the file is half written.
    for key, tensor in contents.tensors.items():
        _safetensors.check_can_hold(key, tensor.dtype)
    return contents


def _plan_together(
    arguments: Mapping[str, object], planner: SavePlanner, own: Contents, ranks: RankGroup
) -> tuple[SavePlan, Metadata, list[_index.OptimizerMeta]]:
    """Return what this rank is to write, and what all ranks have: tensors and optimizers."""
    # One all_gather carries all that ranks must know of each other.
    text = json.dumps([arguments, plan_to_text(planner.create_local_plan()), own.optimizers])
    everyone = [json.loads(text) for text in ranks.all_gather_text(text)]
    advice = "Call mh.save on every rank with the same arguments."
    raise_if_different([{"arguments of mh.save": each[0]} for each in everyone], advice)
    plans, metadata = merge_plans([each[1] for each in everyone])
    return plans[ranks.rank], metadata, merge_replicas([each[2] for each in everyone])


# -- begin -----------------------------------------------------------------------------------------


def _begin_folder(path: Path, step: int | None, ranks: RankGroup) -> tuple[Path, str]:
    """Return the hidden folder, which all ranks see, and its final name."""
    token = ranks.all_gather_text(uuid.uuid4().hex)[0]
    begun = run_on_all(ranks, lambda: _make_folder(path, step, token) if ranks.rank == 0 else None)
    hidden, name = json.loads(ranks.all_gather_text(json.dumps(begun))[0])
    partial = path / hidden
    try:
        run_on_all(ranks, lambda: _folder.check_shared(partial, token))
    except BaseException:
        _drop(partial, ranks)
        raise
    return partial, name


def _make_folder(path: Path, step: int | None, token: str) -> tuple[str, str]:
    """Make the hidden folder; a full disk is explained with the bytes that are needed."""
    try:
        return _folder.begin(path, step, token)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(_no_room_message(path, len(token))) from error
        raise


def _no_room_message(folder: Path, needed: int) -> str:
    """Say why there is no room. `folder` is the hidden one, or the one it should be made in."""
    parent = folder.parent if folder.name.startswith(_folder.PARTIAL) else folder
    # What ranks have written so far is about to be removed, so it counts as free.
    written = sum(path.lstat().st_size for path in folder.glob(f"*{SUFFIX}"))
    free = shutil.disk_usage(parent).free + written
    limit = "" if free <= needed else ": a quota, or a limit of files or their size, is reached"
    return (
        f"there is no room for the checkpoint in {parent}: this rank has {needed:,} bytes to "
        f"write, and {free:,} were free for all ranks{limit}. Earlier checkpoints are unchanged."
    )


def _drop(partial: Path, ranks: RankGroup) -> None:
    if ranks.rank == 0:
        _folder.remove(partial)


# -- write -----------------------------------------------------------------------------------------


class TensorSource(Protocol):
    """Where a slice's elements come from: the run's own memory, or copies."""

    def resolve_data(self, item: WriteItem) -> Any:
        """Return the elements of a slice that the plan names."""


class StagedCopies:
    """Copies of the slices that this rank is to write, so that training may continue."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._copies: dict[MetadataIndex, Tensor] = {}
        for item in plan.items:
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            # Only what the plan says, not what other ranks write; on the CPU even for a GPU.
            copy = torch.empty(found.shape, dtype=found.dtype)
            self._copies[item.index] = copy.copy_(found.detach())

    def resolve_data(self, item: WriteItem) -> Tensor:
        """Return a copy, as a planner would; each is freed once it is written."""
        return self._copies.pop(item.index)


def _write_file(folder: Path, rank: int, plan: SavePlan, source: TensorSource) -> list[object]:
    """Write this rank's file; return name, bytes and checksum of the file, and its slices."""
    # Wide types first: each tensor then begins at a multiple of its element size.
    items = sorted(plan.items, key=lambda item: -_data_of(item).properties.dtype.itemsize)
    entries = []
    for item in items:
        data = _data_of(item)
        name = slice_name(item.index.fqn, data.chunk, data.size)
        entries.append(
            _safetensors.TensorEntry(name, data.properties.dtype, tuple(data.chunk.sizes))
        )
    path = folder / f"worker-{rank:05d}{SUFFIX}"
    try:
        written = _safetensors.write(path, entries, lambda i: source.resolve_data(items[i]))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(_no_room_message(folder, bytes_to_write(plan))) from error
        # Another process of our run may have taken over, and removed the folder under us.
        _folder.check_lock(folder.parent)
        raise
    slices = [
        [item.index.fqn, list(item.index.offset or ()), entry.name, crc32]
        for item, entry, crc32 in zip(items, entries, written.tensor_crc32s, strict=True)
    ]
    return [path.name, written.nbytes, written.header_crc32, slices]


def _data_of(item: WriteItem) -> TensorWriteData:
    # torch allows items of raw bytes, too; our planner makes none.
    assert item.tensor_data is not None
    return item.tensor_data


def bytes_to_write(plan: SavePlan) -> int:
    """Return the bytes of the slices in a plan, not of the whole tensors that they belong to."""
    return sum(
        math.prod(_data_of(item).chunk.sizes) * _data_of(item).properties.dtype.itemsize
        for item in plan.items
    )


def slice_name(key: str, chunk: ChunkStorageMetadata, shape: Sequence[int]) -> str:
    """Return a slice's name in its file: the tensor's key and, unless it is whole, its offsets."""
    # An @ in the key is doubled, so that no key can look like a key with offsets.
    key = key.replace("@", "@@")
    if list(chunk.sizes) == list(shape):
        return key
    return f"{key}@{','.join(map(str, chunk.offsets))}"


# -- publish ---------------------------------------------------------------------------------------


def _publish(
    partial: Path,
    name: str,
    step: int | None,
    own: Contents,
    optimizers: list[_index.OptimizerMeta],
    metadata: Metadata,
    texts: Sequence[str],
    keep: int | None,
) -> None:
    """Write the index from what each rank has written, and give the folder its final name."""
    from manyhands._version import __version__

    written = [json.loads(text) for text in texts]
    results = [
        (rank, key, offsets, entry, crc32)
        for rank, (_, _, _, slices) in enumerate(written)
        for key, offsets, entry, crc32 in slices
    ]
    index = _index.Index(
        step=step,
        workers=len(written),
        versions={"manyhands": __version__, "torch": str(torch.__version__)},
        time=time.time(),
        files=[_index.IndexedFile(file, nbytes, crc32) for file, nbytes, crc32, _ in written],
        tensors=build_tensor_table(metadata, results),
        model=own.model,
        optimizers=optimizers,
        schedulers=own.schedulers,
        values=own.values,
    )
    try:
        _write_index(partial, index)
        _folder.publish(partial, name)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(_no_room_message(partial, len(index.to_text()))) from error
        _folder.check_lock(partial.parent)
        raise
    # Last: the old checkpoints stay until the new one is complete.
    _folder.prune(partial.parent, keep)


def build_tensor_table(
    metadata: Metadata, results: Iterable[tuple[int, str, Sequence[int], str, int]]
) -> dict[str, _index.StoredTensor]:
    """Return the index's table of tensors, from torch's metadata and what each rank has written."""
    # `results` has for each slice: rank, tensor's key, offsets, name in the rank's file, checksum.
    stored = {(key, tuple(offsets)): (rank, name, crc) for rank, key, offsets, name, crc in results}
    table = {}
    for key, meta in metadata.state_dict_metadata.items():
        assert isinstance(meta, TensorStorageMetadata)
        slices = [
            # Rank r writes file number r.
            _index.StoredSlice(tuple(c.offsets), tuple(c.sizes), *stored[key, tuple(c.offsets)])
            for c in meta.chunks
        ]
        dtype = str(meta.properties.dtype).removeprefix("torch.")
        table[key] = _index.StoredTensor(tuple(meta.size), dtype, slices)
    return table


def _write_index(folder: Path, index: _index.Index) -> None:
    """Write the last file of a checkpoint, and return once it is on the disk."""
    with _folder.open_to_write(folder / _folder.INDEX) as file:
        _safetensors.write_all(file, memoryview(index.to_text().encode()))
        os.fsync(file.fileno())
