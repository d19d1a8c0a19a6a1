"""Workers of one run that save to one folder in turn, as when a crew's first one is stopped."""

import contextlib
import os
import shutil
import signal
import time
from multiprocessing import get_context

import pytest
import torch

import manyhands as mh
from helpers.damage import release_locks
from helpers.forge import complete
from manyhands.checkpoint import _folder


@contextlib.contextmanager
def saver(path, run, value, before_publishing=None):
    """A process that saves, says so, and waits for what is done to it."""
    fork = get_context("fork")
    ours, theirs = fork.Pipe()

    def live():
        os.environ[_folder.RUN_VARIABLE] = run
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

    release_locks()
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
    monkeypatch.setenv(_folder.RUN_VARIABLE, "0123456789abcdef")
    yield "0123456789abcdef"
    release_locks()


def test_the_lock_of_a_worker_that_is_stopped_is_taken_over_by_its_successors(tmp_path, in_run):
    with contextlib.ExitStack() as savers:
        first, one = savers.enter_context(saver(tmp_path, in_run, 1))
        assert hear(one) == "saved"
        os.kill(first, signal.SIGSTOP)
        second, two = savers.enter_context(saver(tmp_path, in_run, 2))
        assert hear(two) == "saved"
        os.kill(second, signal.SIGSTOP)
        began = time.monotonic()
        mh.save(tmp_path, value=torch.full((3,), 3.0), step=3)
        assert time.monotonic() - began < _folder.LOCK_TIMEOUT
        assert mh.load(tmp_path)["step"] == 3
        os.kill(first, signal.SIGCONT)
        one.send("again")  # the first worker is back, and it is its turn
        assert hear(one) == "saved" and mh.load(tmp_path)["step"] == 1
        mh.save(tmp_path, value=torch.full((3,), 4.0), step=4)
        assert mh.load(tmp_path)["step"] == 4
    names = sorted(os.listdir(tmp_path))
    assert [name for name in names if name.startswith(".")] == [".lock"]


def test_one_that_is_stopped_while_it_writes_publishes_nothing_when_it_wakes(tmp_path, in_run):
    with saver(tmp_path, in_run, 1, before_publishing="stop") as (pid, pipe):
        assert hear(pipe) == "writing"
        mh.save(tmp_path, value=torch.full((3,), 2.0), step=2)
        os.kill(pid, signal.SIGCONT)
        assert "another job or worker also saves to" in hear(pipe)
        found = mh.load(tmp_path)
        assert found["step"] == 2 and found["value"].tolist() == [2.0] * 3
        assert len(complete(tmp_path)) == 1


@pytest.mark.parametrize("run", ["", "fedcba9876543210"])
def test_a_lock_of_another_job_that_lives_is_respected(tmp_path, in_run, monkeypatch, run):
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 0.3)
    with saver(tmp_path, run, 1) as (pid, pipe):
        assert hear(pipe) == "saved"
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=f"another job saves to .* process {pid} on"):
            mh.save(tmp_path, value=2)
        assert [p.name for p in complete(tmp_path)] == ["000001-step-1"]
    mh.save(tmp_path, value=3)  # its end lets go of it
    monkeypatch.delenv(_folder.RUN_VARIABLE)
    release_locks()
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_no_other_run_comes_in_between_when_the_worker_that_saves_is_killed(
    tmp_path, in_run, monkeypatch
):
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 0.3)
    with contextlib.ExitStack() as savers:
        first, one = savers.enter_context(saver(tmp_path, "first run", 1))
        assert hear(one) == "saved"
        _, two = savers.enter_context(saver(tmp_path, "first run", 2))
        assert hear(two) == "saved"
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"another job saves to .* Use a different path"):
            mh.save(tmp_path, value=3)
        two.send("again")
        assert hear(two) == "saved"
        names = [path.name for path in complete(tmp_path)]
        assert names == ["000002-step-2", "000003-step-2"]
    mh.save(tmp_path, value=3)  # all of the first run have ended


def take_together(path, run, begin, answers):
    """Take the lock at a time, and keep it."""
    os.environ[_folder.RUN_VARIABLE] = run
    time.sleep(max(0.0, begin - time.monotonic()))
    try:
        taken = _folder.Folder(path).lock()
    except RuntimeError:
        taken = False
    answers.send((run, taken))
    answers.recv()


@pytest.mark.parametrize("attempt", range(3))
def test_of_runs_that_begin_together_one_gets_the_folder_with_all_its_workers(
    tmp_path, monkeypatch, attempt
):
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 1.0)
    fork = get_context("fork")
    begin = time.monotonic() + 0.2
    processes = []
    pipes = []
    release_locks()
    try:
        for run in ("a", "b", "a", "b"):
            ours, theirs = fork.Pipe()
            arguments = (tmp_path / "new", f"{run} {attempt}", begin, theirs)
            processes.append(fork.Process(target=take_together, args=arguments))
            processes[-1].start()
            pipes.append(ours)
        answers = sorted(hear(pipe) for pipe in pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [taken for _, taken in answers] in (
        [True, True, False, False],
        [False, False, True, True],
    )


def test_a_worker_of_a_second_crew_takes_no_checkpoint_of_the_first(tmp_path, monkeypatch):
    """`job.load` is refused, before anything is taken for the second run's own."""
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 0.3)
    monkeypatch.setenv("MANYHANDS_STORE", "127.0.0.1:1")  # nothing connects to it
    monkeypatch.setenv("MANYHANDS_WORKER", "0")
    monkeypatch.setenv("MANYHANDS_SECRET", "a secret of many characters")
    job = mh.start(checkpoints=tmp_path, process_group=False)
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with saver(tmp_path, "first run", 1) as (pid, pipe):
        assert hear(pipe) == "saved"
        monkeypatch.setenv(_folder.RUN_VARIABLE, "second run")
        said = (
            f"another job saves to {tmp_path}: process {pid} on .*Use a different path for each job"
        )
        with pytest.raises(RuntimeError, match=said):
            job.load(model=model)
        with pytest.raises(RuntimeError, match=said):
            job.save(model=model)
        assert torch.equal(model.weight, before)
        monkeypatch.setenv(_folder.RUN_VARIABLE, "first run")
        with pytest.raises(ValueError, match="saved without model="):  # it has been read
            job.load(model=model)
    release_locks()
    mh.save(tmp_path, model=model)  # of a later run
    monkeypatch.setenv(_folder.RUN_VARIABLE, "second run")
    release_locks()
    assert job.load(model=model) == {}
    release_locks()


def test_a_crew_that_may_not_write_to_the_folder_can_load(tmp_path, monkeypatch):
    mh.save(tmp_path, value=3)
    release_locks()

    def read_only(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_folder, "open_descriptor", read_only)
    monkeypatch.setenv("MANYHANDS_STORE", "127.0.0.1:1")
    monkeypatch.setenv("MANYHANDS_WORKER", "0")
    monkeypatch.setenv("MANYHANDS_SECRET", "a secret of many characters")
    job = mh.start(checkpoints=tmp_path, process_group=False)
    with pytest.raises(PermissionError):
        _folder.Folder(tmp_path).lock()
    job._claim_folder()


def test_a_folder_that_was_removed_gets_a_lock_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 0.3)
    path = tmp_path / "run"
    mh.save(path, value=1)
    shutil.rmtree(path)
    mh.save(path, value=2)

    def refused():
        with pytest.raises(RuntimeError, match=f"another job saves to .* process {os.getppid()}"):
            mh.save(path, value=3)

    child = get_context("fork").Process(target=refused)
    child.start()
    child.join()
    assert child.exitcode == 0
