"""A crew's store in a Ray actor, and a save before Ray Train changes the number of workers.

The driver, which starts the training, uses these classes. A training function calls only
`mh.start`, which detects Ray (`engines/_ray.py`).

    CrewStore           hosts the store of a crew in an actor, and provides the environment
                        variables of each worker, a task or actor of Ray
    SaveBeforeResize    asks the workers to save before Ray Train ends them to change their number,
                        so that no steps are repeated
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

POLL = 0.2  # seconds between checks of saving workers


class CrewStore:
    """The store of a crew in a Ray actor. Tasks and actors of Ray become workers of the crew.

    `workers` is the number of workers at the start.

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

    Ray restarts a task if the process or the node has died. The restarted worker has its old number
    and receives the current state from the crew, which has continued meanwhile.

    The store ends with this object, with the driver and with the hosting node, which must outlive
    the workers. Workers receive MANYHANDS_STALL, MANYHANDS_PATIENCE, MANYHANDS_QUORUM and
    MANYHANDS_SECRET from the driver's environment. Without MANYHANDS_SECRET, the run has a random
    secret, which every process with access to Ray can read.
    """

    def __init__(self, workers: int) -> None:
        self.workers = whole("workers", workers, 1)
        # The store uses almost no processor time.
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
        """Return the arguments for `.options()` of the task or actor of this worker."""
        return {"runtime_env": {"env_vars": self.variables(number)}}


class _Store:
    def __init__(self) -> None:
        self._store, self._address = serve_store(ray.util.get_node_ip_address())

    def address(self) -> str:
        """Return the address of the store as "host:port"."""
        return self._address


class SaveBeforeResize(WorkerGroupCallback, ControllerCallback):
    """Ask the workers to save before Ray Train changes their number.

    >>> from manyhands.integrations.ray import SaveBeforeResize
    >>> from ray.train import RunConfig
    >>> run = RunConfig(callbacks=[SaveBeforeResize(seconds=60)])

    With `ScalingConfig(num_workers=(1, 4))`, Ray ends all workers without notice when the cluster
    has grown, and calls the training function in more workers, which repeat the steps since the
    last checkpoint. With this callback, `mh.stopping` first returns True, and Ray waits up to
    `seconds` until all workers have called `job.leave`.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = real("seconds", seconds, above=0)
        self._workers: Any = None  # the worker group, while there is one

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Store the worker group. Called by Ray."""
        self._workers = worker_group

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Remove the worker group. Called by Ray."""
        self._workers = None

    after_worker_group_abort = after_worker_group_shutdown

    # In `before_worker_group_shutdown`, Ray no longer accepts reports of checkpoints.
    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Ask all workers to stop, and wait until they have saved. Called by Ray."""
        if self._workers is None:
            return  # start of the run
        status = self._workers.get_latest_poll_status()
        if status is None or status.errors or status.finished:
            return  # the remaining workers cannot save without a failed worker
        try:
            problem = self._wait_for_saves()
        except RayError as error:  # raising it would end the run
            problem = f"a worker was lost before it saved ({error})"
        if problem:
            logger.warning(
                "SaveBeforeResize: %s. Ray repeats the steps since the last checkpoint.", problem
            )

    def _wait_for_saves(self) -> str:
        """Wait until all workers have saved. Return the problem, or an empty text."""
        self._workers.execute(_give_notice, self.seconds)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            have_left = all(self._workers.execute(_ray.has_left))
            # A poll also passes reported checkpoints to Ray.
            status = self._workers.poll_status(timeout=self.seconds)
            if status.errors:
                return f"a worker failed before it saved ({status.get_error_string()})"
            statuses = status.worker_statuses.values()
            if status.finished or (have_left and not any(s.training_report for s in statuses)):
                return ""
            time.sleep(POLL)
        return (
            f"the workers have not left within {self.seconds:g} s. Call mh.stopping in every step "
            "of the training function, and job.save and job.leave after it returns True; or "
            "increase SaveBeforeResize(seconds=...)"
        )


def _give_notice(seconds: float) -> None:
    stop_notice.grace = seconds
    stop_notice.give("Ray changes the number of workers")
