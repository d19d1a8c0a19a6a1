"""Blocks in a crew that torchft's lighthouse keeps: one decision for all, and one state."""

import importlib.util
import os
import signal
import time

import pytest
import torch

import manyhands as mh
from helpers.crew_workers import Log, fork
from helpers.lighthouse import Lighthouse
from manyhands.blocks.averaging import _chunks
from manyhands.blocks.crew import _torchft
from test_crew_faults import BlockWorkers, train

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed"
)
BEAT = 1.0  # seconds without a heartbeat, until the lighthouse takes a worker for dead


class TorchftWorkers(BlockWorkers):
    """The workers of the tests of `Crew`, in the other crew."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in list(self.pids):
            self.kill(number)

    def start(self, numbers, steps, options=None, pause=0.005):
        for number in numbers:
            incarnation = self.incarnations[number] = self.incarnations.get(number, 0) + 1
            log_file = self.folder / f"{number}.{incarnation}.jsonl"

            def work(number=number, log_file=log_file):
                crew = mh.TorchftCrew(
                    self.store.address, number=number, patience=self.options["patience"]
                )
                train(crew, Log(log_file), steps, options or {}, pause, mh.LocalSGD)

            self.pids[number] = fork(work, self.folder / f"{number}.errors")

    def start_with_0(self, steps, options):
        """Three workers that begin with the first one's parameters, which are 0."""
        self.start([0, 1], steps, options)
        self.wait_for_rounds(0, 1)
        self.start([2], steps, options)
        self.wait_for_rounds(2, 1)

    def story(self):
        return "\n".join(f"{n}: {self.events(n)[-3:]}\n{self.errors(n)}" for n in self.pids)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_chunks, "SMALLEST", 1 << 16)


@pytest.fixture
def lighthouse():
    with Lighthouse(2, BEAT) as lighthouse:
        yield lighthouse


@needs_torchft
def test_workers_train_and_one_comes_late(lighthouse, tmp_path):
    with TorchftWorkers(lighthouse, tmp_path, expected=2) as workers:
        workers.start([0, 1], 200, {"every": 5})
        workers.wait_for_rounds(0, 2)
        workers.start([2], 200, {"every": 5})
        workers.finish()
        workers.one_state_after_each_round()
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert {(e["value"], e["workers"]) for e in done} == {(-200.0, 3)}
        assert workers.events(2, "in")[-1]["steps"] >= 10


@pytest.mark.long
@needs_torchft
def test_a_worker_with_other_options_is_refused_and_the_others_lose_nothing(lighthouse, tmp_path):
    with TorchftWorkers(lighthouse, tmp_path, expected=2) as workers:
        workers.start([0, 1], 600, {"every": 5})
        workers.wait_for_rounds(0, 2)
        workers.start([2], 600, {"every": 6})
        ended = {}
        workers.until(lambda: ended.update(workers.ended()) or 2 in ended, 30.0)
        assert ended == {2: 1}, workers.story()
        assert "every: 6 here, 5 in the run" in workers.errors(2)
        workers.finish(60.0)
        assert {workers.events(n, "done")[-1]["value"] for n in (0, 1)} <= {-600.0, -599.0}


@pytest.mark.long
@needs_torchft
def test_a_death_costs_the_others_the_heartbeats_timeout_and_no_work(lighthouse, tmp_path):
    with TorchftWorkers(lighthouse, tmp_path, expected=3) as workers:
        workers.start_with_0(250, {"every": 5, "codec": "int8"})
        workers.wait_for_rounds(0, 5)
        workers.kill(1)
        died = time.monotonic()
        workers.until(lambda: workers.last(0, "round", "workers") == 2)
        assert time.monotonic() - died < BEAT + 6
        workers.start([1], 250, {"every": 5, "codec": "int8"})
        workers.finish()
        workers.one_state_after_each_round()
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert len({e["state"] for e in done}) == 1 and {e["workers"] for e in done} == {3}
        values = torch.tensor([e["value"] for e in done])
        torch.testing.assert_close(values, torch.full((3,), -250.0), rtol=0, atol=0.5)


@pytest.mark.long
@needs_torchft
def test_a_stopped_worker_is_given_up_after_patience_and_comes_back(lighthouse, tmp_path):
    with TorchftWorkers(lighthouse, tmp_path, expected=3, patience=1.5) as workers:
        workers.start_with_0(300, {"every": 5})
        workers.wait_for_rounds(1, 4)
        workers.stop(1)
        stopped = time.monotonic()
        workers.until(lambda: workers.last(0, "round", "workers") == 2)
        assert time.monotonic() - stopped < 1.5 + BEAT + 6
        workers.wake(1)
        workers.until(lambda: (workers.last(1, "round", "time") or 0.0) > stopped + 1.5)
        workers.finish()
        workers.one_state_after_each_round()
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert {(e["value"], e["workers"]) for e in done} == {(-300.0, 3)}


@pytest.mark.long
@needs_torchft
def test_a_worker_with_a_number_in_use_ends_and_the_others_do_not(
    lighthouse, tmp_path, monkeypatch
):
    monkeypatch.setattr(_torchft, "NUMBER_TAKEN", 0.3)
    with TorchftWorkers(lighthouse, tmp_path, expected=2) as workers:
        workers.start([0, 1], 300, {"every": 5})
        workers.wait_for_rounds(0, 2)
        first = workers.pids.pop(0)
        workers.start([0], 300)
        workers.until(lambda: workers.ended() == {0: 1})
        assert "two workers have the same number: [0, 0, 1]" in workers.errors(0)
        workers.pids[0] = first
        workers.finish()
        assert workers.events(1, "done")[-1]["value"] == -300.0


@needs_torchft
def test_a_worker_is_waited_for_while_the_lighthouse_lives(lighthouse, tmp_path):
    """For longer than one question to the lighthouse lasts."""
    with TorchftWorkers(lighthouse, tmp_path, expected=2, patience=0.5) as workers:
        workers.start([0], 20, {"every": 5})
        time.sleep(1.5)
        assert workers.ended() == {}
        workers.start([1], 20, {"every": 5})
        workers.finish()
        assert workers.events(0, "done")[-1]["value"] == -20.0


@needs_torchft
def test_a_lost_lighthouse_is_an_error(lighthouse, tmp_path):
    with TorchftWorkers(lighthouse, tmp_path, expected=2, patience=1.0) as workers:
        workers.start([0, 1], 10_000, {"every": 5})
        workers.wait_for_rounds(0, 2)
        os.kill(lighthouse.pid, signal.SIGSTOP)
        ended = {}
        workers.until(lambda: ended.update(workers.ended()) or set(ended) == {0, 1})
        assert set(ended.values()) == {1}
        assert "lighthouse at http" in workers.errors(0) and "from a checkpoint" in workers.errors(
            0
        )


def test_mistakes(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    monkeypatch.delenv("MANYHANDS_WORKER", raising=False)
    with pytest.raises(ValueError, match="address of torchft's lighthouse"):
        mh.TorchftCrew(number=0)
    with pytest.raises(ValueError, match="number that no other worker has"):
        mh.TorchftCrew("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="patience must be a finite number above 0"):
        mh.TorchftCrew("http://127.0.0.1:1", number=0, patience=0.0)


def test_where_torchft_is_missing_the_error_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchft.coordination", None)
    with pytest.raises(ImportError, match="pip install torchft"):
        mh.TorchftCrew("http://127.0.0.1:1", number=0).join()
