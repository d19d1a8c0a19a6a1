"""Drivers of Ray, each with a Ray of its own.

Two Rays that start on one machine share two files, and this has let tests fail that run side by
side. `ray.cluster_utils.Cluster` and `ray start` write their address to /tmp/ray: `ray.init()` then
joins that cluster, and `ray.init(num_cpus=...)` is an error. The first Ray of a user writes a token
to ~/.ray/auth_token: if two do so, one of them has the wrong token. So each driver here has a
folder and a token of its own.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helpers.pages import ROOT

TIMEOUT = 900  # seconds for one driver, on a busy machine


@contextlib.contextmanager
def variables_of_ray() -> Iterator[dict[str, str]]:
    """The environment variables of a driver, without those of a Ray that is there."""
    others = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    # A short path: Ray adds 70 characters, and the path of a socket may have 107.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    try:
        yield {
            **others,
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray Train may count a drained node for 20 s more, and waits for its resources so long.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
            # Other processes of a busy machine may take its memory.
            "RAY_memory_monitor_refresh_ms": "0",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a process of Ray's may still write there


def run_driver(script: Path, *arguments: object, folder: Path | None = None, **more: str) -> str:
    """Run a driver to its end, and return what it has printed."""
    with variables_of_ray() as variables, tempfile.TemporaryFile() as output:

        def said() -> str:
            output.seek(0)
            return output.read().decode(errors="replace")

        driver = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={**variables, **more},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = driver.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            driver.kill()  # its Ray ends with it
            driver.wait()
            raise AssertionError(f"still runs after {TIMEOUT} s:\n{said()[-6_000:]}") from None
        assert code == 0, said()[-6_000:]
        return said()
