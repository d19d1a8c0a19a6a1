"""Killed runs, full disks, damaged files, ranks that do not answer, and jobs that share a path."""

import errno
import os
import pickletools
import random
import re
import resource
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import manyhands as mh
from helpers.checkpoint_oracle import Setup, assert_equal
from helpers.damage import damage_many, kill_while_saving, release_locks
from helpers.pages import ROOT
from helpers.ranks import raises_on_ranks, run_ranks
from manyhands.checkpoint import _folder, _safetensors
from manyhands.errors import RanksDisagree


def hidden(path):
    return sorted(p.name for p in path.iterdir() if p.name.startswith(".") and p.name != ".lock")


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_killed_at_any_moment_leaves_the_last_complete_one(wait, tmp_path):
    choose = random.Random(wait)
    for _ in range(10):
        kill_while_saving(tmp_path / "run", choose, wait)  # asserts that what loads is of one step
    mh.save(tmp_path / "run", value=1)
    assert hidden(tmp_path / "run") == []  # what was left of the killed is gone
    assert len(_folder.list_complete(tmp_path / "run")) == 2


def test_a_run_killed_at_each_file_operation_leaves_a_complete_checkpoint(tmp_path):
    """One operation further each time, until a save comes to its end."""
    path = tmp_path / "run"
    mh.save(path, value=torch.zeros(3), step=0, keep=1)

    def save_until(number):
        done = 0

        def stop(event, args):
            nonlocal done
            if args and event.startswith(("open", "os.", "shutil.")) and str(path) in str(args[0]):
                done += 1
                if done > number:
                    os._exit(9)

        sys.addaudithook(stop)
        mh.save(path, value=torch.full((3,), float(number)), step=number, keep=1)
        os._exit(0)

    codes = []
    for number in range(1, 200):
        child = get_context("fork").Process(target=save_until, args=(number,))
        release_locks()
        child.start()
        child.join()
        codes.append(child.exitcode)
        found = mh.load(path)
        assert found["value"].tolist() == [found["step"]] * 3
        if child.exitcode == 0:
            break
    assert codes == [9] * (len(codes) - 1) + [0] and len(codes) > 15
    assert mh.load(path)["step"] == number


def test_damaged_files_are_refused_and_change_nothing(tmp_path):
    def write():
        mh.save(tmp_path / "run", **Setup("OSS").train(2).given())

    run_ranks(2, write)
    (source,) = _folder.list_complete(tmp_path / "run")
    assert damage_many(Setup("plain", seed=3).train(1), source, tmp_path, 100) == []


def test_damage_that_one_rank_sees_is_an_error_on_all(tmp_path):
    def write():
        mh.save(tmp_path / "run", **Setup("OSS").train(2).given(), step=5)

    run_ranks(3, write)
    (source,) = _folder.list_complete(tmp_path / "run")
    path = source / "worker-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-40_000 if len(data) > 40_000 else -3] ^= 1  # in some tensor
    path.write_bytes(data)

    def read():
        setup = Setup("fully_shard", seed=3).train(1)
        before = setup.held()
        try:
            mh.load(tmp_path / "run", **setup.given())
        finally:
            assert_equal(setup.held(), before)

    raises_on_ranks(2, ValueError, read, match="worker-00002.safetensors is damaged: the checksum")


def test_a_missing_file_is_an_error_on_all(tmp_path):
    def write():
        mh.save(tmp_path / "run", **Setup("OSS").train(2).given())

    run_ranks(2, write)
    (source,) = _folder.list_complete(tmp_path / "run")
    (source / "worker-00001.safetensors").unlink()
    raises_on_ranks(
        2,
        FileNotFoundError,
        lambda: mh.load(tmp_path / "run", **Setup("OSS").given()),
        match="is missing: the checkpoint needs each of its 2 files",
    )


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_an_error_on_all_and_leaves_the_last(wait, tmp_path):
    path = tmp_path / "run"

    def go():
        setup = Setup("OSS").train(2)
        mh.save(path, **setup.given(), step=2)
        setup.train(1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            mh.save(path, **setup.given(), step=3, wait=wait).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert mh.load(path, **setup.given())["step"] == 2 if wait else True

    raises_on_ranks(
        2, OSError, go, match="no room for the checkpoint .* Earlier checkpoints are unchanged"
    )
    assert hidden(path) == []
    assert [p.name for p in _folder.list_complete(path)] == ["000001-step-2"]


@pytest.mark.parametrize("before", [True, False])
def test_a_save_that_one_rank_calls_alone_ends_with_the_groups_timeout(before, tmp_path):
    def go():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        if before:
            mh.save(tmp_path, value=1, process_group=group)
        begun = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"called mh\.save, and not every .* within 2 s"):
                mh.save(tmp_path, value=2, process_group=group)
        else:
            time.sleep(4)
        return time.monotonic() - begun

    assert run_ranks(2, go)[0] < 8
    assert len(_folder.list_complete(tmp_path)) == before and not hidden(tmp_path)


