"""Jobs that are killed again and again leave a single unfinished checkpoint."""

import contextlib
import os
import signal
import time
import uuid
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

import manyhands as mh
from helpers.damage import release_locks
from helpers.forge import complete
from manyhands.checkpoint import _folder

fork = get_context("fork")


def unfinished(path):
    """The names of unfinished checkpoints."""
    names = {entry.name for entry in path.iterdir() if entry.is_dir()}
    return sorted(names - {entry.name for entry in complete(path)})


def begin_job(**variables):
    """Make this process one of another job, as torchrun or a shell would start it."""
    for name in _folder.JOB_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    _folder._process = uuid.uuid4().hex
    release_locks()


def save_half(path, ranks, rank, store, pipe, variables):
    """Be a rank of another job, which stops in the middle of its file."""
    begin_job(**variables)
    write = _folder.NewFile.write

    def half(file, data):
        write(file, data[: len(data) // 2])
        pipe.send(rank)
        time.sleep(60)

    _folder.NewFile.write = half
    if ranks > 1:
        shared = dist.FileStore(str(store), ranks)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks)
    mh.save(path, value=torch.ones(3), step=1)


@contextlib.contextmanager
def job(path, ranks, **variables):
    """A job whose ranks are in the middle of a save. They are killed at the end."""
    ours, theirs = fork.Pipe()
    store = path.parent / uuid.uuid4().hex
    release_locks()
    started = []
    for rank in range(ranks):
        given = (path, ranks, rank, store, theirs, variables)
        started.append(fork.Process(target=save_half, args=given))
        started[-1].start()
    try:
        for _ in range(ranks):
            assert ours.poll(30.0)
            ours.recv()
        yield
    finally:
        for process in started:
            os.kill(process.pid, signal.SIGKILL)
            process.join()


@pytest.fixture
def another_job(monkeypatch):
    """Make this process another job each time it is called."""
    before = _folder._process

    def start():
        monkeypatch.setattr(_folder, "_process", uuid.uuid4().hex)
        release_locks()

    for name in _folder.JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_folder, "QUIET", 0.0)
    start()
    yield start
    release_locks()
    _folder._process = before


@pytest.mark.parametrize("name", ["", "TORCHELASTIC_RUN_ID"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_crash_loop_leaves_one_unfinished_checkpoint(name, ranks, tmp_path, another_job):
    path = tmp_path / "run"
    mh.save(path, value=1)
    for _ in range(4):
        variables = {name: uuid.uuid4().hex} if name else {}
        with job(path, ranks, **variables):
            pass
        assert len(unfinished(path)) == 1
    another_job()
    mh.save(path, value=2)
    assert unfinished(path) == [] and mh.load(path) == {"value": 2}
