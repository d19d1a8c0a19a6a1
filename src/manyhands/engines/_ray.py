"""Use Ray Train as an engine: ranks, storage, checkpoints and stop notices.

Ray creates the process group before it calls the training function; `mh.start` uses that group.

    checkpoints   `mh.save` writes to Ray's storage, and the checkpoint is reported to Ray without
                  a copy. Ray deletes old checkpoints (`CheckpointConfig(num_to_keep=2)`)
    stop notice   Ray marks each worker when it drains a node
    leaving       Ray regards a returning training function as finished, and a raising function as
                  failed. So a worker waits after the last save until Ray ends the process, at the
                  deadline of the drained node. Ray then restarts the run on the remaining nodes

`mh.start` does not import Ray: a process of Ray Train has imported it already.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from manyhands._ranks.stop_notice import stop_notice


def is_ray_worker() -> bool:
    return _context() is not None


def _context() -> Any:
    """Return Ray's record of this worker, or None."""
    module = sys.modules.get("ray.train.v2._internal.execution.context")
    return None if module is None else module._train_context


def place_of_ray() -> tuple[int, int, int, int]:
    """Return this worker's rank, world size, local rank and local world size."""
    import ray.train

    context = ray.train.get_context()
    rank = context.get_world_rank()
    size = context.get_world_size()
    return rank, size, context.get_local_rank(), context.get_local_world_size()


def notice_of_ray() -> str:
    """Return Ray's reason to stop, or an empty text."""
    # Not `ray.train.get_preemption_info`, which is a barrier.
    info = _context().preemption_context.preemption_info
    if info is None:
        return ""
    if info.deadline_ms is not None:
        stop_notice.grace = max(0.0, info.deadline_ms / 1000 - time.time())
    return "Ray drains a node"


def folder_in_storage(name: str) -> Path:
    """Return a folder of this run in Ray's storage, which all workers share."""
    import pyarrow.fs
    import ray.train

    storage = ray.train.get_context().get_storage()
    if not isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        raise ValueError(
            f"mh.save needs a folder that all workers share, but Ray's storage is "
            f"{storage.storage_filesystem.type_name}. Set RunConfig(storage_path=...) to a folder."
        )
    return Path(storage.experiment_fs_path, name)


def report_checkpoint(path: Path, metrics: dict[str, object]) -> None:
    """Report a checkpoint in Ray's storage to Ray. Called on every worker."""
    import ray.train
    from ray.train.v2.api.report_config import CheckpointUploadMode

    checkpoint = ray.train.Checkpoint.from_directory(str(path))
    ray.train.report(
        metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def wait_for_the_end() -> NoReturn:
    while True:
        time.sleep(1.0)
