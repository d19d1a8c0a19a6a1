"""The steps of a save; see `_save.py`."""

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
from torch.distributed.checkpoint.planner import SavePlan

from manyhands.checkpoint import _files, _folder, _index, _storage
from manyhands.checkpoint import _planner as _plan
from manyhands.checkpoint._contents import Contents, at_rest, collect, listed_as
from manyhands.checkpoint._ranks import Team
from manyhands.checkpoint._replicas import Replica, joined, replicas_of
from manyhands.checkpoint._safetensors import check_can_hold

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def begin_save(
    path: Path,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    step: int | None,
    keep: int | None,
    wait: bool,
    process_group: Any,
) -> tuple[Path, Callable[[], None]]:
    """All but the writing. Returns where the checkpoint will be, and what is left to be done.

    Unless `wait`, what is left does not look at the model or the optimizer any more.
    """
    team = Team.of(process_group, "mh.save")
    at_rest(given["optimizer"], to_load=False)
    replicas = replicas_of(listed_as(given["optimizer"]), team)
    contents = team.together(lambda: _collected(given, values, team.rank, replicas))
    facts = {
        "step": step,
        "keep": keep,
        "wait": wait,
        "model": given["model"] is not None,
        "number of optimizers": len(contents.optimizers),
        "number of schedulers": len(contents.schedulers),
        "values": sorted(values),
    }
    planner = _plan.SavePlanner(contents.tensors)
    plan = _plan.as_text(planner.create_local_plan())
    mine = json.dumps([facts, plan, contents.optimizers])
    everyone = [json.loads(text) for text in team.gather(mine)]
    _check_facts([each[0] for each in everyone])
    plans, metadata = _plan.agreed([each[1] for each in everyone])
    contents.optimizers = joined([each[2] for each in everyone])

    token = team.tell(uuid.uuid4().hex)
    begun = team.together(lambda: _begun(path, step, token) if team.rank == 0 else None)
    hidden, name = json.loads(team.tell(json.dumps(begun)))
    partial = path / hidden
    to_write = plans[team.rank]
    try:
        team.together(lambda: _folder.check_shared(partial, token))
        source: Any = planner if wait else team.together(lambda: Staged(to_write, planner))
    except BaseException:
        _drop(partial, team)
        raise

    def work() -> None:
        try:
            writer = _storage.Writer(partial, team.rank)
            written = team.together(lambda: _written(writer, to_write, source))
            texts = team.gather(json.dumps(written))
            team.together(
                lambda: (
                    _publish(partial, name, step, contents, metadata, texts, keep)
                    if team.rank == 0
                    else None
                )
            )
        except BaseException:
            _drop(partial, team)
            raise

    return path / name, work


def _begun(path: Path, step: int | None, token: str) -> tuple[str, str]:
    try:
        return _folder.begin(path, step, token)
    except OSError as error:
        if error.errno in FULL:
            raise OSError(_no_room(path, len(token))) from error
        raise


class Staged:
    """Copies of what this worker is to write, so that training may go on."""

    def __init__(self, plan: SavePlan, planner: _plan.SavePlanner) -> None:
        self._copies: dict[MetadataIndex, Tensor] = {}
        for item in plan.items:
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            copy = torch.empty(found.shape, dtype=found.dtype)
            self._copies[item.index] = copy.copy_(found.detach())

    def resolve_data(self, item: Any) -> Tensor:
        return self._copies.pop(item.index)


def _collected(
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    rank: int,
    replicas: Sequence[Replica],
) -> Contents:
    contents = collect(**given, values=values, rank=rank, replicas=replicas)
    for key, tensor in contents.tensors.items():
        check_can_hold(key, tensor.dtype)
    return contents


def _check_facts(everyone: Sequence[Mapping[str, Any]]) -> None:
    for name in everyone[0]:
        each = [facts[name] for facts in everyone]
        if any(value != each[0] for value in each):
            told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(each[:8]))
            raise ValueError(
                f"workers call mh.save with different {name}: {told}. Call it on every worker "
                "alike."
            )


def _written(writer: _storage.Writer, plan: SavePlan, source: Any) -> list[Any]:
    """Write this worker's file; returns what the index needs to know of it."""
    try:
        results = writer.write_data(plan, source).wait()
    except OSError as error:
        if error.errno in FULL:
            raise OSError(_no_room(writer.folder, _storage.bytes_of(plan))) from error
        _folder.check_lock(writer.folder.parent)  # another of our run has removed what we write
        raise
    file = writer.file
    assert file is not None
    parts = [
        [each.index.fqn, list(each.index.offset or ()), *each.storage_data] for each in results
    ]
    return [file.name, file.nbytes, file.crc32, parts]


def _no_room(folder: Path, needed: int) -> str:
    """`folder` is the hidden one, or the one that it should have been made in."""
    parent = folder.parent if folder.name.startswith(_folder.PARTIAL) else folder
    free = shutil.disk_usage(parent).free + sum(
        path.lstat().st_size for path in folder.glob(f"*{_storage.SUFFIX}")
    )
    why = f"this worker has {needed:,} bytes to write, and {free:,} were free for all workers"
    if free > needed:
        files = os.statvfs(parent).f_favail if hasattr(os, "statvfs") else 1
        why += ", so that a limit on the size of files, or a quota, is reached"
        if files == 0:
            why = "the file system takes no more files (its inodes are used up)"
    return (
        f"there is no room for the checkpoint in {parent}: {why}. The checkpoints that were "
        "complete are as they were. Make room, or keep fewer."
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
    from manyhands._version import __version__

    told = [json.loads(text) for text in texts]
    results = [
        (rank, key, at, chunk, crc)
        for rank, (_, _, _, parts) in enumerate(told)
        for key, at, chunk, crc in parts
    ]
    index = _index.Index(
        step=step,
        workers=len(told),
        versions={"manyhands": __version__, "torch": str(torch.__version__)},
        time=time.time(),
        files=[_index.File(file, nbytes, crc) for file, nbytes, crc, _ in told],
        tensors=_storage.tensors_of(metadata, results),
        model=contents.model,
        optimizers=contents.optimizers,
        schedulers=contents.schedulers,
        values=contents.values,
    )
    try:
        _storage.write_index(partial, index)
        _folder.publish(partial, name)
    except OSError as error:
        if error.errno in FULL:
            raise OSError(_no_room(partial, len(index.text()))) from error
        _folder.check_lock(partial.parent)
        raise
    _folder.prune(partial.parent, keep)


def _drop(partial: Path, team: Team) -> None:
    if team.rank == 0:
        _files.remove(partial)
