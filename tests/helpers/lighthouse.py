"""torchft's lighthouse for tests."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import torch

from helpers.crew_workers import fork


class Lighthouse:
    """A lighthouse in a process of its own.

    Its threads would hold locks while a test forks workers, which would then wait for them for
    ever: so no process that forks workers may host it.
    """

    def __init__(self, least: int, beat: float = 5.0) -> None:
        self.least = least
        self.beat = beat  # seconds without a heartbeat until a worker counts as dead

    def __enter__(self) -> Lighthouse:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchft's own
            import torchft.coordination  # noqa: F401 - the forks have it
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # and what this imports
        read, write = os.pipe()

        def host() -> None:
            from torchft.coordination import LighthouseServer

            server = LighthouseServer(
                bind="127.0.0.1:0",
                min_replicas=self.least,
                join_timeout_ms=10_000,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=int(1000 * self.beat),
            )
            port = server.address().rpartition(":")[2]
            os.write(write, f"http://127.0.0.1:{port}".encode())
            time.sleep(1000)

        self.pid = fork(host, Path(os.devnull))
        os.close(write)
        self.address = os.read(read, 100).decode()
        os.close(read)
        assert self.address
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
