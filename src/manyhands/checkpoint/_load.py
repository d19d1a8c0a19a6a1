"""Load: everything is compared with the index and with its checksums before anything changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from manyhands.checkpoint._save import wait_for_pending


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    process_group: Any = None,
    **values: Any,
) -> dict[str, Any]:
    """Continue from a checkpoint; to be called on every worker. Returns the saved values.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    >>> _ = mh.save("run", model=model, optimizer=optimizer, scaler=scaler, epoch=3)
    >>> values = mh.load("run", model=model, optimizer=optimizer, scaler=scaler)
    >>> values["epoch"], values["scaler"] is scaler
    (3, True)

    `path` is the folder that `save` was given, for the newest complete checkpoint in it, or one
    checkpoint. Number of workers and sharding may be others than those that saved: each worker
    reads what it needs.

    Values come back as they were saved, and the step, if it was given, as `"step"`. What has a
    `load_state_dict` is given under its name, and is loaded in place; otherwise its state dict
    comes back. With an optimizer the run goes on, and so do the random generators; with another
    number of workers, those of the ranks that there were. A model alone may be loaded to be
    evaluated.

    A checkpoint that is damaged, incomplete, or not of this model and optimizer is an error on
    every worker, and nothing has changed then.

    Args:
        path: the folder of checkpoints, or one of them.
        model: the model to load into, wrapped or not.
        optimizer: the optimizer, or a list as it was saved.
        scheduler: the scheduler, or a list.
        process_group: the workers that share the run; all, by default.
        **values: objects to load into, under the names they were saved by.
    """
    from manyhands.checkpoint._reading import load_newest

    wait_for_pending()
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return load_newest(Path(path), given, values, process_group)
