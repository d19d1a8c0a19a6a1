"""Drivers of Ray, each with a Ray of its own.

A Ray finds another one of the same machine by a file in its folder, which
`ray.cluster_utils.Cluster` and `ray start` write: `ray.init()` then joins that cluster, and
`ray.init(num_cpus=...)` is an error. So each driver has a folder of its own.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helpers.pages import ROOT

TIMEOUT = 400  # seconds for one driver


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
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # On a busy machine processes start late, and others may take its memory.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
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
            raise AssertionError(f"still runs after {TIMEOUT} s:\n{said()[-20_000:]}") from None
        assert code == 0, said()[-20_000:]
        return said()
