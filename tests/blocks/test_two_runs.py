"""Two runs of `manyhands run` in one folder: neither takes what is the other's."""

import os
import re
import signal
import socket
import time

import pytest

from helpers.forge import complete
from helpers.run_command import Command

pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')

SCRIPT = """
import os
import sys
import time

import torch

import manyhands as mh

torch.manual_seed(0)
job = mh.start(checkpoints="run")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = mh.LocalSGD(optimizer, every=5, crew=job.crew)
if sys.argv[2] == "checkpoints":
    found = job.load(model=model, optimizer=optimizer)
    print(f"begins with {found}, process {os.getpid()}", flush=True)
generator = torch.Generator().manual_seed(job.worker)
with mh.Record(f"runs/{sys.argv[2]}{job.worker}.jsonl", optimizer) as record:
    while optimizer.steps < int(sys.argv[1]) and not os.path.exists("end"):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        record.step()
        time.sleep(0.01)
        if optimizer.steps % 20 == 0 and sys.argv[2] == "checkpoints":
            optimizer.synchronize()
            path = job.save(model=model, optimizer=optimizer, step=optimizer.steps, keep=None)
            if path is not None:
                print(f"saved {path.name}, process {os.getpid()}", flush=True)
    optimizer.finish()
"""
LONG = 120.0  # seconds: on a busy machine the start of a process takes many
STEPS = 100_000  # more than there is time for: the file `end` ends a run


def run(folder, what, name, workers, *options):
    arguments = (str(STEPS), what)
    return Command(folder, SCRIPT, "--workers", workers, *options, arguments=arguments, name=name)


@pytest.mark.long
def test_a_second_run_takes_no_checkpoint_of_the_first_whose_worker_was_killed(tmp_path):
    with run(tmp_path, "checkpoints", "first", "2") as first:
        saver = int(first.until(r"saved \S+-step-40, process (\d+)", LONG)[1])
        os.kill(saver, signal.SIGKILL)
        with run(tmp_path, "checkpoints", "second", "1") as second:
            assert second.wait(LONG) == 1, second.said()
        assert "begins with" not in second.said()
        assert "saved" not in second.said()
        message = r"another job saves to run: process \d+ on .* Use a different path for each job"
        assert re.search(message, second.said())
        first.until(rf"saved \S+, process (?!{saver})", LONG)  # another worker saves in its place
        first.until(r"begins with {'step': \d+}", LONG)  # and the killed one is back
        (tmp_path / "end").touch()
        assert first.wait(LONG) == 0, first.said()
    saved = re.findall(r"saved (\d+)-step-(\d+)", first.said())
    assert [int(number) for number, _ in saved] == [*range(1, len(saved) + 1)]
    assert len(complete(tmp_path / "run")) == len(saved)
    steps = [int(step) for _, step in saved]
    assert steps == sorted(steps)
    (tmp_path / "end").unlink()
    with run(tmp_path, "checkpoints", "third", "1") as third:  # when the first has ended
        third.until(rf"begins with {{'step': {steps[-1]}}}", LONG)


@pytest.mark.long
def test_a_second_run_does_not_write_into_the_records_of_the_first(tmp_path):
    with run(tmp_path, "records", "first", "2") as first:
        until = time.monotonic() + LONG
        while not (tmp_path / "runs" / "records1.jsonl").exists():
            assert time.monotonic() < until, first.said()
            time.sleep(0.01)
        with run(tmp_path, "records", "second", "1") as second:
            assert second.wait(LONG) == 1, second.said()
        assert re.search(r"another process is writing runs/records\d\.jsonl", second.said())
        assert "Give each run a separate path" in second.said()
        (tmp_path / "end").touch()
        assert first.wait(LONG) == 0, first.said()


def test_a_second_store_at_the_same_address_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_SECRET", "a secret of many characters")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with run(tmp_path, "records", "second", "1", "--listen", address) as second:
            assert second.wait(30) == 2
    assert f"another program listens at {address}" in second.said()
    assert "--listen another port" in second.said()
