"""Error messages of training that survives lost ranks, each in a fork of this process."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import manyhands as mh
from helpers.crew_workers import fork
from helpers.run_command import Command
from helpers.surviving import NEEDS_TORCH


def message_of(folder, mistake):
    """Call a function in a fork. Return its error as text."""
    path = folder / "message"

    def call():
        try:
            mistake(folder)
        except Exception as error:
            path.write_text(f"{type(error).__name__}: {error}")

    pid = fork(call, folder / "errors")
    assert os.waitpid(pid, 0)[1] == 0, (folder / "errors").read_text()
    assert path.exists(), "no error"
    return path.read_text()


def objects(keep="batch", wrap=DistributedDataParallel, **options):
    """Return a job and its objects, in step."""
    job = mh.start(survive=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cursor = mh.Cursor(torch.randn(16, 4), 8, optimizer=optimizer, keep=keep)
    return job, {"model": wrap(model, **options), "optimizer": optimizer, "cursor": cursor}


def test_old_torch(monkeypatch):
    monkeypatch.delattr(dist, "_reconfigure", raising=False)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.15 or later.* got torch \d.* Update"):
        mh.start(survive=True)


def closure(folder):
    job, state = objects()
    job.load(**state)
    state["optimizer"].step(lambda: None)


def closure_of_a_rule(folder):
    job, state = objects()
    state["optimizer"] = mh.AdaScale(state["optimizer"])
    job.load(**state)
    state["optimizer"].step(lambda: None)


def unused_parameters(folder):
    job, state = objects(find_unused_parameters=True)
    job.load(**state)


def no_cursor(folder):
    job, state = objects()
    del state["cursor"]
    job.load(**state)


def two_cursors(folder):
    job, state = objects()
    job.load(**state, other=mh.Cursor(range(8), 4))


class Endless(IterableDataset):
    num_shards = 1

    def shard(self, num_shards, index):
        return self

    def __iter__(self):
        yield from range(8)


def stream(folder):
    job, state = objects()
    state["cursor"] = mh.Cursor(Endless(), 4)
    job.load(**state)


def ramp(folder):
    job, state = objects()
    state["optimizer"] = mh.AdaScale(state["optimizer"])
    job.load(**state)
    for _ in mh.Ramp(state["optimizer"], 16).over(state["cursor"]):
        pass


def micro(folder):
    job, state = objects(keep="micro")
    job.load(**state)


def no_model(folder):
    job, state = objects()
    del state["model"]
    job.load(**state)


def no_wrapper(folder):
    job, state = objects(wrap=lambda model: model)
    job.load(**state)


def sharded_optimizer(folder):
    job, state = objects()
    params = state["model"].parameters()
    state["optimizer"] = mh.OSS(params, optim=torch.optim.SGD, lr=0.1)
    job.load(**state)


def sharded(level):
    def mistake(folder):
        job = mh.start(survive=True)
        model = nn.Linear(4, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mh.shard(model, inner, level=level)
        cursor = mh.Cursor(torch.randn(16, 4), 8, optimizer=optimizer)
        job.load(model=model, optimizer=optimizer, cursor=cursor)

    return mistake


def group_before(folder):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mh.start(survive=True)


def load_twice(folder):
    job, state = objects()
    job.load(**state)
    job.load(**state)


def no_load(folder):
    _, state = objects()
    state["optimizer"].step()


def torchrun(folder):
    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="x")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2")
    mh.start(survive=True)


MISTAKES = {
    "no load": (no_load, r"RuntimeError: with survive=True, .*Call job\.load\("),
    "torchrun": (torchrun, "RuntimeError: survive=True needs a store .*torchrun.*manyhands run"),
    "closure": (closure, r"TypeError: survive=True does not support step\(closure\)"),
    "closure of a rule": (closure_of_a_rule, r"TypeError: survive=True does not support step\(clo"),
    "unused parameters": (unused_parameters, "ValueError: .*find_unused_parameters=True.*Remove"),
    "no cursor": (no_cursor, r"ValueError: survive=True needs a single Cursor .* got none\. Pass"),
    "two cursors": (two_cursors, r"ValueError: survive=True needs a single Cursor .* got Cursor"),
    "stream": (stream, r"ValueError: survive=True needs a single Cursor .*with a length"),
    "ramp": (ramp, "ValueError: survive=True does not support Ramp"),
    "keep micro": (micro, 'ValueError: survive=True .*keep="batch"'),
    "no model": (no_model, r"ValueError: survive=True .*Pass job\.load\(model="),
    "no wrapper": (no_wrapper, "ValueError: survive=True needs a model in DistributedDataParallel"),
    "OSS": (sharded_optimizer, "ValueError: survive=True .* got OSS.*checkpoints"),
    "level 1": (sharded(1), "ValueError: survive=True .*checkpoints"),
    "level 2": (sharded(2), "ValueError: survive=True .*checkpoints"),
    "level 3": (sharded(3), "ValueError: survive=True .*checkpoints"),
    "group before": (group_before, "RuntimeError: survive=True makes the process group.*Remove"),
    "load twice": (load_twice, r"RuntimeError: this rank has joined the run already\. Call load"),
}


@NEEDS_TORCH
@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises(tmp_path, monkeypatch, mistake, message):
    monkeypatch.chdir(tmp_path)
    found = message_of(tmp_path, mistake)
    assert re.search(message, found), found


@NEEDS_TORCH
def test_workers_with_several_processes(tmp_path):
    script = """
        import manyhands as mh
        mh.start(survive=True)
    """
    with Command(tmp_path, script, "--workers", "1", "--processes", "2") as command:
        assert command.wait(60) != 0
        assert (
            "survive=True needs workers with a single process, got workers with 2" in command.said()
        )
