"""Coverage of the ranks of a checked script, which are killed as soon as they have recorded all."""

import os
import time
from contextlib import suppress

import pytest


@pytest.fixture(autouse=True)
def ranks_end_by_themselves(monkeypatch):
    """Kill a rank later, if coverage is measured: it writes what it has when it ends."""
    coverage = pytest.importorskip("coverage", reason="coverage is missing")
    kill = os.killpg

    def wait_and_kill(process, number):
        until, flags = time.monotonic() + 1.0, os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # it ended before, and was waited for
            while not os.waitid(os.P_PID, process, flags) and time.monotonic() < until:
                time.sleep(0.01)
        kill(process, number)

    if coverage.Coverage.current() is not None:
        monkeypatch.setattr(os, "killpg", wait_and_kill)
