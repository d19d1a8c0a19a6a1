"""Checkpoints in S3: a server of it runs on this machine."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.damage import save_forever, step_of_all
from helpers.ranks import run_ranks

pytest.importorskip("s3fs", reason="s3fs is not installed: make test-integrations")
pytest.importorskip("moto", reason="moto is not installed: make test-integrations")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: make test-integrations")


@pytest.fixture(scope="module")
def server():
    """The address of a server, which ranks find in the environment."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "none")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def url(server, request):
    """The path of a run in a new bucket. This process must not use s3fs: ranks are its forks."""
    name = f"bucket-{abs(hash(request.node.name)):x}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/runs/one"


def alone(fn, *args):
    """Call a function in a fork, and return what it returns."""
    return run_ranks(1, fn, *args)[0]


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 301), nn.Tanh(), nn.Linear(301, 3))


def prepare(level):
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return (
        mh.shard(model, optimizer, level=level) if dist.get_world_size() > 1 else (model, optimizer)
    )


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(12, 13)
        optimizer.zero_grad()
        model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        optimizer.step()


def loss(model):
    return model(torch.ones(2, 13)).square().sum().item()


@pytest.mark.parametrize("level", [2, 3])
def test_a_run_in_s3_continues_on_other_numbers_of_ranks(url, level):
    def first():
        model, optimizer = prepare(level)
        train(model, optimizer, 3)
        saving = mh.save(url, model=model, optimizer=optimizer, step=3, wait=False)
        assert str(saving.wait()) == f"{url}/000001-step-3"
        return loss(model)

    def then(step):
        model, optimizer = prepare(level)
        assert mh.load(url, model=model, optimizer=optimizer) == {"step": step}
        at_start = loss(model)
        train(model, optimizer, 1)
        mh.save(url, model=model, optimizer=optimizer, step=step + 1)
        return at_start

    saved = run_ranks(2, first)[0]
    for step, ranks in enumerate((1, 3, 2), start=3):
        assert run_ranks(ranks, then, step)[0] == pytest.approx(saved, rel=1e-6)
        saved = alone(lambda: _load_plain(url))


def _load_plain(url):
    model = new_model()
    mh.load(url, model=model)
    return loss(model)


def test_a_second_job_in_s3_is_noticed_by_the_bucket(url):
    def both():
        mh.save(url, value=1)
        fs = __import__("s3fs").S3FileSystem()
        with pytest.raises(FileExistsError):
            fs.pipe_file(f"{url}/000001/index.json", b"theirs", mode="create")
        return mh.load(url)["value"]

    assert alone(both) == 1


def test_a_bucket_that_is_not_there_is_an_error_on_every_rank(server):
    def save():
        with pytest.raises(OSError, match="bucket") as error:
            mh.save("s3://no-such-bucket/run", value=1)
        return type(error.value).__name__

    assert len(run_ranks(2, save)) == 2


@pytest.mark.parametrize("times", [5, pytest.param(45, marks=pytest.mark.long)])
def test_a_run_killed_at_any_moment_leaves_the_last_complete_one(url, times):
    choose, before = random.Random(times), None
    for _ in range(times):
        run = get_context("fork").Process(target=save_forever, args=(url, True, 40))
        run.start()
        while (found := alone(step_of_all, url, 40)) == before:
            time.sleep(0.05)
        time.sleep(choose.uniform(0, 0.5))
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
        before = alone(step_of_all, url, 40)
        assert found is not None and before is not None
