"""`mh.load`. The steps are in `_reading.py`."""

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
    """Continue from a checkpoint, and return the saved values. Call it on every rank.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    >>> _ = mh.save("run", model=model, optimizer=optimizer, scaler=scaler, epoch=3)
    >>> values = mh.load("run", model=model, optimizer=optimizer, scaler=scaler)
    >>> values["epoch"], values["scaler"] is scaler
    (3, True)

    `path` is the folder that `save` was given, which means the newest complete checkpoint in it, or
    one checkpoint. The number of ranks and the sharding may differ from those of the save: each
    rank reads what it needs.

    Values come back as they were saved, and the step, if `save` was given one, as `"step"`. An
    object that has a `load_state_dict` may be given under its name, and is loaded in place;
    otherwise its state dict comes back. With an optimizer, random generators continue, too; on
    another number of ranks, rank r continues those of the saved rank r, if there was one. Without
    an optimizer, for instance to evaluate a model, they are left alone.

    If a checkpoint is damaged, incomplete, or of another model or optimizer, every rank raises, and
    nothing has changed.

    Args:
        path: the folder of checkpoints, or one of them.
        model: the model to load into, wrapped or not.
        optimizer: the optimizer, or a list as it was saved.
        scheduler: the scheduler, or a list.
        process_group: the ranks that share the run; all, by default.
        **values: objects to load into, under the names they were saved by.
    """
    # Here, not at the top: `import manyhands` must not import torch.distributed.checkpoint, which
    # `_reading` needs.
    from manyhands.checkpoint._reading import load_newest

    wait_for_pending()
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return load_newest(Path(path), objects, values, process_group)
