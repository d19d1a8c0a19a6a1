"""Blocks around a model whose gradients are averaged already: said when made, or after a block."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import on_ranks
from manyhands.blocks.averaging._codec import CODECS


def warnings_of(fn):
    """What a function warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def train(module, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.sample("2-0-float32", "2-1-bfloat16", "3-0-int4", "3-1-ternary")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("workers", [2, 3])
@on_ranks("workers")
def test_ddp_that_comes_later_is_seen_in_the_first_block(codec, overlap, workers):
    """As in trainers, which wrap the model after the optimizer was made."""
    torch.manual_seed(0)
    model = nn.Linear(6, 50)
    inner = AdamW(model.parameters(), lr=0.1)
    optimizer = mh.DiLoCo(inner, every=2, codec=codec, overlap=overlap)
    ddp = DistributedDataParallel(model)
    messages = warnings_of(lambda: train(ddp, optimizer, 8, dist.get_rank()))
    assert len(messages) == 1  # once, and no more
    assert f"all {workers} workers have taken the same steps" in messages[0]
    assert "DistributedDataParallel" in messages[0] and "same samples" in messages[0]


@pytest.mark.parametrize("codec", CODECS)
@on_ranks(2)
def test_movements_of_normal_sizes_are_seen_to_be_equal_too(codec):
    param = nn.Parameter(torch.zeros(4_000))
    optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=1, codec=codec)
    param.grad = torch.randn(4_000, generator=torch.Generator().manual_seed(0))
    messages = warnings_of(optimizer.step)
    assert len(messages) == 1 and "have taken the same steps" in messages[0]


@pytest.mark.parametrize("codec", ["float32", "int4", "ternary"])
@on_ranks(2)
def test_workers_that_go_their_own_ways_are_no_cause_for_a_warning(codec):
    """Nor are those that go the opposite way, as far, or not at all."""
    torch.manual_seed(0)
    model = nn.Linear(6, 50)
    optimizer = mh.LocalSGD(SGD(model.parameters(), lr=0.1), every=2, codec=codec)
    messages = warnings_of(lambda: train(model, optimizer, 6, dist.get_rank()))
    for sign in (0.0, 1.0 - 2.0 * dist.get_rank()):
        param = nn.Parameter(torch.ones(100))
        optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=1, codec=codec)
        param.grad = torch.full((100,), sign)
        messages += warnings_of(optimizer.step)
    assert messages == []


@pytest.mark.parametrize("how", ["oss", "rule"])
@on_ranks(2, raises=ValueError, match="OSS shards its updates")
def test_what_is_certain_is_an_error(how):
    model = nn.Linear(6, 5)
    inner = mh.OSS(model.parameters(), optim=SGD, lr=0.1)
    mh.LocalSGD(mh.LinearScale(inner) if how == "rule" else inner)


@on_ranks(4)
def test_inside_of_each_inner_group_gradients_are_averaged():
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    inner, outer = groups[rank // 2], groups[2 + rank % 2]
    model = nn.Linear(6, 5)
    ddp = DistributedDataParallel(model, process_group=inner)
    options = {"process_group": outer, "inner_group": inner, "every": 2, "model": ddp}

    def run():
        optimizer = mh.DiLoCo(SGD(model.parameters(), lr=0.1), **options)
        train(ddp, optimizer, 4, rank)

    assert warnings_of(run) == []
