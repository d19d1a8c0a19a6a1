"""Join the run of an engine (`mh.start`), then save, load and leave (`Job`)."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
from manyhands.checkpoint import _as_list, folder_at
from manyhands.checkpoint import load as load_checkpoint
from manyhands.checkpoint import save as save_checkpoint
from manyhands.checkpoint._folder import RUN_VARIABLE, to_path
from manyhands.checkpoint._values import HasState, RunObjects
from manyhands.engines import _ray
from manyhands.engines._places import Place, find_place, find_worker_number
from manyhands.engines._stopping import listener

if TYPE_CHECKING:
    from manyhands.engines.survive._steps import SurvivingRun

RESTART = 75  # EX_TEMPFAIL: torchrun's agent restarts the process
STOP_CODE_VARIABLE = "MANYHANDS_STOP_CODE"  # the exit code after a stop notice; default 0
OWN_NOTICE = 10.0  # seconds to wait for this rank's agent after another rank's notice


def start(
    backend: str | None = None,
    *,
    checkpoints: str | os.PathLike[str] = "run",
    process_group: bool = True,
    survive: bool = False,
) -> Job:
    """Join the other ranks of this run under any engine, and return the job.

    Environment variables determine the engine: torchrun, `manyhands run`, Ray Train, Slurm,
    submitit, mpirun, Kubeflow. Without an engine this process is the only rank, so the script also
    runs with `python train.py`. An existing process group is used unchanged.

    >>> import torch, manyhands as mh
    >>> job = mh.start()
    >>> job.engine, job.rank, job.world_size
    ('none', 0, 1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> torch.distributed.destroy_process_group()

    After this call the process listens for the engine's stop notice: see `stopping`. Under Slurm,
    SIGUSR1 is a notice in addition to SIGTERM, and under submitit SIGUSR2.

    Args:
        backend: as for `torch.distributed.init_process_group`. Default: gloo, and also nccl on a
            machine with GPUs.
        checkpoints: the folder for `Job.save` and `Job.load`. Under Ray Train, a relative path is
            in Ray's storage.
        process_group: False does not create a process group. `start` then only sets the variables
            that `init_process_group` reads (RANK, WORLD_SIZE, MASTER_ADDR, ...).
        survive: whether the other ranks continue if a rank is lost, without a restart. Each rank is
            a worker of `manyhands run`. `Job.load` joins the other ranks: see `Job.load`.
    """
    folder = to_path(checkpoints)
    listener.start()
    if survive and not process_group:
        raise ValueError("survive=True makes the process group. Remove process_group=False.")
    if survive:
        return _start_surviving(folder, backend)
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
            os.environ.setdefault(name, value)  # does not replace torchrun's values
    if process_group and not dist.is_initialized():
        _make_process_group(place, backend)
    if dist.is_initialized() and dist.get_world_size() > 1:
        presence.begin()
    return Job(place, folder)


def _start_surviving(folder: Path, backend: str | None) -> Job:
    # Imported here, because other runs do not need these modules.
    from manyhands.engines.survive._group import check_torch
    from manyhands.engines.survive._start import start_alone

    check_torch()
    place = find_place(os.environ)
    if place.world_size > 1 and os.environ.get("MANYHANDS_STORE"):
        raise ValueError(
            "survive=True needs workers with a single process, got workers with "
            f"{place.world_size}. Replace --processes by --workers."
        )
    if place.world_size > 1:
        raise RuntimeError(
            "survive=True needs a store that outlives the ranks, but this run was started by "
            f"{place.engine}. Start the script with `manyhands run --workers {place.world_size}`, "
            "or set MANYHANDS_STORE, MANYHANDS_SECRET and MANYHANDS_WORKER in each process."
        )
    crew = Crew()
    start_alone(crew, backend or _default_backend())
    job = Job(Place(place.engine, crew.number, crew.expected), folder)
    job.crew = crew
    job._survives = True
    return job


def _default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _make_process_group(place: Place, backend: str | None) -> None:
    """Create torch's default group, and destroy it when Python exits."""
    backend = backend or _default_backend()
    # Without device_id, which would split NCCL's communicator for each new group: then all ranks
    # must call new_group, and groups with use_local_synchronization would hang.
    if place.world_size == 1:  # needs no port
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size)
    atexit.register(_end_process_group, dist.group.WORLD)


def _end_process_group(made: object) -> None:
    """Destroy the group when Python exits, unless the script failed."""
    # After an error, destroying the group could wait for ranks in a collective.
    failed = getattr(sys, "last_value", None) is not None
    if not failed and dist.is_initialized() and dist.group.WORLD is made:
        dist.destroy_process_group()


