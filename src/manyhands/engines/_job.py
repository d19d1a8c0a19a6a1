"""Join the run of an engine (`mh.start`), save, load and leave (`Job`).

    job = mh.start()          detect the engine, set the variables, meet the other ranks
    job.rank, job.world_size  who am I
    job.crew                  the crew that the engine keeps; None if the ranks are fixed
    job.load, job.save        the engine's place for checkpoints
    job.leave                 end as the engine expects of a process that was asked to stop

What differs between engines is in `_places.py` and `_ray.py`; this file has what they share.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.optim import Optimizer

from manyhands._arguments import number_in
from manyhands._optimizers.wrappers import find_layer
from manyhands._ranks import presence
from manyhands._ranks.dry_run import dry_group
from manyhands._ranks.stop_notice import stop_notice
from manyhands.blocks._optimizer import Blocks
from manyhands.blocks.crew._crew import Crew
from manyhands.checkpoint import folder_at
from manyhands.checkpoint import load as load_checkpoint
from manyhands.checkpoint import save as save_checkpoint
from manyhands.checkpoint._folder import RUN_VARIABLE, to_path
from manyhands.checkpoint._values import HasState
from manyhands.engines import _ray
from manyhands.engines._places import Place, find_place, find_worker_number
from manyhands.engines._stopping import listener

RESTART = 75  # EX_TEMPFAIL: this process could not go on, and should be started again
STOP_CODE_VARIABLE = "MANYHANDS_STOP_CODE"  # the exit code after a stop notice, if not 0
OWN_NOTICE = 10.0  # seconds that a rank waits for its own agent's notice, after another rank's


def start(
    backend: str | None = None,
    *,
    checkpoints: str | os.PathLike[str] = "run",
    process_group: bool = True,
    stop_file: str | os.PathLike[str] | None = None,
    signals: Sequence[int] | None = None,
) -> Job:
    """Join the other ranks of this run, whichever engine has started them, and return the job.

    The engine is found by its environment variables: torchrun, `manyhands run`, Ray Train, Slurm,
    submitit, mpirun, Kubeflow. Without any of them this process is a rank alone, so the
    same script runs with `python train.py`. If a process group exists already, it is used.

    >>> import torch, manyhands as mh
    >>> job = mh.start()
    >>> job.engine, job.rank, job.world_size
    ('none', 0, 1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> torch.distributed.destroy_process_group()

    From here on this process listens to the engine's stop notice: see `stopping`.

    Args:
        backend: as for `torch.distributed.init_process_group`. By default gloo, and on a machine
            with GPUs also nccl.
        checkpoints: the folder for `Job.save` and `Job.load`. With Ray Train this folder is in
            Ray's storage.
        process_group: False makes no process group. `start` only sets the variables that
            `init_process_group` reads (RANK, WORLD_SIZE, MASTER_ADDR, ...), for a script that
            calls it.
        stop_file: a file. If it appears, this process is asked to stop. By default the file that
            the variable MANYHANDS_STOP_FILE names.
        signals: the signals that ask this process to stop. By default the engine's: SIGTERM, with
            Slurm also SIGUSR1, and with submitit also SIGUSR2.
    """
    folder = to_path(checkpoints)
    listener.start(signals, None if stop_file is None else os.fspath(stop_file))
    if _ray.is_ray_worker():
        place = Place("ray", *_ray.place_of_ray())
        if _ray.notice_of_ray not in stop_notice.sources:
            stop_notice.sources.append(_ray.notice_of_ray)
    elif dist.is_initialized():
        engine = find_place(os.environ).engine
        rank = dist.get_rank()
        size = dist.get_world_size()
        local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        place = Place(engine, rank, size, *local)
    else:
        place = find_place(os.environ)
    if place.world_size > 1 and dry_group() is None:
        for name, value in place.variables().items():
            os.environ.setdefault(name, value)  # torchrun's own values stay
    if process_group and not dist.is_initialized():
        _make_process_group(place, backend)
    if dist.is_initialized() and dist.get_world_size() > 1:
        presence.begin()
    return Job(place, folder)


def _make_process_group(place: Place, backend: str | None) -> None:
    """Make torch's default group for this job, and end it as Python ends."""
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if place.world_size == 1:  # needs no port, and no other process can reach it
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size)
    atexit.register(_end_process_group, dist.group.WORLD)


def _end_process_group(made: object) -> None:
    """At Python's end: destroy the group that `mh.start` made, unless the script has failed."""
    # After an error the other ranks may hang in a collective: ending the group would wait for them.
    failed = getattr(sys, "last_value", None) is not None
    if not failed and dist.is_initialized() and dist.group.WORLD is made:
        dist.destroy_process_group()


