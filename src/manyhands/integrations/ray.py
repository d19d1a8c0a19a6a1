"""Host a crew's store in an actor of Ray, and save before Ray Train changes the number of workers.

A training function needs neither: `mh.start` finds Ray by itself (`engines/_ray.py`). These two are
for the driver, the script that starts the training:

    CrewStore           hosts the store of a crew in an actor, and gives each task (or actor) of Ray
                        the environment variables of a worker
    SaveBeforeResize    Ray Train ends all workers to start another number of them. This callback
                        lets the workers save first, so that no step is taken twice
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from manyhands._arguments import real, whole
from manyhands._ranks.stop_notice import stop_notice
from manyhands.blocks.crew._store import SECRET_VARIABLE, serve_store
from manyhands.engines import _ray

__all__ = ["CrewStore", "SaveBeforeResize"]

logger = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks at workers that save


class CrewStore:
    """The store of a crew, in an actor of Ray's: tasks and actors of Ray become its workers.

    `workers` is the number of workers that are expected at the start.

    >>> import ray, torch, manyhands as mh
    >>> from manyhands.integrations.ray import CrewStore
    >>> def train(steps):
    ...     job = mh.start()
    ...     model = torch.nn.Linear(2, 1)
    ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     optimizer = mh.DiLoCo(sgd, every=5, crew=job.crew)
    ...     while optimizer.steps < steps:
    ...         model(torch.randn(8, 2)).square().mean().backward()
    ...         optimizer.step()
    ...     optimizer.finish()
    ...     return job.worker, job.workers
    >>> context = ray.init("local", num_cpus=2, include_dashboard=False)
    >>> store = CrewStore(workers=2)
    >>> task = ray.remote(max_retries=-1)(train)
    >>> ray.get([task.options(**store.options(number)).remote(20) for number in range(2)])
    [(0, 2), (1, 2)]
    >>> ray.shutdown()

    Ray starts a task again if its process or its node has died. The task comes back as a worker
    with the same number, and receives the state from the others, which have gone on meanwhile.

    The store ends with this object, with the driver, and with the node that hosts the store: keep
    all of them until the workers have ended. MANYHANDS_STALL, MANYHANDS_PATIENCE,
    MANYHANDS_QUORUM and MANYHANDS_SECRET are passed on from the driver's environment. Without the
    last, the run has a random secret, which every process that reaches Ray can read.
    """

    def __init__(self, workers: int) -> None:
        self.workers = whole("workers", workers, 1)
        # The store waits in threads of its own, and takes hardly any of a CPU.
        self._actor = ray.remote(num_cpus=0)(_Store).remote()
        self.address: str = ray.get(self._actor.address.remote())
        self._variables = {
            "MANYHANDS_STORE": self.address,
            "MANYHANDS_WORKERS": str(self.workers),
            "MANYHANDS_RUN": secrets.token_hex(8),
            SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(),
        }

    def variables(self, number: int) -> dict[str, str]:
        """Return the environment variables of the worker with this number."""
        passed_on = {
            name: os.environ[name]
            for name in ("MANYHANDS_STALL", "MANYHANDS_PATIENCE", "MANYHANDS_QUORUM")
            if name in os.environ
        }
        return {**passed_on, **self._variables, "MANYHANDS_WORKER": str(whole("number", number))}

    def options(self, number: int) -> dict[str, Any]:
        """Return what `.options()` of a task or an actor needs to be this worker."""
        return {"runtime_env": {"env_vars": self.variables(number)}}


class _Store:
    """An actor that hosts a store on its node."""

    def __init__(self) -> None:
        self._store, self._address = serve_store(ray.util.get_node_ip_address())

    def address(self) -> str:
        """Return the store's "host:port"."""
        return self._address


class SaveBeforeResize(WorkerGroupCallback, ControllerCallback):
    """Let the workers save before Ray Train gives a run another number of them.

    >>> from manyhands.integrations.ray import SaveBeforeResize
    >>> from ray.train import RunConfig
    >>> run = RunConfig(callbacks=[SaveBeforeResize(seconds=60)])

    With `ScalingConfig(num_workers=(1, 4))`, Ray ends all workers without a notice when the cluster
    has grown, and calls the training function again in more workers. The steps since the last
    checkpoint are then repeated. With this callback, `mh.stopping` becomes True first, and Ray
    waits until all workers are in `job.leave`, but no longer than `seconds`.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = real("seconds", seconds, above=0)
        self._workers: Any = None  # the worker group, while there is one

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Note the workers. Ray calls it."""
        self._workers = worker_group

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Forget the workers. Ray calls it."""
        self._workers = None

    def after_worker_group_abort(self, worker_group_context: Any) -> None:
        """Forget the workers. Ray calls it."""
        self._workers = None

    # Not `before_worker_group_shutdown`: Ray takes no more reports of checkpoints by then.
    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Ask all workers to stop, and wait until they have saved. Ray calls it."""
        if self._workers is None:
            return  # the run begins
        status = self._workers.get_latest_poll_status()
        if status is None or status.errors or status.finished:
            return  # a worker has failed, and without it the others cannot save
        try:
            problem = self._wait_for_saves()
        except RayError as error:  # Ray ends the run if a callback raises
            problem = f"a worker was lost while it was asked to stop ({error})"
        if problem:
            logger.warning(
                "SaveBeforeResize: %s. The steps since the last checkpoint are repeated.", problem
            )

    def _wait_for_saves(self) -> str:
        """Wait until all workers have saved; return what went wrong, or "" if nothing did."""
        self._workers.execute(_give_notice, self.seconds)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            have_left = all(self._workers.execute(_ray.has_left))
            # A poll also gives Ray the checkpoints that the workers have reported.
            status = self._workers.poll_status(timeout=self.seconds)
            if status.errors:
                return f"a worker failed while it was asked to stop ({status.get_error_string()})"
            statuses = status.worker_statuses.values()
            if status.finished or (have_left and not any(s.training_report for s in statuses)):
                return ""
            time.sleep(POLL)
        return (
            f"the workers have not left within {self.seconds:g} s. Let the training function call "
            "mh.stopping in each step, and job.save and job.leave if it returns True, or give "
            "SaveBeforeResize(seconds=...) more time"
        )


def _give_notice(seconds: float) -> None:
    """In a worker: ask it to stop."""
    stop_notice.grace = seconds
    stop_notice.give("Ray changes the number of workers")
