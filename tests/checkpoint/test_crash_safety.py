"""Killed runs, full disks, damaged files, ranks that do not answer, and jobs that share a path."""

import contextlib
import errno
import os
import pickletools
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import manyhands as mh
from helpers.checkpoint_oracle import Setup, assert_equal
from helpers.damage import damage_many, flip, kill_while_saving, release_locks
from helpers.forge import complete, data_file, only
from helpers.ranks import raises_on_ranks, run_ranks
from manyhands.checkpoint import _folder, _format, _writing


def save_run(path, **values):
    mh.save(path, **Setup("OSS").train(2).given(), **values)


def left(path):
    """Return what is in a folder besides complete checkpoints and the lock."""
    return sorted({p.name for p in path.iterdir()} - {p.name for p in complete(path)} - {".lock"})


@contextlib.contextmanager
def room_for(nbytes):
    """Let a file system take files of so many bytes; a process's limit would be for stores, too."""
    write = _folder.NewFile.write

    def limited(file, data):
        if file._file.tell() + len(data) > nbytes:
            raise OSError(errno.EFBIG, "File too large")
        write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder.NewFile, "write", limited)
        yield


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_killed_at_any_moment_leaves_the_last_complete_one(wait, tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "QUIET", 0.0)
    choose = random.Random(wait)
    for _ in range(25):  # and 50 times in a bucket: tests/integrations/test_s3.py
        kill_while_saving(tmp_path / "run", choose, wait)  # asserts that what loads is of one step
    mh.save(tmp_path / "run", value=1)
    assert left(tmp_path / "run") == []  # what was left of the killed is gone
    assert len(complete(tmp_path / "run")) == 2