def optimizers_of(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


class Job:
    """This process and its run, as the engine has started them. `start` returns it.

    >>> import manyhands as mh
    >>> job = mh.start(process_group=False)
    >>> job.worker, job.workers, job.crew
    (0, 1, None)
    """

    def __init__(self, place: Place, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self.engine = place.engine
        """What has started this process: "torchrun", "manyhands", "ray", "slurm", "submitit",
        "mpi", "kubeflow", "none", or "variables" if nothing but RANK and WORLD_SIZE is known."""
        self.rank = place.rank
        """This process's rank among those that train one model together."""
        self.world_size = place.world_size
        """The number of processes that train one model together."""
        self.local_rank = place.local_rank
        """The rank among the processes of this host: the number of its GPU."""
        self.local_world_size = place.local_world_size
        """The number of processes of the run on this host."""
        # Read here, so that a wrong value is an error at the start and not at the end.
        self._stop_code = number_in(os.environ, STOP_CODE_VARIABLE, int, 0)

    def __repr__(self) -> str:
        # Not `crew` and `folder`, which connect to the engine.
        return (
            f"Job(engine={self.engine!r}, rank={self.rank}, world_size={self.world_size}, "
            f"checkpoints={str(self._checkpoints)!r})"
        )

    @cached_property
    def crew(self) -> Crew | None:
        """The crew that this worker belongs to, for blocks, if there is a store (MANYHANDS_STORE).

        `manyhands run` serves one. None if the ranks are fixed.
        """
        if not os.environ.get("MANYHANDS_STORE"):
            return None
        inner = dist.group.WORLD if self.world_size > 1 else None
        return Crew(number=find_worker_number(os.environ), inner_group=inner)

    @property
    def worker(self) -> int:
        """This worker's number: in the crew if there is one, and otherwise its rank."""
        return self.rank if self.crew is None else self.crew.number

    @property
    def workers(self) -> int:
        """The number of expected workers: those of the crew if there is one, or else all ranks."""
        return self.world_size if self.crew is None else self.crew.expected

    # -- checkpoints -----------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """Where checkpoints are saved. With Ray Train it is in Ray's storage."""
        if self.engine == "ray" and not self._checkpoints.is_absolute():
            return _ray.folder_in_storage(str(self._checkpoints))
        return self._checkpoints

    def save(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: HasState | Sequence[HasState] | None = None,
        step: int | None = None,
        keep: int | None = 2,
        **values: Any,
    ) -> Path | None:
        """Save a checkpoint as `mh.save` does, where the engine wants it. Call it on every rank.

        >>> import torch, manyhands as mh
        >>> job = mh.start(process_group=False)
        >>> model = torch.nn.Linear(2, 1)
        >>> job.save(model=model, step=3).name
        '000001-step-3'
        >>> job.load(model=model)
        {'step': 3}

        Return the checkpoint's folder. Blocks are synchronized first; a crew's worker that was
        asked to stop leaves its crew. In a crew all workers have the same anchor, so only one
        worker saves, and the others return None: the worker with the lowest number, unless it has
        just joined. With Ray Train the checkpoint is written into Ray's storage and reported to
        Ray, which deletes old ones: then `keep` has no effect.
        """
        optimizers = optimizers_of(optimizer)
        self._claim_folder()
        # Asked before it leaves the crew. Not the lowest rank: that may be a joiner, which has come
        # with the round before this save, and does not call it.
        saves = self.crew is None or self.crew.rank == self.crew.source
        for each in optimizers:
            blocks = find_layer(each, Blocks)
            if blocks is not None and self.crew is None:
                blocks.synchronize()
            elif blocks is not None and stop_notice.received:
                blocks.finish()
        if not saves:
            return None
        # Ray waits until all workers have reported a checkpoint. In a crew one of them has it.
        ray = self.engine == "ray" and self.crew is None
        saving = save_checkpoint(
            self.folder,
            model=model,
            optimizer=optimizers,
            scheduler=scheduler,
            step=step,
            keep=None if ray else keep,
            **values,
        )
        if ray:
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
            _ray.report_checkpoint(saving.path, {"step": step, **numbers})
        return saving.path

    def load(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: HasState | Sequence[HasState] | None = None,
        **values: Any,
    ) -> dict[str, Any]:
        """Continue from the newest checkpoint, as `mh.load` does; return {} if there is none.

        Call it on every worker of a crew. A worker that has joined a crew that trains already keeps
        what it has received from the others: see `load`.
        """
        self._claim_folder()
        try:
            return load_checkpoint(
                self.folder, model=model, optimizer=optimizer, scheduler=scheduler, **values
            )
        except FileNotFoundError:
            return {}

    def _claim_folder(self) -> None:
        """Raise if another run saves here. No other run may, as long as this crew trains."""
        run = None if self.crew is None else os.environ.get(RUN_VARIABLE) or self.crew.run
        if not run:  # a worker alone, or one that has not joined yet
            return
        with contextlib.suppress(OSError):  # it cannot write here, and so takes nothing from others
            folder_at(self.folder).lock(run)

    # -- the end ---------------------------------------------------------------------------------

    def leave(self) -> NoReturn:
        """End this process, after a stop notice, as its engine expects.

        The exit code is 0, or that of the variable MANYHANDS_STOP_CODE, which is for engines that
        take 0 for the end of the run and start a failed process again. With torchrun the exit code
        is 75 on a rank whose own agent has sent no notice: another host leaves the run, and this
        rank's agent starts it again, without that host.
        With submitit the job is put into the queue again. With Ray Train `leave` waits for Ray,
        which ends this process at the deadline, and starts the run again on the other nodes.
        """
        if self.engine == "ray":
            _ray.wait_for_the_end()
        if self.engine == "torchrun" and self.world_size > 1:
            # Agents signal their ranks one after the other. A rank that ends with 0 before its
            # agent does so has finished the training, as the agent sees it.
            deadline = time.monotonic() + OWN_NOTICE
            while not stop_notice.received and time.monotonic() < deadline:
                time.sleep(0.05)
        code = self._stop_code
        if self.engine == "torchrun" and not stop_notice.received:
            code = RESTART
        if dist.is_initialized():
            dist.destroy_process_group()
        listener.call_earlier_handler()
        sys.exit(code)
