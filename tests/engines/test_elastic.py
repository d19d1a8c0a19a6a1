"""Elastic torchrun: hosts with networks of their own come and go, and a `Cursor` keeps the data."""

import json
import os
import signal
import time
from itertools import chain

import pytest

from helpers.data_oracle import global_batches
from helpers.networks import INTERFACE, Networks, NoNetworks
from helpers.pages import ROOT
from helpers.started import Started, torchrun

SCRIPT = ROOT / "examples" / "engines" / "elastic.py"
SAMPLES = 480
FIRST, SECOND = "near", "far"  # hosts of `Networks`
pytestmark = pytest.mark.long


@pytest.fixture
def networks():
    try:
        with Networks() as made:
            yield made
    except NoNetworks as error:
        pytest.skip(f"hosts with networks of their own need root and iproute2: {error}")


def agent(host, *arguments):
    """The command of torchrun's agent on a host, as docs/engines/elastic.md has it."""
    # All hosts have this machine's name here, by which torchrun cannot tell who is the first.
    names = f"is_host={int(host == FIRST)},last_call_timeout=1,close_timeout=5"
    endpoint = f"{Networks.address(FIRST)}:29400"
    return torchrun(
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "x"),
        *("--rdzv-conf", f"{names},keep_alive_interval=2"),
        *("--local-addr", Networks.address(host)),
        *arguments,
    )


def steps_taken(folder, name="log"):
    """What each step was, by the step: all its ranks say the same, and each step is taken once."""
    by_step = {}
    for path in sorted(folder.glob(f"{name}.[0-9]")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        numbers = [line["step"] for line in lines]
        assert numbers == sorted(set(numbers)), (path.name, numbers)
        for line in lines:
            by_step.setdefault(line["step"], []).append(line)
    assert list(sorted(by_step)) == list(range(1, len(by_step) + 1))
    steps = []
    for number in sorted(by_step):
        lines = by_step[number]
        samples = [line.pop("samples") for line in lines]
        assert len(lines) == lines[0]["ranks"], (number, lines)
        assert all(line == lines[0] for line in lines), (number, lines)
        steps.append({**lines[0], "samples": list(chain(*samples))})
    return steps


def wait_for_steps(run, folder, number, ranks, name="log"):
    """Wait until so many steps were taken by so many ranks together."""
    path = folder / f"{name}.0"
    limit = time.monotonic() + 300
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if sum(json.loads(line)["ranks"] == ranks for line in lines) >= number:
            return
        assert time.monotonic() < limit, f"waited for {number} steps of {ranks} ranks"
        assert run.process.poll() is None, run.said()
        time.sleep(0.1)


def come_and_go(networks, folder, keep):
    """Train on 1, 2 and 1 hosts, and stop there; return the steps."""
    script = [SCRIPT, "--keep", keep, "--epochs", "40", "--steps-log", "log", "--pause", "0.2"]
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": INTERFACE}

    def start(host):
        on = networks.command(host)
        return Started(agent(host, *script), folder, host, on=on, **more)

    with start(FIRST) as one:
        wait_for_steps(one, folder, 5, ranks=1)
        with start(SECOND) as two:
            one.until("rank . of 2 begins", timeout=300)
            two.until("rank . of 2 begins", timeout=300)
            wait_for_steps(one, folder, 5, ranks=2)
            os.kill(two.process.pid, signal.SIGTERM)
            two.wait()
            assert "was asked to stop, and has saved step" in two.said()
        alone = sum(line["ranks"] == 1 for line in map(json.loads, log_lines(folder)))
        one.until("rank 0 of 1 begins", times=2, timeout=300)
        wait_for_steps(one, folder, alone + 5, ranks=1)
        os.kill(one.process.pid, signal.SIGTERM)
        one.wait()
        said = one.said()
    taken = steps_taken(folder)
    check_restarts(taken, said)
    return taken


def log_lines(folder):
    return (folder / "log.0").read_text().splitlines()


def check_restarts(taken, said):
    """Each restart went on from the last step, which was saved just in time."""
    sizes = [step["ranks"] for step in taken]
    changes = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]
    assert [sizes[0], *(sizes[i] for i in changes)] == [1, 2, 1]
    for i in changes:
        epoch, position = taken[i - 1]["at"]
        assert f"has saved step {i}\n" in said
        assert f"begins with step {i}, sample {position} of epoch {epoch}\n" in said


def check_every_sample_once(taken):
    order = list(chain(*(step["samples"] for step in taken)))
    whole = len(order) // SAMPLES
    for epoch in range(whole):
        assert sorted(order[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    rest = order[whole * SAMPLES :]
    assert len(rest) == len(set(rest))
    epoch, position = taken[-1]["at"]
    assert epoch * SAMPLES + position == len(order)
    return order


def whole_run(folder, keep, steps):
    """The same training on one rank that nobody stops before so many steps."""
    script = [
        SCRIPT,
        "--keep",
        keep,
        "--epochs",
        "40",
        "--steps-log",
        "whole",
        "--checkpoints",
        "other",
    ]
    with Started(script, folder, "whole") as run:
        wait_for_steps(run, folder, steps, 1, "whole")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 0, run.said()
    return steps_taken(folder, "whole")[:steps]


def test_the_batch_stays(networks, tmp_path):
    taken = come_and_go(networks, tmp_path, "batch")
    check_every_sample_once(taken)
    assert {step["scale"] for step in taken} == {4.0}
    whole = whole_run(tmp_path, "batch", len(taken))
    for ours, theirs in zip(taken, whole, strict=True):
        assert ours["samples"] == theirs["samples"]  # in the same order, too
        assert ours["at"] == theirs["at"]
        for name in ("gain", "rate", "progress", "weight"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert taken[-1]["rate"] < 0.05  # the schedule has moved


def test_the_batch_follows_the_hosts(networks, tmp_path):
    taken = come_and_go(networks, tmp_path, "micro")
    order = check_every_sample_once(taken)
    assert order[:SAMPLES] == list(chain(*global_batches(SAMPLES, 8)))[: len(order)]
    progress = 0.0
    for step in taken:
        assert step["scale"] == step["ranks"]
        assert len(step["samples"]) == 8 * step["ranks"] or step["at"][1] == SAMPLES
        assert 1.0 <= step["gain"] <= step["scale"]
        assert step["progress"] == pytest.approx(progress + step["gain"])
        progress = step["progress"]
    # The schedule follows progress, whatever the number of ranks was.
    rates = [step["rate"] for step in taken]
    assert rates == sorted(rates, reverse=True)
