"""Workers of one run that save to one folder in turn, as when a crew's first one is stopped."""

import contextlib
import os
import signal
from multiprocessing import get_context

import pytest
import torch

import manyhands as mh
from helpers.forge import complete
from manyhands.checkpoint import _folder


@contextlib.contextmanager
def saver(path, run, value, before_publishing=None):
    """A process that saves, says so, and waits for what is done to it."""
    fork = get_context("fork")
    ours, theirs = fork.Pipe()

    def live():
        os.environ["MANYHANDS_RUN"] = run
        publish = _folder.Folder.publish

        def slow(*given):
            if before_publishing is not None:
                theirs.send("writing")
                os.kill(os.getpid(), signal.SIGSTOP)
            return publish(*given)

        _folder.Folder.publish = slow
        for _ in range(2):
            try:
                mh.save(path, value=torch.full((3,), float(value)), step=value)
                theirs.send("saved")
            except (RuntimeError, OSError) as error:
                theirs.send(str(error))
            before = theirs.recv()
            if before == "end":
                return

    process = fork.Process(target=live)
    process.start()
    try:
        yield process.pid, ours
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def hear(pipe):
    assert pipe.poll(30.0)
    return pipe.recv()


@pytest.fixture
def in_run(monkeypatch):
    monkeypatch.setenv("MANYHANDS_RUN", "0123456789abcdef")
    yield "0123456789abcdef"


def test_the_lock_of_a_worker_that_is_stopped_is_taken_over_by_its_successors(tmp_path, in_run):
    with contextlib.ExitStack() as savers:
        first, one = savers.enter_context(saver(tmp_path, in_run, 1))
        assert hear(one) == "saved"
        os.kill(first, signal.SIGSTOP)
        second, two = savers.enter_context(saver(tmp_path, in_run, 2))
        assert hear(two) == "saved"
        os.kill(second, signal.SIGSTOP)
        mh.save(tmp_path, value=torch.full((3,), 3.0), step=3)
        assert mh.load(tmp_path)["step"] == 3
        os.kill(first, signal.SIGCONT)
        one.send("again")  # the first worker is back, and it is its turn
        assert hear(one) == "saved" and mh.load(tmp_path)["step"] == 1
        mh.save(tmp_path, value=torch.full((3,), 4.0), step=4)
        assert mh.load(tmp_path)["step"] == 4


def test_one_that_is_stopped_while_it_writes_publishes_nothing_when_it_wakes(tmp_path, in_run):
    with saver(tmp_path, in_run, 1, before_publishing="stop") as (pid, pipe):
        assert hear(pipe) == "writing"
        mh.save(tmp_path, value=torch.full((3,), 2.0), step=2)
        os.kill(pid, signal.SIGCONT)
        assert "another job or worker saves to" in hear(pipe)
        found = mh.load(tmp_path)
        assert found["step"] == 2 and found["value"].tolist() == [2.0] * 3
        assert len(complete(tmp_path)) == 1