class Job:
    """This process in the run of an engine. Returned by `start`.

    >>> import manyhands as mh
    >>> job = mh.start(process_group=False)
    >>> job.worker, job.workers, job.crew
    (0, 1, None)
    """

    def __init__(self, place: Place, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._survives = False
        self._run: SurvivingRun | None = None  # set by `load` if this run survives lost ranks
        self.engine = place.engine
        """The engine: "torchrun", "manyhands", "ray", "slurm", "submitit", "mpi", "kubeflow",
        "none", or "variables" if only torch's variables such as RANK are set."""
        self.rank = place.rank
        """The rank of this process among the processes that train a model together. With
        `survive=True`, the number of this worker."""
        self.world_size = place.world_size
        """The number of processes that train a model together. With `survive=True`, the expected
        number."""
        self.local_rank = place.local_rank
        """The rank among the processes of this host, which selects the GPU."""
        self.local_world_size = place.local_world_size
        """The number of processes of the run on this host."""
        # A wrong value raises at the start, not at the end.
        self._stop_code = number_in(os.environ, STOP_CODE_VARIABLE, int, 0)

    def __repr__(self) -> str:
        # Without `crew` and `folder`, which connect to the engine.
        return (
            f"Job(engine={self.engine!r}, rank={self.rank}, world_size={self.world_size}, "
            f"checkpoints={str(self._checkpoints)!r})"
        )

    @cached_property
    def crew(self) -> Crew | None:
        """The crew of this worker, for blocks, if MANYHANDS_STORE names a store; otherwise None.

        `manyhands run` serves a store. A run with a fixed number of ranks has no crew.
        """
        if not os.environ.get("MANYHANDS_STORE"):
            return None
        inner = dist.group.WORLD if self.world_size > 1 else None
        return Crew(number=find_worker_number(os.environ), inner_group=inner)

    @property
    def worker(self) -> int:
        """The number of this worker in the crew. Without a crew: the rank."""
        return self.rank if self.crew is None else self.crew.number

    @property
    def workers(self) -> int:
        """The number of workers that the crew expects. Without a crew: the number of ranks."""
        return self.world_size if self.crew is None else self.crew.expected

    # -- checkpoints -----------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The folder of checkpoints. Under Ray Train, a relative path is in Ray's storage."""
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
        """Save a checkpoint as `mh.save` does, in the job's folder. Call it on every rank.

        >>> import torch, manyhands as mh
        >>> job = mh.start(process_group=False)
        >>> model = torch.nn.Linear(2, 1)
        >>> job.save(model=model, step=3).name
        '000001-step-3'
        >>> job.load(model=model)
        {'step': 3}

        Returns the checkpoint's folder. Blocks are synchronized first; in a crew, a worker with a
        stop notice leaves the crew instead. In a crew, a single worker saves (the lowest number,
        except workers that have just joined), and the other workers return None. Under Ray Train
        the checkpoint is written to Ray's storage and reported to Ray. Ray then deletes old
        checkpoints, and `keep` has no effect.
        """
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        self._claim_folder()
        if self._run is not None:
            self._run.restore()  # after a failed step
        # Read before this worker leaves the crew. A joiner of the last round does not call this
        # save.
        saves = self.crew is None or self.crew.rank == self.crew.source
        for each in optimizers:
            blocks = None if each is None else find_layer(each, Blocks)
            if blocks is not None and self.crew is None:
                blocks.synchronize()
            elif blocks is not None and stop_notice.received:
                blocks.finish()
        if not saves:
            return None
        # Ray waits for a report of all workers, but in a crew a single worker saves.
        ray = self.engine == "ray" and self.crew is None
        saving = save_checkpoint(
            self.folder,
            model=model,
            optimizer=optimizer,
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
        """Continue from the newest checkpoint, as `mh.load` does. Return {} if there is none.

        Call it on every worker of a crew. A worker that joins a running crew preserves the state
        received from the crew: see `load`.

        With `start(survive=True)`, this call joins the other ranks, with or without a checkpoint.
        Pass all objects with state, including the `Cursor`: ranks that join receive their state,
        and repeated steps restore it.
        """
        self._claim_folder()
        loaded = True
        found = {}
        try:
            found = load_checkpoint(
                self.folder, model=model, optimizer=optimizer, scheduler=scheduler, **values
            )
        except FileNotFoundError:
            loaded = False
        if self._survives:
            self._join(RunObjects(model, _as_list(optimizer), _as_list(scheduler), values), loaded)
        return found

    def _join(self, objects: RunObjects, loaded: bool) -> None:
        from manyhands.engines.survive._start import join_run

        if self._run is not None:
            raise RuntimeError("this rank has joined the run already. Call load() once.")
        assert self.crew is not None
        self._run = join_run(self.crew, objects, loaded=loaded)

    def _claim_folder(self) -> None:
        """Lock the folder for this crew's run, or raise."""
        run = None if self.crew is None else os.environ.get(RUN_VARIABLE) or self.crew.run
        if not run:  # no crew, or not joined yet
            return
        with contextlib.suppress(OSError):  # no permission to write, so no conflict
            folder_at(self.folder).lock(run)

    # -- the end ---------------------------------------------------------------------------------

    def leave(self) -> NoReturn:
        """End this process after a stop notice, as the engine expects.

        The exit code is 0, or MANYHANDS_STOP_CODE for engines that regard 0 as the end of the run
        and restart failed processes. Under torchrun, the exit code is 75 on a rank whose agent
        received no notice: a different host leaves the run, and the agent restarts this rank. Under
        submitit, the job returns to the queue. Under Ray Train, `leave` waits until Ray ends the
        process at the deadline; Ray then restarts the run on the remaining nodes.
        """
        if self.engine == "ray":
            _ray.wait_for_the_end()
        if self.engine == "torchrun" and self.world_size > 1:
            # An agent signals ranks in sequence. If a rank exits with 0 before, the agent regards
            # the training as finished.
            deadline = time.monotonic() + OWN_NOTICE
            while not stop_notice.received and time.monotonic() < deadline:
                time.sleep(0.05)
        code = self._stop_code
        if self.engine == "torchrun" and not stop_notice.received:
            code = RESTART
        if self._run is not None:
            self._run.leave()
        elif dist.is_initialized():
            dist.destroy_process_group()
        listener.call_earlier_handler()
        sys.exit(code)
