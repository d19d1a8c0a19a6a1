"""The Slurm scripts, with stand-ins for `srun` and `scontrol` that do what Slurm's do."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from helpers.pages import ROOT

SRUN = """#!{python}
# A step of two tasks. A file "now" makes it send SIGUSR1, as Slurm does when time is up.
import os, pathlib, signal, subprocess, sys, time
command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
tasks = []
for rank in range(2):
    variables = {{
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": 0,
    }}
    variables = {{name: str(value) for name, value in variables.items()}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **variables}}))
while any(task.poll() is None for task in tasks):
    if pathlib.Path("now").exists():
        os.unlink("now")
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
sys.exit(max(task.returncode for task in tasks))
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder with the example, and commands of Slurm's that come first in PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": '#!/bin/sh\necho "$@" >> requeued\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "hostname": "#!/bin/sh\necho 127.0.0.1\n",
    }.items():
        path = commands / name
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "train.py").write_text((ROOT / "examples" / "engines" / "train.py").read_text())
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def script(name, steps, folder):
    text = (ROOT / "examples" / "engines" / name).read_text()
    changed = text.replace("--steps 100000", f"--steps {steps} --losses losses --pause 0.05")
    assert changed != text
    port = 20000 + os.getpid() % 9000
    (folder / name).write_text(changed.replace("29400", str(port)))
    return ["bash", name]


@pytest.mark.long
def test_before_the_time_is_up_the_job_saves_and_is_queued_again(slurm):
    with (slurm / "out").open("w") as out:
        job = subprocess.Popen(
            script("slurm.sh", 400, slurm), cwd=slurm, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + 90
        while not (slurm / "losses.0").exists():
            assert time.monotonic() < until and job.poll() is None, (slurm / "out").read_text()
            time.sleep(0.05)
        (slurm / "now").touch()
        assert job.wait(90) == 75, (slurm / "out").read_text()
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
    assert (slurm / "requeued").read_text() == "requeue 4711\n"
    saved = re.findall(r"was asked to stop, and has saved step (\d+)", (slurm / "out").read_text())
    assert len(saved) == 2 and len(set(saved)) == 1
    done = subprocess.run(
        script("slurm.sh", int(saved[0]) + 3, slurm), cwd=slurm, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank 0 of 2 (slurm) begins with step {saved[0]}" in done.stdout
    assert (slurm / "requeued").read_text() == "requeue 4711\n"


@pytest.mark.long
def test_a_crew_whose_store_the_batch_script_serves(slurm):
    done = subprocess.run(
        script("slurm_crew.sh", 20, slurm), cwd=slurm, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(manyhands) begins with step 0") == 2
    assert "after 20 steps" in done.stdout
