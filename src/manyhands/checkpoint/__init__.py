"""Save and load runs, for any number of ranks and any sharding.

`save` and `load` are here, with the thread of a save. A save meets the other files in this order; a
load goes through the same stages, from files to objects.

    _writing.py  _reading.py  a save and a load, step by step
    _model.py                 a model's tensors, under the names of the plain model
    _optimizer.py             an optimizer's state, by parameter name, and the state of blocks
    _values.py                the user's values, as JSON
    _handover.py              states that foreign code loads, or that an optimizer may refuse
    _format.py                the content of data files and of the commit, and the writer
    _commit.py  _json.py      the commit is read, and compared with the declared types
    _reader.py                slices of tensors are read
    _folder.py                a folder in which nothing is half written and no link is followed
    _cloud.py                 the same in a bucket
    _tensor_parts.py          the slices of tensors on this rank, and where slices are stored
    weights/                  weights in plain files, such as Hugging Face's folders
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
    """A checkpoint that is being saved. `path` is where it is, or will be.

    >>> import torch, manyhands as mh
    >>> saving = mh.save("runs/saving", model=torch.nn.Linear(2, 1), wait=False)
    >>> saving.wait().name  # train on, and wait when it has to be there
    '000001'
    >>> saving.done
    True
    """

    def __init__(self, path: Path, written: futures.Future[None]) -> None:
        self.path = path
        self._written = written

    @property
    def done(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._written.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on the disk. Raise on every rank if it failed."""
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


# One save at a time: two would mix their messages on the group that ranks keep for checkpoints.
_pending: Saving | None = None


def wait_for_pending() -> None:
    """Wait for the last asynchronous save. Raise the error of a save that was not waited for."""
    if _pending is not None:
        _pending.wait()


@arguments.explained
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
    """Save a run as a new checkpoint in the folder `path`. Call it on every rank.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    >>> saving = mh.save("run", model=model, optimizer=optimizer, step=100, best_loss=0.25)
    >>> saving.path.name
    '000001-step-100'
    >>> mh.load("run", model=model, optimizer=optimizer)
    {'step': 100, 'best_loss': 0.25}

    Each rank writes its slices into a separate file; nothing is gathered. State is saved under
    the parameters' names, so that `load` works on any number of ranks, under any sharding. A
    checkpoint is complete or it is not there: if a run is killed, or a disk is full, the previous
    checkpoint remains.

    The random generators of every rank are saved, too. The values are rank 0's.

    Args:
        path: a folder that all ranks share, or a URL as `s3://bucket/run`. Each save makes a
            folder in it.
        model: the model, wrapped or not.
        optimizer: a torch optimizer, an `OSS`, a scaling rule or blocks around one; or a list of
            them. Blocks are saved at a sync round: call `synchronize()` on every rank first.
        scheduler: a learning rate scheduler, or a list.
        step: the number of steps so far. It becomes part of the checkpoint's name, and `load`
            returns it.
        keep: the number of checkpoints to leave in the folder, this one included; None keeps all.
        wait: False copies the state, returns, and writes in a thread. The checkpoint is complete
            once `wait()` of the returned object returns. The next `save` or `load` waits for it.
        frozen: False leaves out the model's parameters with `requires_grad=False`, such as the base
            under adapters. `load` leaves them as they are: get them from where they came from.
        process_group: the ranks that share the run; all, by default.
        **values: anything else that belongs to the run: tensors, numbers, strings, lists, dicts,
            modules, and objects that have `state_dict` and `load_state_dict`.
    """
    global _pending
    wait_for_pending()
    # Before any collective: a mistake on one rank must not leave other ranks waiting.
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
    # The thread is no daemon: a program that ends finishes its checkpoint first.
    writer = futures.ThreadPoolExecutor(1, "manyhands checkpoint")
    _pending = Saving(final, writer.submit(work))
    writer.shutdown(wait=False)
    return _pending


@arguments.explained
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: HasState | Sequence[HasState] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **values: object,
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

    A worker that has joined a crew late has received the model, the outer state and the counters of
    the run, and the position of its `Cursor`. They are later than any checkpoint, and stay as they
    are. All else comes from the checkpoint, as on the other workers. If the saved step was the
    number of steps of the blocks, `"step"` is `optimizer.steps`.

    If a checkpoint is damaged, incomplete, or of another model or optimizer, or if an object
    refuses its state, every rank raises a ValueError or FileNotFoundError, and nothing has changed.

    Args:
        path: the folder of checkpoints, or one of them.
        model: the model to load into, wrapped or not.
        optimizer: the optimizer, or a list as it was saved.
        scheduler: the scheduler, or a list.
        process_group: the ranks that share the run; all, by default.
        **values: objects to load into, under the names they were saved by.
    """
    wait_for_pending()
    run = RunObjects(model, _as_list(optimizer), _as_list(scheduler), values)
    return load_newest(folder_at(path), run, process_group)


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of checkpoints at a path or URL."""
    path = to_path(path)
    if isinstance(path, UrlPath):
        return Bucket(path)
    return Folder(path)


def _as_list(argument: Item | Sequence[Item] | None) -> list[Item]:
    """Return an argument that may be one object, several, or None, as a list."""
    if argument is None:
        return []
    if isinstance(argument, list | tuple):
        return list(argument)
    return [cast(Item, argument)]
