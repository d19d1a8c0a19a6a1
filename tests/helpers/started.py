"""Commands that run beside a test, and what they say."""

import os
import re
import signal
import subprocess
import sys
import time

from helpers.pages import ROOT


class Started:
    """A Python command in a process group of its own, and what it has printed.

    `on` are the words before it that start it on a host, such as `Networks.command` returns.
    """

    def __init__(self, command, folder, name="out", *, on=(), **variables):
        self.path = folder / f"{name}.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **variables,
        }
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                [*on, sys.executable, *map(str, command)],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def said(self):
        return self.path.read_text()

    def until(self, pattern, times=1, timeout=90):
        limit = time.monotonic() + timeout
        while len(found := re.findall(pattern, self.said())) < times:
            assert time.monotonic() < limit, f"waited for {pattern!r}:\n{self.said()}"
            assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.said()}"
            time.sleep(0.05)
        return found

    def until_ended(self, pattern, times):
        found = re.findall(pattern, self.said())
        assert len(found) == times, self.said()
        return found

    def wait(self, timeout=90):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs:\n{self.said()}") from None


def torchrun(*options):
    return ["-m", "torch.distributed.run", *options]
