"""Checkpoints in a bucket: fsspec's memory has one in this process."""

import random
import time

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from typer.testing import CliRunner

import manyhands as mh
from manyhands.checkpoint import _cloud, _folder, folder_at
from manyhands.tools.cli import app

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def bucket():
    """The file system of an empty bucket."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return [t.clone() for t in [*model.parameters(), *moments]]


def save_twice():
    """Save steps 1 and 2; return the path of the second, and what it has."""
    model, optimizer = trained()
    for step in (1, 2):
        saving = mh.save(URL, model=model, optimizer=optimizer, step=step, best=[0.5, "x"])
    return saving.path, state_of(model, optimizer)


def names(bucket):
    return [each["name"].rpartition("/")[2] for each in bucket.ls("/bucket/run")]


def a_save_of_another_job(bucket, name, monkeypatch):
    with monkeypatch.context() as other:
        other.setenv("MANYHANDS_RUN", "other")
        bucket.pipe_file(f"/bucket/run/{name}/worker-00000-{_folder.new_token()}.safetensors", b"x")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_continues_from_a_bucket(asynchronous):
    model, optimizer = trained()
    saving = mh.save(URL, model=model, optimizer=optimizer, step=7, wait=not asynchronous)
    assert str(saving.wait()) == "memory://bucket/run/000001-step-7"
    assert saving.path.name == "000001-step-7" and saving.path.parent == _folder.to_path(URL)
    for path in (URL, saving.path, str(saving.path)):
        model_2, optimizer_2 = trained(seed=1)
        assert mh.load(path, model=model_2, optimizer=optimizer_2) == {"step": 7}
        for ours, theirs in zip(
            state_of(model_2, optimizer_2), state_of(model, optimizer), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_a_url_of_a_file_is_a_folder(tmp_path):
    mh.save(f"file://{tmp_path}/run", value=3)
    assert mh.load(tmp_path / "run") == {"value": 3}


def test_only_the_newest_are_kept(bucket):
    for step in range(5):
        mh.save(URL, step=step, keep=2)
    assert names(bucket) == ["000004-step-3", "000005-step-4"]


def test_a_job_goes_through_a_url():
    job = mh.start(process_group=False, checkpoints=URL)
    model, _ = trained()
    assert str(job.save(model=model, step=3)) == f"{URL}/000001-step-3"
    assert job.load(model=model) == {"step": 3}


def test_a_load_fetches_each_byte_once(monkeypatch):
    path, _ = save_twice()
    asked = []

    def cat_file(self, name, start=None, end=None, **kwargs):
        asked.append(end - start)
        return fetch(self, name, start=start, end=end, **kwargs)

    fetch = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    model, optimizer = trained(seed=1)
    mh.load(path, model=model, optimizer=optimizer)
    sizes = folder_at(path.parent).sizes(path.name)
    assert sum(asked) < 1.05 * sum(sizes.values())
    assert len(asked) < 25  # neighbouring tensors come together


def test_damage_is_found_before_anything_changes(bucket):
    path, _ = save_twice()
    (name,) = [n for n in folder_at(URL).sizes(path.name) if n.startswith("worker")]
    file = f"/bucket/run/{path.name}/{name}"
    choose, whole = random.Random(0), bucket.cat_file(file)
    for _ in range(20):
        harmed = bytearray(whole)
        harmed[choose.randrange(len(harmed))] ^= 1 << choose.randrange(8)
        bucket.pipe_file(file, bytes(harmed))
        model, optimizer = trained(seed=1)
        before = state_of(model, optimizer)
        with pytest.raises(ValueError, match="damaged"):
            mh.load(path, model=model, optimizer=optimizer)
        for old, new in zip(before, state_of(model, optimizer), strict=True):
            assert torch.equal(old, new)
    bucket.rm_file(file)
    with pytest.raises(FileNotFoundError, match="is missing"):
        mh.load(path, model=model)


def test_what_a_killed_run_left_is_removed_and_other_jobs_files_are_not(bucket, monkeypatch):
    monkeypatch.setenv("MANYHANDS_RUN", "mine")
    bucket.pipe_file(f"/bucket/run/000001/worker-00000-{_folder.new_token()}.safetensors", b"x")
    a_save_of_another_job(bucket, "000002", monkeypatch)
    assert mh.save(URL, value=1).path.name == "000003"
    assert names(bucket) == ["000002", "000003"]
    monkeypatch.setattr(_folder, "OLD", -1.0)
    time.sleep(0.01)
    mh.save(URL, value=2)
    assert names(bucket) == ["000003", "000004"]


def test_another_jobs_checkpoints_stay(bucket, monkeypatch):
    monkeypatch.setenv("MANYHANDS_RUN", "other")
    mh.save(URL, value="other")
    monkeypatch.setenv("MANYHANDS_RUN", "mine")
    for value in range(3):
        mh.save(URL, value=value, keep=1)
    assert names(bucket) == ["000001", "000004"]


def test_a_second_job_that_writes_the_same_checkpoint_is_an_error(bucket, monkeypatch):
    check = _cloud.Bucket.check_ours

    def late(folder, name, token):
        check(folder, name, token)
        # Between the check and the request another job has written its commit.
        if not bucket.exists(f"/bucket/run/{name}/index.json"):
            bucket.pipe_file(f"/bucket/run/{name}/index.json", b"theirs")

    monkeypatch.setattr(_cloud.Bucket, "check_ours", late)
    with pytest.raises(OSError, match="another job or worker also saves to memory://bucket/run"):
        mh.save(URL, value=1)
    assert bucket.cat_file("/bucket/run/000001/index.json") == b"theirs"


def test_a_file_that_fails_leaves_no_checkpoint(bucket, monkeypatch):
    save_twice()
    write = type(bucket.open("/x", "wb"))

    def fail(self, data):
        raise OSError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(write, "write", fail, raising=False)
        with pytest.raises(OSError, match="the network is gone"):
            mh.save(URL, value=torch.ones(9))
    assert names(bucket) == ["000001-step-1", "000002-step-2"]


def test_a_listing_that_fails_removes_nothing(bucket, monkeypatch):
    save_twice()

    def fail(self, path, **kwargs):
        if "00000" in path:
            raise OSError("the network is gone")
        return listing(self, path, **kwargs)

    listing = MemoryFileSystem.ls
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", fail)
        with pytest.raises(OSError, match="the network is gone"):
            mh.save(URL, value=1)
    assert names(bucket) == ["000001-step-1", "000002-step-2"]


def test_nothing_there_is_said_as_for_a_folder():
    with pytest.raises(FileNotFoundError, match="memory://bucket/run is empty"):
        mh.load(URL)


def test_the_command_line_takes_urls(tmp_path):
    save_twice()
    shown = CliRunner().invoke(app(), ["checkpoint", "inspect", URL, "--verify"])
    assert shown.exit_code == 0 and "all checksums match" in shown.output
    written = CliRunner().invoke(app(), ["checkpoint", "consolidate", URL, str(tmp_path)])
    assert written.exit_code == 0, written.output
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "optimizer.pt"}


def test_without_fsspec_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r'pip install "manyhands\[cloud\]"'):
        mh.save(URL, value=1)


def test_a_commit_that_is_there_and_not_seen_is_an_error(bucket, monkeypatch):
    def taken(self, *args, **kwargs):
        raise FileExistsError("it is there")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", taken)
    with pytest.raises(FileExistsError):
        mh.save(URL, value=1)
