"""Save and load runs on any number of ranks, under any sharding.

A save passes through the other files in this order:

    _writing.py  _reading.py  the steps of a save and of a load
    _model.py                 a model's tensors, under the names of the plain model
    _optimizer.py             an optimizer's state by parameter name; the state of blocks
    _optimizer_loader.py      load this state
    _values.py                the user's values as JSON
    _handover.py              states that foreign code loads and may refuse
    _format.py                the layout of data files and of the commit; the writer
    _commit.py                read a commit and compare it with the declared types
    _reader.py                read slices of tensors
    _folder.py                folders: atomic commits, locks, no links
    _cloud.py                 buckets
    _tensor_parts.py          slices of tensors on this rank and in files
    weights/                  plain weight files, such as Hugging Face's
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from manyhands import _arguments as arguments
from manyhands.checkpoint._cloud import Bucket
from manyhands.checkpoint._folder import Folder, UrlPath, to_path
from manyhands.checkpoint._reading import load_newest
from manyhands.checkpoint._values import HasState, RunObjects
from manyhands.checkpoint._writing import begin_save

__all__ = ["Saving", "load", "save"]

Item = TypeVar("Item")


class Saving:
    """A checkpoint that `save` returns. `path` is the checkpoint's folder.

    >>> import torch, manyhands as mh
    >>> saving = mh.save("runs/saving", model=torch.nn.Linear(2, 1), wait=False)
    >>> saving.wait().name  # after more training, wait until the checkpoint is complete
    '000001'
    >>> saving.done
    True
    """

    def __init__(self, path: Path, written: futures.Future[None]) -> None:
        self.path = path
        self._written = written

    @property
    def done(self) -> bool:
        """Whether the save has ended: the checkpoint is complete or has failed."""
        return self._written.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on disk. Raise on every rank if the save failed."""
        global _pending
        futures.wait([self._written])
        if _pending is self:  # an error does not block later saves
            _pending = None
        self._written.result()
        return self.path

    def __repr__(self) -> str:
        state = "being written"
        if self.done:
            state = "failed" if self._written.exception() else "complete"
        return f"Saving({str(self.path)!r}, {state})"


# Only a single save runs at a time: messages of two saves would mix in the ranks' store.
_pending: Saving | None = None


def wait_for_pending() -> None:
    """Wait for the last asynchronous save."""
    if _pending is not None:
        _pending.wait()


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: HasState | Sequence[HasState] | None = None,
    step: int | None = None,
    keep: int | None = 2,
    wait: bool = True,
    frozen: bool = True,
    process_group: dist.ProcessGroup | None = None,
    **values: object,
) -> Saving:
    """Save a run as a new checkpoint in the folder `path`. Call this function on every rank.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    >>> saving = mh.save("run", model=model, optimizer=optimizer, step=100, best_loss=0.25)
    >>> saving.path.name
    '000001-step-100'
    >>> mh.load("run", model=model, optimizer=optimizer)
    {'step': 100, 'best_loss': 0.25}

    Each rank writes slices into a separate file, without gathering. `load` works on any number of
    ranks and under any sharding. A checkpoint appears only when complete: if the run is killed or
    the disk is full, the previous checkpoint remains. It includes the random generators of every
    rank. Values are saved from rank 0.

    Args:
        path: a folder that all ranks share, or a URL such as `s3://bucket/run`.
        model: the model, wrapped or not.
        optimizer: a torch optimizer, an `OSS`, a scaling rule or blocks around an optimizer, or a
            list of optimizers. Save blocks at a sync round: call `synchronize()` on every rank
            first.
        scheduler: a learning rate scheduler, or a list.
        step: the number of steps so far, for the checkpoint's name and the result of `load`.
        keep: the number of newest checkpoints to keep, including this one. None keeps all.
        wait: False copies the state, returns, and writes the files in a thread. The checkpoint is
            complete when `Saving.wait()` returns. The next `save` or `load` waits for the thread.
        frozen: False omits model parameters with `requires_grad=False`, such as the base model
            under adapters. `load` does not change these parameters.
        process_group: the ranks that share the run. Default: all ranks.
        **values: other state of the run: tensors, numbers, strings, lists, dicts, modules, and
            objects with `state_dict` and `load_state_dict`.
    """
    global _pending
    wait_for_pending()
    # Before any collective: an error on a single rank must not leave other ranks waiting.
    if keep is not None:
        keep = arguments.whole("keep", keep, 1, "None keeps all.")
    if step is not None:
        step = arguments.whole("step", step)
    arguments.flag("frozen", frozen)
    options = {"step": step, "keep": keep, "wait": wait, "frozen": frozen}
    run = RunObjects(model, _as_list(optimizer), _as_list(scheduler), values)
    final, work = begin_save(folder_at(path), run, options, process_group)
    written = futures.Future[None]()
    if wait:
        work()
        written.set_result(None)
        return Saving(final, written)
    # Not a daemon thread: Python waits for the checkpoint before it exits.
    writer = futures.ThreadPoolExecutor(1, "manyhands checkpoint")
    _pending = Saving(final, writer.submit(work))
    writer.shutdown(wait=False)
    return _pending


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: HasState | Sequence[HasState] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **values: object,
) -> dict[str, Any]:
    """Load a checkpoint and return the saved values. Call this function on every rank.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    >>> _ = mh.save("run", model=model, optimizer=optimizer, scaler=scaler, epoch=3)
    >>> values = mh.load("run", model=model, optimizer=optimizer, scaler=scaler)
    >>> values["epoch"], values["scaler"] is scaler
    (3, True)

    The number of ranks or the sharding may differ from the save: each rank reads only slices that
    this rank needs.

    The result contains the saved values and, if `save` received a step, `"step"`. To load an object
    in place, pass the object under the saved name; it needs a `load_state_dict`. For objects that
    are not passed, the result contains state dicts.

    With an optimizer, rank r also restores the random generators of the saved rank r, if it exists.
    Without an optimizer, for example in an evaluation, random generators do not change.

    A worker that joins a running crew receives the model, the outer state, the counters of the run
    and the position of the `Cursor` from the crew, and `load` does not replace this newer state. If
    the saved step equals the step count of the blocks, `"step"` is `optimizer.steps`.

    If a checkpoint is damaged, incomplete or from a different model or optimizer, or if an object
    refuses its state, every rank raises a ValueError or FileNotFoundError and no state changes. If
    an optimizer with a custom `load_state_dict` refuses, the RuntimeError says that the model is
    partially loaded.

    Args:
        path: the folder passed to `save`, for the newest checkpoint, or a single checkpoint.
        model: the model to load into, wrapped or not.
        optimizer: the optimizer, or a list as saved.
        scheduler: the scheduler, or a list.
        process_group: the ranks that share the run. Default: all ranks.
        **values: objects to load into, under the saved names.
    """
    wait_for_pending()
    run = RunObjects(model, _as_list(optimizer), _as_list(scheduler), values)
    return load_newest(folder_at(path), run, process_group)


def folder_at(path: str | os.PathLike[str]) -> Folder:
    path = to_path(path)
    if isinstance(path, UrlPath):
        return Bucket(path)
    return Folder(path)


def _as_list(argument: Item | Sequence[Item] | None) -> list[Item]:
    if argument is None:
        return []
    if isinstance(argument, list | tuple):
        return list(argument)
    return [cast(Item, argument)]
