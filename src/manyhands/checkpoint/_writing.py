"""The steps of a save, which `_save_and_load.py` lists.

Apart from `_save_and_load.py` because it imports torch.distributed.checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from manyhands._core.agreement import raise_if_different
from manyhands.checkpoint import _folder, _index, _storage
from manyhands.checkpoint._blocks import Replica, find_replicas, merge_replicas
from manyhands.checkpoint._contents import Contents, as_list, collect, prepare_optimizers
from manyhands.checkpoint._planner import SavePlanner, merge_plans, plan_to_text
from manyhands.checkpoint._ranks import CheckpointRanks
from manyhands.checkpoint._safetensors import check_can_hold

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def begin_save(
    path: Path,
    objects: Mapping[str, Any],
    values: Mapping[str, Any],
    step: int | None,
    keep: int | None,
    wait: bool,
    process_group: Any,
) -> tuple[Path, Callable[[], None]]:
    """Do everything but the writing. Return the checkpoint's path, and the work that is left.

    Unless `wait` is True, that work does not look at the model or the optimizer any more.
    """
    ranks = CheckpointRanks.join(process_group, "mh.save")
    prepare_optimizers(objects["optimizer"], to_load=False)
    replicas = find_replicas(as_list(objects["optimizer"]), ranks)
    contents = ranks.run_on_all(lambda: _collect_checked(objects, values, ranks.rank, replicas))
    arguments = {
        "step": step,
        "keep": keep,
        "wait": wait,
        **_counts(objects, contents),
        "values": sorted(values),
    }
    planner = SavePlanner(contents.tensors)
    # One all_gather carries all that ranks must know of each other.
    own = json.dumps([arguments, plan_to_text(planner.create_local_plan()), contents.optimizers])
    everyone = [json.loads(text) for text in ranks.all_gather_text(own)]
    advice = "Call mh.save on every rank with the same arguments."
    raise_if_different([{"arguments of mh.save": each[0]} for each in everyone], advice)
    plans, metadata = merge_plans([each[1] for each in everyone])
    contents.optimizers = merge_replicas([each[2] for each in everyone])

    token = ranks.broadcast_text(uuid.uuid4().hex)
    begun = ranks.run_on_all(lambda: _begin(path, step, token) if ranks.rank == 0 else None)
    hidden, name = json.loads(ranks.broadcast_text(json.dumps(begun)))
    partial = path / hidden
    plan = plans[ranks.rank]
    try:
        ranks.run_on_all(lambda: _folder.check_shared(partial, token))
        # `source` gives the writer its tensors: the run's own, or copies.
        source: Any = planner if wait else ranks.run_on_all(lambda: StagedCopies(plan, planner))
    except BaseException:
        _drop(partial, ranks)
        raise

    def work() -> None:
        try:
            writer = _storage.Writer(partial, ranks.rank)
            written = ranks.run_on_all(lambda: _write_file(writer, plan, source))
            texts = ranks.all_gather_text(json.dumps(written))
            # Every rank waits here, so that none returns before the checkpoint is complete.
            ranks.run_on_all(
                lambda: (
                    _publish(partial, name, step, contents, metadata, texts, keep)
                    if ranks.rank == 0
                    else None
                )
            )
        except BaseException:
            _drop(partial, ranks)
            raise

    return path / name, work


def _begin(path: Path, step: int | None, token: str) -> tuple[str, str]:
    try:
        return _folder.begin(path, step, token)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(_no_room_message(path, len(token))) from error
        raise


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


def _collect_checked(
    objects: Mapping[str, Any],
    values: Mapping[str, Any],
    rank: int,
    replicas: Sequence[Replica],
) -> Contents:
    contents = collect(**objects, values=values, rank=rank, replicas=replicas)
    # Now, rather than when the file is half written.
    for key, tensor in contents.tensors.items():
        check_can_hold(key, tensor.dtype)
    return contents


def _counts(objects: Mapping[str, Any], contents: Contents) -> dict[str, int | bool]:
    """Return what ranks must have passed alike; objects themselves cannot be compared."""
    return {
        "model": objects["model"] is not None,
        "number of optimizers": len(contents.optimizers),
        "number of schedulers": len(contents.schedulers),
    }


def _write_file(writer: _storage.Writer, plan: SavePlan, source: Any) -> list[Any]:
    """Write this rank's file; return name, bytes and checksum of the file, and its slices."""
    try:
        results = writer.write_data(plan, source).wait()
    except OSError as error:
        if error.errno in NO_ROOM:
            needed = _storage.bytes_to_write(plan)
            raise OSError(_no_room_message(writer.folder, needed)) from error
        # Another process of our run may have taken over, and removed the folder under us.
        _folder.check_lock(writer.folder.parent)
        raise
    file = writer.file
    assert file is not None
    slices = [
        [each.index.fqn, list(each.index.offset or ()), *each.storage_data] for each in results
    ]
    return [file.name, file.nbytes, file.crc32, slices]


def _no_room_message(folder: Path, needed: int) -> str:
    """Say why there is no room. `folder` is the hidden one, or the one it should be made in."""
    parent = folder.parent if folder.name.startswith(_folder.PARTIAL) else folder
    # What ranks have written so far is about to be removed, so it counts as free.
    free = shutil.disk_usage(parent).free + sum(
        path.lstat().st_size for path in folder.glob(f"*{_storage.SUFFIX}")
    )
    why = f"this rank has {needed:,} bytes to write, and {free:,} were free for all ranks"
    if free > needed:
        files = os.statvfs(parent).f_favail if hasattr(os, "statvfs") else 1
        why += ", so a limit on the size of files, or a quota, is reached"
        if files == 0:
            why = "the file system takes no more files (its inodes are used up)"
    return (
        f"there is no room for the checkpoint in {parent}: {why}. Earlier checkpoints are "
        "unchanged. Make room, or keep fewer."
    )


def _publish(
    partial: Path,
    name: str,
    step: int | None,
    contents: Contents,
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
        tensors=_storage.build_tensor_table(metadata, results),
        model=contents.model,
        optimizers=contents.optimizers,
        schedulers=contents.schedulers,
        values=contents.values,
    )
    try:
        _storage.write_index(partial, index)
        _folder.publish(partial, name)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(_no_room_message(partial, len(index.to_text()))) from error
        _folder.check_lock(partial.parent)
        raise
    # Last: the old checkpoints stay until the new one is complete.
    _folder.prune(partial.parent, keep)


def _drop(partial: Path, ranks: CheckpointRanks) -> None:
    if ranks.rank == 0:
        _folder.remove(partial)
