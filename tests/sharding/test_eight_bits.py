"""Optimizers with 8-bit state under sharding: equal to DDP bit for bit, or an error."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages and the compiler

KINDS = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}


@pytest.fixture(params=KINDS)
def kind(request):
    pytest.importorskip(request.param)
    return importlib.import_module(KINDS[request.param]).AdamW8bit


def make_model():
    torch.manual_seed(0)
    # From 4,096 elements on, the state has 8 bits.
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))


def with_ddp(kind):
    model = make_model()
    return DistributedDataParallel(model), kind(model.parameters(), lr=0.01)


def with_level_1(kind):
    model = make_model()
    optimizer = mh.OSS(model.parameters(), optim=kind, lr=0.01)
    return DistributedDataParallel(model), optimizer


def with_level_2(kind):
    model = make_model()
    optimizer = mh.OSS(model.parameters(), optim=kind, lr=0.01)
    return mh.ShardedDataParallel(model, optimizer), optimizer


def with_level_3(kind):
    model = mh.FSDP(make_model())
    return model, mh.WholeTensorOptimizer(model.parameters(), optim=kind, lr=0.01)


def train(model, optimizer, steps):
    rank = torch.distributed.get_rank()
    for step in range(steps):
        x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(step))[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    full = [getattr(param, "full_tensor", lambda p=param: p)() for param in model.parameters()]
    return [param.detach().clone() for param in full]


@pytest.mark.parametrize("make", [with_level_1, with_level_2, with_level_3])
def test_it_trains_as_under_ddp(kind, make, tmp_path):
    def compare():
        ddp = with_ddp(kind)
        ours = make(kind)
        for steps in (4, 2):
            expected = train(*ddp, steps)
            found = train(*ours, steps)
            assert all(map(torch.equal, expected, found))
            if "torchao" in kind.__module__:  # cannot be saved
                return
            mh.save(tmp_path, model=ours[0], optimizer=ours[1])
            ours = make(kind)
            mh.load(tmp_path, model=ours[0], optimizer=ours[1])

    run_ranks(2, compare)


def test_mistakes(kind, tmp_path):
    def shard():
        model = make_model()
        mh.shard(model, kind(model.parameters(), lr=0.01), level=3)

    def step_shards():
        model = mh.FSDP(make_model())
        train(model, kind(model.parameters(), lr=0.01), steps=1)

    def save():
        model, optimizer = with_level_2(kind)
        train(model, optimizer, steps=1)
        mh.save(tmp_path, model=model, optimizer=optimizer)

    raises_on_ranks(2, ValueError, shard, match="mh.OSS .*level 3 an mh.WholeTensorOptimizer")
    raises_on_ranks(2, TypeError, step_shards, match="full tensors. Use .*WholeTensorOptimizer")
    if "torchao" in kind.__module__:
        raises_on_ranks(2, TypeError, save, match="tensors with memory, got a OptimState8bit")
