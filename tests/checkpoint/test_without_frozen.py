"""`save(frozen=False)`: a checkpoint of what is trained, over a base that comes from elsewhere."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from manyhands.tools.cli._consolidate import open_newest

FROZEN = ("base.weight", "base.bias", "tied.weight", "tied.bias")


class Adapted(nn.Module):
    def __init__(self, seed=0, width=5):
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.norm = nn.Linear(5, width), nn.BatchNorm1d(width)
        self.adapter = nn.Linear(width, 5)
        self.tied = nn.Linear(5, width)
        self.tied.weight = self.base.weight
        for layer in (self.base, self.tied):
            layer.requires_grad_(False)

    def forward(self, x):
        return x + self.adapter(self.norm(self.base(x)))


def made(level, seed=0):
    model = Adapted(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return mh.shard(model, optimizer, level=level)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()


def whole(model):
    return {name.removeprefix("module."): t.clone() for name, t in model.state_dict().items()}


@pytest.mark.sample("0", "3")
@pytest.mark.parametrize("level", (0, 1, 2, 3))
def test_what_is_frozen_is_neither_saved_nor_loaded(level, tmp_path):
    def save():
        model, optimizer = made(level)
        step(model, optimizer)
        mh.save(tmp_path, model=model, optimizer=optimizer, frozen=False)
        step(model, optimizer)
        return whole(model)

    def resume(other):
        model, optimizer = made(other, seed=1)
        before = whole(model)
        mh.load(tmp_path, model=model, optimizer=optimizer)
        assert all(torch.equal(whole(model)[name], before[name]) for name in FROZEN)
        base = {name: value for name, value in Adapted(0).state_dict().items() if name in FROZEN}
        mh.load_weights(model, base, strict=False)  # from elsewhere
        step(model, optimizer)
        return whole(model)

    expected = run_ranks(2, save)[0]
    with open_newest(tmp_path) as reader:
        kept = {key.removeprefix("model/") for key in reader.tensors if key.startswith("model/")}
    assert kept == expected.keys() - {*FROZEN}

    for other in {level, (level + 2) % 4}:
        for found in run_ranks(2, resume, other):
            torch.testing.assert_close(found, expected)


def test_another_base_is_refused(tmp_path):
    def save():
        model, _ = made(2)
        mh.save(tmp_path, model=model, frozen=False)

    run_ranks(2, save)
    with pytest.raises(
        ValueError, match=r"'base.weight' is \(5, 5\) in the checkpoint and \(4, 5\)"
    ):
        mh.load(tmp_path, model=Adapted(width=4))
    without = Adapted()
    del without.base
    with pytest.raises(ValueError, match=r"only the checkpoint has 'base.bias', 'base.weight'"):
        mh.load(tmp_path, model=without)
    more = Adapted()
    more.second = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"only the model here has 'second.bias'"):
        mh.load(tmp_path, model=more)


@on_ranks(2, raises=ValueError, match="frozen")
def test_ranks_that_do_not_agree_about_it_are_told(tmp_path):
    model, _ = made(2)
    mh.save(tmp_path, model=model, frozen=dist.get_rank() == 0)
