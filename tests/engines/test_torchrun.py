"""A stop notice under torchrun: its agents send SIGTERM, and start ranks again."""

import json
import os
import signal
import time

import pytest

from helpers.pages import ROOT
from helpers.started import Started, torchrun

SCRIPT = ROOT / "examples" / "engines" / "train.py"


def losses(folder, name="losses"):
    """The losses by step, of all ranks that took it. A rank that took it twice is an error."""
    by_step = {}
    for path in folder.glob(f"{name}.[0-9]"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [step for step, _ in lines]
        assert steps == sorted(set(steps)), (path.name, steps)
        for step, loss in lines:
            by_step.setdefault(step, []).append(float.fromhex(loss))
    return {step: sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}


@pytest.mark.long
def test_a_sigterm_to_the_agent_costs_no_step(tmp_path):
    options = torchrun("--standalone", "--nproc-per-node", "2")
    arguments = [SCRIPT, "--losses", "losses", "--steps", "30", "--pause", "0.1"]
    with Started([*options, *arguments], tmp_path) as run:
        run.until("begins with step 0", times=2)
        while not (tmp_path / "losses.0").exists():
            time.sleep(0.05)
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait()
        (step,) = set(run.until_ended(r"has saved step (\d+)", times=2))
    before = losses(tmp_path)
    assert max(before) == int(step) < 30
    with Started([*options, *arguments], tmp_path, "again") as run:
        assert run.wait() == 0, run.said()
        assert f"begins with step {step}" in run.said()
    resumed = losses(tmp_path)
    assert list(resumed) == list(range(1, 31))
    arguments[2] = "whole"
    with Started([*options, *arguments, "--checkpoints", "other"], tmp_path, "whole") as run:
        assert run.wait() == 0, run.said()
    assert losses(tmp_path, "whole") == resumed  # bit for bit


@pytest.mark.long
def test_agents_that_come_and_go(tmp_path):
    """--nnodes 1:3: one agent, then two, then one again. No step is lost, none taken twice."""
    port = 29600 + os.getpid() % 300
    arguments = [SCRIPT, "--losses", "losses", "--steps", "600", "--pause", "0.05"]
    options = torchrun(
        *("--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "5"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"),
        *("--rdzv-conf", "last_call_timeout=1,close_timeout=5,keep_alive_interval=1"),
    )
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Started([*options, *arguments], tmp_path, "first", **more) as first:
        first.until("rank 0 of 1")
        time.sleep(1)
        with Started([*options, *arguments], tmp_path, "second", **more) as second:
            first.until("rank . of 2")
            second.until("rank . of 2")
            time.sleep(1)
            os.kill(second.process.pid, signal.SIGTERM)
            second.wait()
            assert "has saved step" in second.said()
        first.until("rank 0 of 1", times=2)
        time.sleep(1)
        os.kill(first.process.pid, signal.SIGTERM)
        first.wait()
    taken = losses(tmp_path)
    assert list(taken) == list(range(1, max(taken) + 1))
    arguments = [SCRIPT, "--losses", "whole", "--steps", max(taken), "--checkpoints", "other"]
    alone = torchrun("--standalone", "--nproc-per-node", "1")
    with Started([*alone, *arguments], tmp_path, "whole") as run:
        assert run.wait() == 0, run.said()
    whole = losses(tmp_path, "whole")
    # The same samples in each step, on one rank or on two.
    assert taken == pytest.approx(whole, rel=1e-3)
