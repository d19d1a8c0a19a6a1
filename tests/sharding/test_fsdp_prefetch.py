"""Gathering order: who follows whom, and nothing that was gathered too early is used."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.sharding_oracle import assert_same, copied
from manyhands.sharding.fsdp._engine import _param_groups_of

from test_fsdp import compare, steps  # isort: skip


class Ways(nn.Module):
    """Runs its layers in the order that it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.double()

    def forward(self, x, order):
        for number in order:
            x = self.layers[number](x).tanh()
        return x


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, order, trains in batches:
        with torch.set_grad_enabled(trains):
            loss = model(x, order).square().mean()
        if trains:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()  # after a look without a backward, too: nothing cleans up before it


def test_whatever_way_a_forward_takes_parameters_are_those_of_the_last_step():
    random = torch.Generator().manual_seed(0)
    orders = (
        (0, 1, 2),
        (0, 1, 2),
        (0, 2),
        (0, 1, 2),
        (2, 1),
        (0, 1, 0, 2),
        (0, 1, 2),
        (1,),
        (1, 0),
    )
    batches = [
        (torch.randn(3, 4, 5, generator=random, dtype=torch.float64), order, step % 4 != 2)
        for step, order in enumerate(orders * 2)
    ]

    def run():
        model = Ways()
        for number, layer in enumerate(model.layers):
            model.layers[number] = mh.FSDP(layer)
        wrapped = mh.FSDP(model)
        trained(wrapped, [(x[dist.get_rank()], *rest) for x, *rest in batches])
        state = wrapped.state_dict()
        return [state[name] for name, _ in wrapped.named_parameters()]

    alone = Ways()
    trained(alone, [(x.flatten(0, 1), *rest) for x, *rest in batches])
    assert_same(run_ranks(3, run), copied(alone.parameters()), rtol=1e-9, atol=1e-11)


class Watched(nn.Linear):
    """Calls `watched` in the middle of its backward."""

    def watched(self, grad):
        pass

    def forward(self, x):
        result = super().forward(x)
        result.register_hook(lambda grad: self.watched(grad))
        return 2 * result


@pytest.mark.parametrize(
    ("overlap", "in_forward", "in_backward"),
    [
        (True, [[0, 1], [1, 2], [2]], [[1, 2], [0, 1], [0]]),
        (False, [[0], [1], [2]], [[2], [1], [0]]),
    ],
)
def test_whose_parameters_are_there_or_coming_while_one_computes(overlap, in_forward, in_backward):
    """And with `overlap` the last one's gradients are still leaving when the next one's begin."""
    seen = {"forward": [], "backward": [], "leaving": []}

    def run():
        model = nn.Sequential(*(mh.FSDP(Watched(4, 4), overlap=overlap) for _ in range(3)))
        wrapped = mh.FSDP(model, overlap=overlap)
        for _ in range(2):
            wrapped(torch.ones(1, 4)).sum().backward()
            wrapped.zero_grad()  # what is added to gradients is waited for at once
        flying = wrapped._root_state.reduce_queue._in_flight

        def look(kind):
            groups = [_param_groups_of(layer.module)[0] for layer in model]
            there = [n for n, g in enumerate(groups) if g.is_unsharded or g._all_gather_result]
            seen[kind].append(there)

        def look_back(*_):
            look("backward")
            seen["leaving"].append(len(flying))

        for layer in model:
            layer.module.register_forward_pre_hook(lambda *_: look("forward"))
            layer.module.watched = look_back
        wrapped(torch.ones(1, 4)).sum().backward()
        assert not flying
        return seen

    for rank in run_ranks(2, run):
        assert rank["forward"] == in_forward
        assert rank["backward"] == in_backward
        assert rank["leaving"] == ([0, 1, 1] if overlap else [0, 0, 0])


@pytest.mark.parametrize("kept", [False, True])
def test_without_overlap_the_numbers_are_the_same(kept):
    compare(steps, overlap=False, reshard_after_forward=not kept)
