"""A crew, watched: a worker that is killed, its successor, and what the others record of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from manyhands.watch import Jobs

pytestmark = pytest.mark.long

SCRIPT = """
import time
import torch
import manyhands as mh

crew = mh.Crew()
torch.manual_seed(crew.number)
model = torch.nn.Linear(4, 1)
optimizer = mh.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.01), every=10, crew=crew)
with mh.Record(f"runs/worker{crew.number}.jsonl", optimizer) as record:
    while True:
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step(loss=loss)
        time.sleep(0.01)
"""


def test_a_worker_that_is_killed_and_comes_back_is_seen(tmp_path):
    pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "runs").mkdir()
    code = "from manyhands.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "--workers", "2", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as launcher:
        try:
            watch(Jobs([tmp_path / "runs"]))
        finally:
            launcher.send_signal(signal.SIGTERM)


def watch(jobs):
    until = time.monotonic() + 120

    def wait(what):
        seen = {}
        while time.monotonic() < until:
            states = [job.state() for job in jobs.read()]
            seen = {state.path[-7]: state for state in states}  # by the worker's number
            if what(seen):
                return seen
            time.sleep(0.02)
        raise AssertionError(f"waited in vain: {seen}")

    seen = wait(lambda seen: len(seen) == 2 and all(one.rounds for one in seen.values()))
    assert [seen[number].members for number in "01"] == ["0 1", "0 1"]
    assert {state.state for state in seen.values()} == {"running"}
    os.kill(int(seen["1"].process.rpartition(" ")[2]), signal.SIGKILL)
    seen = wait(lambda seen: seen["1"].state == "died")
    assert seen["0"].state == "running"
    seen = wait(lambda seen: seen["1"].state == "running" and seen["1"].starts == 2)
    seen = wait(lambda seen: [seen[number].members for number in "01"] == ["0 1", "0 1"])
    texts = [event.text for event in seen["0"].events]
    assert "workers: 2 → 1 (0)" in texts and "workers: 1 → 2 (0 1)" in texts
    assert any(event.text.startswith("started again") for event in seen["1"].events)
