"""examples/pretrain_gpt.py, shortened: stopped on two ranks, and finished on another number."""

import os
import re
import signal

import pytest

import manyhands as mh
from helpers.pages import ROOT, in_forks
from helpers.started import Started, torchrun

SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
MODEL = ["--width", "96", "--layers", "3", "--heads", "2", "--block", "32", "--micro-batch", "4"]
SMALL = [*MODEL, "--steps", "60"]
LAST = 6  # SIGTERM comes when this step's collective is over: the next one is the last


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Run the script on two ranks, each of which gets SIGTERM after step `LAST`."""
    monkeypatch.chdir(tmp_path)
    ask, steps = mh.stopping, iter(range(1, 1000))

    def stopping(optimizer):
        if next(steps) == LAST:
            os.kill(os.getpid(), signal.SIGTERM)
        return ask(optimizer)

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(mh, "stopping", stopping)
            code, said = in_forks(2, SCRIPT, *SMALL, *arguments)
        assert code == 0, said
        return said

    return run


def check_goes_on(said, ranks, *arguments):
    """Finish on so many ranks: no step is lost or repeated, the loss falls, and a text comes."""
    (step,) = map(int, re.findall(r"asked to stop: saved step (\d+)", said))
    code, second = in_forks(ranks, SCRIPT, *SMALL, *arguments)
    assert code == 0, second
    record = mh.read_record("runs/pretrain.jsonl")
    steps, progress = record.column("step"), record.column("progress")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > step
    assert f"on {ranks or 1} ranks in " in second
    assert f"from step {step}, progress {progress[step - 1]:.0f}\n" in second
    assert progress[-1] >= 60 > progress[-2]
    (begin,), (end,) = (re.findall(r"held-out loss ([\d.]+)", each) for each in (said, second))
    assert float(end) < float(begin) - 1.5
    assert f"held-out loss {end} after {steps[-1]} steps\ndef main(" in second
    return second


@pytest.mark.sample("options0-ShardedDataParallel")
@pytest.mark.parametrize(
    ("options", "wrapper"),
    [
        (["--memory", "5.8MiB"], "ShardedDataParallel"),  # which only level 2 fits
        (["--level", "3"], "FullyShardedDataParallel"),
    ],
)
def test_it_goes_on_alone(options, wrapper, stopped):
    first = stopped(*options)
    assert f"on 2 ranks in {wrapper}," in first
    assert f"saved step {LAST + 1}" in first
    assert "in DistributedDataParallel," in check_goes_on(first, None)


@pytest.mark.long
def test_it_goes_on_with_more_ranks_and_sharded_parameters(stopped):
    check_goes_on(stopped("--level", "1"), 3, "--level", "3")


@pytest.mark.long
def test_a_sigterm_to_torchrun_lets_it_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        *torchrun("--standalone", "--nproc-per-node", "2"),
        SCRIPT,
        *MODEL,
        "--steps",
        "100000",
    ]
    with Started(command, tmp_path) as run:
        run.until("step 25, progress")
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait()
        said = run.said()
    (step,) = re.findall(r"asked to stop: saved step (\d+)", said)
    code, second = in_forks(None, SCRIPT, *MODEL, "--steps", "150")
    assert code == 0, second
    assert f"from step {step}, " in second
