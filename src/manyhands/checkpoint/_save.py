"""Save: every worker writes its share, rank 0 makes it a checkpoint.

In order
    collect     what each worker has, without copies            on every worker
    plan        who writes what (`_planner.py`)                    one exchange of text
    begin       a hidden folder, seen by all                    rank 0
    write       its share, to the disk; or first to a copy      every worker, its own file
    publish     the index, the new name, and the old ones go    rank 0

If anything fails anywhere, every worker raises, and the folder goes.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Saving:
    """A checkpoint that is being saved. `path` is where it is, or will be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is complete on the disk; raises, on every worker, if it could not be saved."""
        if self._thread is not None:
            self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self.path

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as problem:
                self._problem = problem

        # Not a daemon: a program that ends finishes its checkpoint.
        self._thread = threading.Thread(target=run, name="manyhands checkpoint")
        self._thread.start()

    def __repr__(self) -> str:
        state = "failed" if self._problem else "complete" if self.done else "being written"
        return f"Saving({str(self.path)!r}, {state})"


_pending: Saving | None = None


def wait_for_pending() -> None:
    """Until the last asynchronous save is over; its error is raised here if nobody has waited."""
    global _pending
    before, _pending = _pending, None
    if before is not None:
        before.wait()


def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    step: int | None = None,
    keep: int | None = 2,
    wait: bool = True,
    process_group: Any = None,
    **values: Any,
) -> Saving:
    """Save a run as a new checkpoint in the folder `path`; to be called on every worker.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    >>> saving = mh.save("run", model=model, optimizer=optimizer, step=100, best_loss=0.25)
    >>> saving.path.name
    '000001-step-100'
    >>> mh.load("run", model=model, optimizer=optimizer)
    {'step': 100, 'best_loss': 0.25}

    Each worker writes its share into a file of its own; nothing is gathered. State is saved under
    the parameters' names, so that `load` takes it on any number of workers, under any sharding. A
    checkpoint is complete or it is not there: a run that is killed, or a disk that is full, leaves
    the one before.

    Random generators are saved as well, every worker's. The user's values are rank 0's.

    Args:
        path: a folder that all workers share; each save makes a folder in it.
        model: the model, wrapped or not.
        optimizer: a torch optimizer, an `OSS`, a scaling rule or blocks around one; or a list of
            them. Blocks are saved at a sync round: call `synchronize()` on every worker first.
        scheduler: a learning rate scheduler, or a list.
        step: how far the run is; part of the checkpoint's name, and `load` returns it.
        keep: how many checkpoints to leave there, this one included; None: all.
        wait: False copies the state, returns, and writes in a thread. The checkpoint is complete
            when `wait()` of what is returned has come back. The next `save` or `load` waits for it.
        process_group: the workers that share the run; all, by default.
        **values: what else belongs to the run: tensors, numbers, strings, lists, dicts, modules,
            and whatever has `state_dict` and `load_state_dict`.
    """
    from manyhands.checkpoint._writing import begin_save

    global _pending
    wait_for_pending()
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be at least 1, or None to keep all, got {keep!r}.")
    if step is not None:
        if not hasattr(step, "__index__") or step < 0:
            raise ValueError(f"step must be a whole number, not negative, got {step!r}.")
        step = operator.index(step)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    final, work = begin_save(Path(path), given, values, step, keep, wait, process_group)
    saving = Saving(final)
    if wait:
        work()
    else:
        saving._start(work)
        _pending = saving
    return saving
