"""Host a crew's store in a Ray actor.

The driver, which starts the training, uses `CrewStore`. A training function calls only `mh.start`,
which detects Ray (`engines/_ray.py`).
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import ray

from manyhands._arguments import whole
from manyhands.blocks.crew._store import SECRET_VARIABLE, serve_store

__all__ = ["CrewStore"]


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