def test_a_slow_worker_is_waited_for_longer_than_the_groups_timeout(tmp_path, monkeypatch):
    write = _safetensors.write

    def slowly(*given):
        time.sleep(2 if dist.get_rank() else 0)
        return write(*given)

    def go():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        mh.save(tmp_path, model=torch.nn.Linear(2, 2), process_group=group)

    monkeypatch.setattr(_safetensors, "write", slowly)
    run_ranks(2, go)
    assert len(_folder.list_complete(tmp_path)) == 1


def test_ranks_that_call_different_functions_are_an_error(tmp_path):
    mh.save(tmp_path, value=1)

    def go():
        (mh.load if dist.get_rank() else mh.save)(tmp_path)

    release_locks()
    raises_on_ranks(2, RanksDisagree, go, match=r"rank 0: mh\.save; rank 1: mh\.load")


def test_the_bytes_in_a_full_disk_error_are_those_of_the_rank(tmp_path, monkeypatch):
    """Half of the state on each of two ranks, and not the whole of it."""

    def go():
        setup = Setup("OSS").train(1)
        size = sum(t.nbytes for t in setup.held().values())
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            mh.save(tmp_path, **setup.given())
        except OSError as error:
            (claimed,) = re.findall(r"has ([\d,]+) bytes to write", str(error))
            return int(claimed.replace(",", "")), size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def save():
        mh.save(tmp_path, **Setup("OSS").train(1).given())

    claims = run_ranks(2, go)
    run_ranks(2, save)
    (checkpoint,) = _folder.list_complete(tmp_path)
    for rank, (claimed, _) in enumerate(claims):
        written = (checkpoint / f"worker-0000{rank}.safetensors").stat().st_size
        assert 0.5 * written < claimed < written  # the rest is the header


@pytest.mark.parametrize("at", ["folder", "token", "file", "index"])
def test_a_file_system_that_takes_no_more_files_leaves_nothing_half_made(at, tmp_path, monkeypatch):
    mh.save(tmp_path, value=torch.ones(3))
    full = OSError(errno.ENOSPC, "No space left on device")
    names = {"token": _folder.TOKEN, "file": "worker-00000.safetensors", "index": "index.json"}
    writer, mkdir = _folder.open_to_write, Path.mkdir

    def no_writer(path):
        if path.name == names.get(at):
            raise full
        return writer(path)

    def no_folder(path, *given, **options):
        if at == "folder" and path.name.startswith(_folder.PARTIAL):
            raise full
        mkdir(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_folder, "open_to_write", no_writer)
        patch.setattr(Path, "mkdir", no_folder)
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**9))
        with pytest.raises(OSError, match=r"no room .*a limit of files"):
            mh.save(tmp_path, value=torch.zeros(3))
    assert hidden(tmp_path) == []
    assert mh.load(tmp_path)["value"].tolist() == [1, 1, 1]


def test_an_asynchronous_error_surfaces_at_the_next_save(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    full = OSError(errno.ENOSPC, "full")

    def fail(*_):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(_safetensors, "write_all", fail)
        saving = mh.save(tmp_path, model=model, wait=False)
        while not saving.done:
            pass
    assert "failed" in repr(saving)
    with pytest.raises(OSError, match="no room"):
        mh.save(tmp_path, model=model)
    mh.save(tmp_path, model=model)
    assert len(_folder.list_complete(tmp_path)) == 1


@pytest.mark.long
def test_two_jobs_on_one_path_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 0.3)
    script = """
import sys, time, manyhands as mh
mh.save(sys.argv[1], value=1)
print("saved", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", script, str(tmp_path)]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "saved\n"
        assert mh.load(tmp_path) == {"value": 1}  # anybody may read
        with pytest.raises(RuntimeError, match=f"another job saves to .* process {job.pid} on"):
            mh.save(tmp_path, value=2)
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    mh.save(tmp_path, value=2)  # the lock of a dead process is nobody's
    assert mh.load(tmp_path) == {"value": 2}


def test_ranks_that_do_not_share_a_folder_are_an_error(tmp_path):
    def save():
        os.chdir(tmp_path / str(dist.get_rank()))
        mh.save("run", value=1)

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    raises_on_ranks(2, ValueError, save, match="different path|rank 0 writes to")

    def load():
        path = tmp_path / str(dist.get_rank()) / "run"
        mh.load(path)

    mh.save(tmp_path / "0" / "run", value=1)
    raises_on_ranks(2, FileNotFoundError, load, match="cannot be found")
    mh.save(tmp_path / "1" / "run", value=2)
    raises_on_ranks(2, ValueError, load, match="different checkpoints")


def test_no_file_holds_a_pickle_and_none_is_unpickled(tmp_path, monkeypatch):
    setup = Setup("OSS").train(2)
    mh.save(tmp_path, **setup.given(), value={"a": torch.ones(3)})

    def no(*_, **__):
        raise AssertionError("unpickled")

    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, no)
    monkeypatch.setattr(torch, "load", no)
    mh.load(tmp_path, **setup.given())
    (checkpoint,) = _folder.list_complete(tmp_path)
    for path in checkpoint.iterdir():
        data = path.read_bytes()
        assert data[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")
        with pytest.raises(ValueError):
            list(pickletools.genops(data))
