"""Links, pipes and devices where a checkpoint's files should be: none is followed or opened."""

import os
import shutil

import pytest
import torch

import manyhands as mh
from helpers.damage import release_locks
from manyhands.checkpoint import _folder

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    mh.save(path, value=torch.ones(3), step=1)
    release_locks()
    return path


def test_a_link_as_the_lock_writes_nowhere_else(run, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(outside)
    with pytest.raises(ValueError, match=r"\.lock is not a regular file"):
        mh.save(run, value=1)
    assert outside.read_text() == "mine"
    outside.unlink()  # dangling: nothing is created
    with pytest.raises(ValueError, match=r"\.lock is not a regular file"):
        mh.save(run, value=1)
    assert not outside.exists()


@pytest.mark.parametrize("name", ["index.json", "worker-*"])
@pytest.mark.parametrize("kind", ["link", "fifo", "device", "folder", "dangling"])
def test_links_pipes_and_devices_instead_of_files_are_an_error_at_once(name, kind, run, tmp_path):
    (path,) = (run / "000001-step-1").glob(name)
    moved = path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    for where in (run, run / "000001-step-1"):
        with pytest.raises(ValueError, match="not a regular file"):
            mh.load(where)
    mh.save(run, value=1, keep=1)  # and nothing of it hinders a save
    assert mh.load(run) == {"value": 1}


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_pipe_or_folder_as_the_lock_is_an_error_at_once(kind, run):
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock") if kind == "fifo" else (run / ".lock").mkdir()
    with pytest.raises(ValueError, match="not a regular file"):
        mh.save(run, value=1)


def test_a_checkpoint_that_is_a_link_is_not_found_but_may_be_named(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run / "000001-step-1", elsewhere)
    (run / "000002-step-2").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"000002-step-2, the newest checkpoint in .* is a link"):
        mh.load(run)
    assert mh.load(run / "000002-step-2")["step"] == 1  # the user says which
    assert mh.load(elsewhere)["step"] == 1
    mh.save(run, value=2, keep=1)
    assert mh.load(run) == {"value": 2}
    assert (elsewhere / "index.json").exists() and (run / "000002-step-2").is_symlink()


def test_leftovers_that_are_links_are_left_and_what_links_in_them_lead_to(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (run / "000002").mkdir()  # left behind by a run that was killed
    (run / "000002" / f"worker-00000-{_folder.job_mark()}-1.safetensors").symlink_to(outside)
    (run / "000003").symlink_to(outside)
    mh.save(run, value=2)
    assert (outside / "file").read_text() == "mine"
    assert sorted(p.name for p in run.iterdir()) == [".lock", "000001-step-1", "000003", "000004"]


def test_a_path_that_leads_over_links_is_the_users_own(run, tmp_path):
    (tmp_path / "data").symlink_to(tmp_path)
    (tmp_path / "latest").symlink_to(run)
    for path in (tmp_path / "data" / "run", tmp_path / "latest", tmp_path / "data" / "latest"):
        mh.save(path, value=3)
        assert mh.load(path) == {"value": 3}
