"""submitit's local executor: two tasks that are ranks of one run, stopped and queued again."""

import json
import pathlib
import shutil
import signal
import sys
import time

import pytest

from helpers.pages import blocks, launch, write_file

submitit = pytest.importorskip("submitit", reason="submitit is missing: pip install submitit")

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "engines" / "train.py"


class Train:
    """What a task does; `checkpoint` is called by submitit before it queues the job again."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __call__(self):
        import runpy

        sys.argv = ["train.py", *map(str, self.arguments)]
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return "done"

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)


@pytest.fixture
def executor(tmp_path, monkeypatch):
    # Tasks unpickle `Train`, so they import this file, and `helpers` with it.
    folders = [ROOT / "src", ROOT / "tests", pathlib.Path(__file__).parent]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, folders)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = submitit.LocalExecutor(folder=tmp_path / "log")
    made.update_parameters(tasks_per_node=2, timeout_min=10, signal_delay_s=5)
    return made


def losses(folder, name):
    lines = (folder / f"{name}.0").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_two_tasks_train_and_go_on_after_a_preemption(executor, tmp_path):
    options = ["--steps", 60, "--checkpoints", tmp_path / "run", "--losses", tmp_path / "stopped"]
    job = executor.submit(Train(*options, "--pause", 0.2))
    until = time.monotonic() + 120
    while not (tmp_path / "stopped.0").exists():
        assert time.monotonic() < until and not job.done(), job.stderr()
        time.sleep(0.1)
    for pid in tasks_of(job):  # submitit's own preemption signal, as Slurm sends it to each task
        pid.send_signal(signal.SIGUSR2)
    # submitit's handler is called after the save; its executor then starts the tasks again.
    assert job.results() == ["done", "done"]
    said = job.stdout()
    assert "was asked to stop, and has saved step" in said
    assert "Caught signal SIGUSR2" in said + job.stderr()
    assert "begins with step 0" in said
    assert said.count("rank 0 of 2 (submitit) begins") == 2
    taken = losses(tmp_path, "stopped")
    assert [step for step, _ in taken] == list(range(1, 61))

    whole = tmp_path / "whole"
    options = ["--steps", 60, "--checkpoints", tmp_path / "other", "--losses", whole]
    assert executor.submit(Train(*options)).results() == ["done", "done"]
    assert losses(tmp_path, "stopped") == losses(tmp_path, "whole")  # bit for bit


def test_the_pages_script_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    page = ROOT / "docs" / "engines" / "manifests.md"
    (block,) = [b for b in blocks(page) if b.title == "submit.py"]
    write_file(block, tmp_path)
    shutil.copy(SCRIPT, tmp_path)
    done = launch([sys.executable, "submit.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 (submitit) begins with step 0" in done.stdout
    assert "after 60 steps" in done.stdout


def tasks_of(job):
    psutil = pytest.importorskip("psutil", reason="psutil is missing: pip install psutil")
    return psutil.Process(job._process.pid).children()
