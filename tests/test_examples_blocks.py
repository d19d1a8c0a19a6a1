"""examples/blocks.py, shortened, as the README says to try it: one of the workers is killed."""

import os
import re
import signal
import subprocess
import sys

import pytest

from helpers.pages import ROOT, in_forks, needs_sklearn

pytestmark = needs_sklearn
pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')

SCRIPT = str(ROOT / "examples" / "blocks.py")
PROGRAM = "from manyhands.tools.cli import main; main()"


@pytest.mark.long
def test_a_killed_worker_is_done_without_and_comes_back(tmp_path):
    for pause in ("0.01", "0.04"):  # a slow machine starts a worker again in 10 s or more
        text = run_and_kill(tmp_path, pause)
        assert "worker 1 ended (SIGKILL) and is started again" in text
        assert "Traceback" not in text
        assert float(re.search(r"([\d.]+) % of the test images", text)[1]) > 90, text
        if re.search(r"worker 1 of 2: process \d+, from step [1-9]\d*", text):
            return
    pytest.fail(text)


def run_and_kill(folder, pause):
    """Return what two workers print; the second is killed after their first sync round."""
    command = [sys.executable, "-c", PROGRAM, "run", "--workers", "2", SCRIPT]
    command += ["--steps", "1200", "--every", "20", "--pause", pause]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said, killed = [], False
        for line in process.stdout:
            said.append(line)
            found = re.search(r"worker 1 of 2: process (\d+), from step 0", line)
            if found:
                victim = int(found[1])
            if not killed and re.search(r"step \d+: 2 workers", line):
                os.kill(victim, signal.SIGKILL)
                killed = True
        assert process.wait(60) == 0 and killed, "".join(said)
    return "".join(said)


def test_one_worker_by_itself():
    code, output = in_forks(None, SCRIPT, "--steps", "300", "--pause", "0")
    assert code == 0 and "worker 0 of 1" in output, output
    assert float(re.search(r"([\d.]+) % of the test images", output)[1]) > 80