def test_folders_that_are_no_unfinished_save_stay(tmp_path, monkeypatch):
    for name, file in (("20261129", "log.txt"), ("000007", "worker-00000-a-b-c.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    mh.save(tmp_path, value=1)
    assert left(tmp_path) == ["000007", "20261129"]  # the first may be a copy in progress
    monkeypatch.setattr(_folder, "QUIET", 0.0)
    mh.save(tmp_path, value=2)
    assert left(tmp_path) == ["20261129"]


def test_a_run_killed_at_each_file_operation_leaves_a_complete_one(tmp_path, monkeypatch):
    """One operation further each time, until a save comes to its end."""
    monkeypatch.setattr(_folder, "QUIET", 0.0)
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
    run_ranks(2, save_run, tmp_path / "run")
    source = only(tmp_path / "run")
    assert damage_many(Setup("plain", seed=3).train(1), source, tmp_path, 100) == []


def test_damage_that_one_rank_sees_is_an_error_on_all(tmp_path):
    run_ranks(3, save_run, tmp_path / "run", step=5)
    source = only(tmp_path / "run")
    path = data_file(source, 2)
    flip(path, "optimizer.0/")

    def read():
        setup = Setup("fully_shard", seed=3).train(1)
        before = setup.held()
        try:
            mh.load(tmp_path / "run", **setup.given())
        finally:
            assert_equal(setup.held(), before)

    raises_on_ranks(2, ValueError, read, match="worker-00002-.* is damaged: the checksum")


def test_a_missing_file_is_an_error_on_all(tmp_path):
    run_ranks(2, save_run, tmp_path / "run")
    source = only(tmp_path / "run")
    data_file(source, 1).unlink()
    raises_on_ranks(
        2,
        FileNotFoundError,
        lambda: mh.load(tmp_path / "run", **Setup("OSS").given()),
        match="is missing: the checkpoint needs all of its 2 files",
    )


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_an_error_on_all_and_leaves_the_last(wait, tmp_path):
    path = tmp_path / "run"

    def go():
        setup = Setup("OSS").train(2)
        mh.save(path, **setup.given(), step=2)
        setup.train(1)
        try:
            with room_for(2000 if dist.get_rank() == 1 else 10**9):
                mh.save(path, **setup.given(), step=3, wait=wait).wait()
        finally:
            assert mh.load(path, **setup.given())["step"] == 2 if wait else True

    raises_on_ranks(2, OSError, go, match="does not fit into .* Earlier checkpoints are unchanged")
    assert left(path) == []
    assert [p.name for p in complete(path)] == ["000001-step-2"]


@pytest.mark.parametrize("before", [True, False])
def test_a_save_that_one_rank_calls_alone_ends_with_the_groups_timeout(before, tmp_path):
    def go():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        if before:
            mh.save(tmp_path, value=1, process_group=group)
        begun = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(
                RuntimeError, match=r"has called mh\.save, and rank 1 not within 2 s"
            ):
                mh.save(tmp_path, value=2, process_group=group)
        else:
            time.sleep(4)
        seconds = time.monotonic() - begun
        if dist.get_rank() == 1:  # its answer waits for it
            with pytest.raises(RuntimeError, match="and rank 1 not within 2 s"):
                mh.save(tmp_path, value=2, process_group=group)
        dist.barrier()
        assert len(complete(tmp_path)) == before and not left(tmp_path)
        dist.barrier()  # the next save makes a folder
        mh.save(tmp_path, value=3, process_group=group)
        return seconds

    assert run_ranks(2, go)[0] < 8
    assert len(complete(tmp_path)) == before + 1 and not left(tmp_path)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_waits_says_after_a_while_who_has_not_called(late, tmp_path, monkeypatch):
    assert _writing.SAY_AFTER < 60
    monkeypatch.setattr(_writing, "SAY_AFTER", 0.5)  # the same with less time

    def go():
        said = []
        for number in range(2):  # the second save begins without asking for its name
            dist.barrier()
            time.sleep(3 if dist.get_rank() == late else 0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                mh.save(tmp_path, value=number)
            said += [str(each.message) for each in caught]
        return said

    for rank, said in enumerate(run_ranks(3, go)):
        text = rf"rank {rank} has called mh\.save, and rank {late} not for \d s\. Call it on every"
        waits = rank != late if late == 0 else rank == 0  # rank 0 waits for all others
        assert len(said) == 2 * waits
        assert all(re.match(text, each) for each in said), said
    assert len(complete(tmp_path)) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_it_writes_is_named_and_nothing_left(
    victim, number, tmp_path, monkeypatch
):
    path = tmp_path / "run"
    mh.save(path, value=torch.zeros(3), step=0)
    release_locks()
    monkeypatch.setattr(_writing, "SILENCE", 2.0)
    monkeypatch.setattr(_writing, "PULSE", 0.2)
    monkeypatch.setattr(_writing, "SAY_AFTER", 1.0)
    fork = get_context("fork")

    def live(rank, pipe):
        write = _folder.NewFile.write

        def die(file, data):
            write(file, data[: len(data) // 2])
            time.sleep(0.5)  # after signs of life
            os.kill(os.getpid(), number)

        if rank == victim:
            _folder.NewFile.write = die
        store = dist.FileStore(str(tmp_path / "store"), 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        began = time.monotonic()
        try:
            mh.save(path, value=torch.ones(3), step=1)
        except RuntimeError as error:
            pipe.send((str(error), time.monotonic() - began))
        os._exit(0)

    pipes = [fork.Pipe() for _ in range(3)]
    ranks = [fork.Process(target=live, args=(rank, pipes[rank][1])) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in set(range(3)) - {victim}:
        assert pipes[rank][0].poll(30.0)
        said, seconds = pipes[rank][0].recv()
        silent = "has sent no heartbeat for 2 s while it saved. Check its process."
        problem = "has ended while it saved." if number == signal.SIGKILL else silent
        assert f"rank {victim} {problem} This checkpoint is discarded" in said
        assert seconds < 15
    ranks[victim].kill()
    for rank in ranks:
        rank.join()
    assert [p.name for p in complete(path)] == ["000001-step-0"]
    assert [p.name.partition("-")[0] for p in (path / "000002-step-1").iterdir()] == ["worker"]
    mh.save(path, value=torch.ones(3), step=2)  # the same job: it removes what is left
    assert left(path) == []


def test_a_slow_worker_is_waited_for_longer_than_the_groups_timeout(tmp_path, monkeypatch):
    write = _format.write

    def slowly(*given):
        time.sleep(2 if dist.get_rank() else 0)
        return write(*given)

    def go():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        mh.save(tmp_path, model=torch.nn.Linear(2, 2), process_group=group)

    monkeypatch.setattr(_format, "write", slowly)
    run_ranks(2, go)
    assert len(complete(tmp_path)) == 1


def test_ranks_that_call_different_functions_are_an_error(tmp_path):
    mh.save(tmp_path, value=1)

    def go():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        (mh.load if dist.get_rank() else mh.save)(tmp_path, process_group=group)

    release_locks()
    raises_on_ranks(2, RuntimeError, go, match=r"has called mh\.(save|load), and .* within")


@pytest.mark.parametrize("at", ["folder", "file", "commit"])
def test_a_file_system_that_takes_no_more_files_leaves_nothing_half_made(at, tmp_path, monkeypatch):
    mh.save(tmp_path, value=torch.ones(3))
    full = OSError(errno.ENOSPC, "No space left on device")
    names = {"file": "worker-00000", "commit": ".index.json"}
    opened, mkdir = _folder.open_descriptor, Path.mkdir

    def no_file(path, *given):
        if at != "folder" and path.name.startswith(names[at]):
            raise full
        return opened(path, *given)

    def no_folder(path, *given, **options):
        if at == "folder" and path.name == "000002":
            raise full
        mkdir(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_folder, "open_descriptor", no_file)
        patch.setattr(Path, "mkdir", no_folder)
        with pytest.raises(OSError, match=r"does not fit into|No space left on device"):
            mh.save(tmp_path, value=torch.zeros(3))
    assert left(tmp_path) == []
    assert mh.load(tmp_path)["value"].tolist() == [1, 1, 1]


def test_a_rank_that_drops_a_failed_save_late_does_not_hinder_the_next(tmp_path, monkeypatch):
    rival = _folder.Folder(tmp_path / "run")
    create = _folder.open_descriptor
    drops = iter([True, True])

    def open_after_a_drop(path, flags=os.O_RDONLY):
        if path.name.startswith("worker-") and next(drops, False):
            rival.drop(path.parent.name, "worker-00003-earlier.safetensors")
        return create(path, flags)

    monkeypatch.setattr(_folder, "open_descriptor", open_after_a_drop)
    mh.save(tmp_path / "run", value=1)
    assert next(drops, None) is None
    assert mh.load(tmp_path / "run") == {"value": 1}
    monkeypatch.setattr(_folder, "NewFile", mock.Mock(side_effect=FileNotFoundError))
    with pytest.raises(OSError, match=r"another process removes .*000002\. Use a different path"):
        mh.save(tmp_path / "run", value=2)
    assert left(tmp_path / "run") == []


@pytest.mark.parametrize("waits", [False, True])
def test_an_asynchronous_error_surfaces_once(waits, tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    full = OSError(errno.ENOSPC, "full")

    def fail(*_):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(_folder.NewFile, "write", fail)
        saving = mh.save(tmp_path, model=model, wait=False)
        while not saving.done:
            pass
    assert "failed" in repr(saving)
    with pytest.raises(OSError, match="full"):
        saving.wait() if waits else mh.save(tmp_path, model=model)
    mh.save(tmp_path, model=model)
    assert len(complete(tmp_path)) == 1


def two_jobs(path, second):
    """Ranks 0 and 1 are a job that saves, ranks 2 and 3 another, which saves twice then."""
    rank = dist.get_rank()
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    _folder._process = f"job {rank // 2}"
    for turn, job in enumerate([0, 1, 1]):
        dist.barrier()
        if rank // 2 == job:
            with second() if job else contextlib.nullcontext():
                mh.save(path, value=turn, keep=2, process_group=mine)
    dist.barrier()
    return mine


def test_all_ranks_of_a_second_job_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "LOCK_TIMEOUT", 0.3)
    said = "another job saves to .* process .* Use a different path for each"

    def go():
        mine = two_jobs(tmp_path, lambda: pytest.raises(RuntimeError, match=said))
        if dist.get_rank() < 2:
            mh.save(tmp_path, value=3, process_group=mine)
        dist.barrier()
        return mh.load(tmp_path)["value"]

    assert run_ranks(4, go) == [3] * 4
    assert not left(tmp_path)


def test_without_locks_two_jobs_on_one_path_keep_their_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "fcntl", None)

    def go():
        mine = two_jobs(tmp_path, contextlib.nullcontext)
        if dist.get_rank() < 2:
            with pytest.raises(OSError, match="another job or worker also saves to"):
                mh.save(tmp_path, value=2, process_group=mine)
        dist.barrier()
        return mh.load(tmp_path)["value"]

    assert run_ranks(4, go) == [2] * 4
    # The second has kept two, and none of the first's is gone.
    assert [p.name for p in complete(tmp_path)] == ["000001", "000002", "000003"]


def test_without_locks_leftovers_of_another_job_are_left_until_they_are_old(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder.Folder, "lock", lambda *_: False)
    mh.save(tmp_path, value=1)
    theirs = tmp_path / "000002"
    theirs.mkdir()
    (theirs / "worker-00000-another-1.safetensors").write_bytes(b"begun")
    mh.save(tmp_path, value=2)
    assert left(tmp_path) == ["000002"]
    old = time.time() - _folder.OLD - 1
    for path in (*theirs.iterdir(), theirs):
        os.utime(path, (old, old))
    mh.save(tmp_path, value=3)
    assert left(tmp_path) == []


def test_ranks_that_do_not_share_a_folder_are_an_error(tmp_path):
    def save():
        os.chdir(tmp_path / str(dist.get_rank()))
        mh.save("run", value=1)

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    raises_on_ranks(2, ValueError, save, match="Pass a path that all ranks share")

    def load():
        mh.load(tmp_path / str(dist.get_rank()) / "run")

    mh.save(tmp_path / "0" / "run", value=1)
    raises_on_ranks(2, FileNotFoundError, load, match="does not exist on this rank")
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
    checkpoint = only(tmp_path)
    for path in checkpoint.iterdir():
        data = path.read_bytes()
        assert data[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")
        with pytest.raises(ValueError):
            list(pickletools.genops(data))


LAST_SAVE = """
import sys, time
import torch.distributed as dist
import manyhands as mh
from manyhands.checkpoint import _writing

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
send = _writing.SaveMessages.send
def send_and_pause(post, receipt):
    send(post, receipt)
    time.sleep(1.0)  # rank 0 has ended the save by now, and its script
_writing.SaveMessages.send = send_and_pause
mh.save(path, value=1)
"""


def test_rank_0_keeps_the_store_until_the_others_have_its_answer(tmp_path):
    """Rank 0's script ends with the save, and it has the store. All takes ten times as long."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    script = LAST_SAVE.replace("rank, path", "_writing.LINGER = 5.0\nrank, path")
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path / "run"), address],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said  # without the answer it looks itself
    assert "recvValue" not in said[1], said  # which torch says where the store is gone
    assert len(complete(tmp_path / "run")) == 1
