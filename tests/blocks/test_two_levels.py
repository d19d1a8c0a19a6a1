"""Inside fast, between slow: four workers in two replicas, under every way to share out a replica.

The plain run: each replica is one process with its whole batch, and after every third step the
outer step is taken between the two.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks

STEPS, EVERY = 9, 3


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step, replica, part=slice(None)):
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return x[part], x[part, :3].sin()


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def plain(lr, momentum):
    models = [model_of(), model_of()]
    optimizers = [AdamW(model.parameters(), lr=0.05) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    memory = [torch.zeros_like(a) for a in anchor]
    for step in range(1, STEPS + 1):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, *batch(step, replica)).backward()
            optimizer.step()
        if step % EVERY:
            continue
        with torch.no_grad():
            for a, m, *ps in zip(anchor, memory, *(x.parameters() for x in models), strict=True):
                g = a - (ps[0] + ps[1]) / 2
                m.mul_(momentum).add_(g)
                a.sub_(lr * (g + momentum * m))
                for p in ps:
                    p.copy_(a)
    return [p.detach() for p in models[0].parameters()]


def ddp(model, inner):
    inside = DistributedDataParallel(model, process_group=inner)
    return inside, AdamW(model.parameters(), lr=0.05), {"inner_group": inner}


def sharded(model, inner):
    optimizer = mh.OSS(model.parameters(), optim=AdamW, group=inner, lr=0.05)
    inside = mh.ShardedDataParallel(model, optimizer, process_group=inner)
    return inside, optimizer, {"inner_group": inner}


def fully_sharded(model, inner):
    model = mh.FSDP(model, process_group=inner)
    return model, AdamW(model.parameters(), lr=0.05), {}


def scaled(model, inner):
    inside = DistributedDataParallel(model, process_group=inner)
    rule = mh.LinearScale(AdamW(model.parameters(), lr=0.05), process_group=inner, scale=1.0)
    return inside, rule, {"inner_group": inner}


@pytest.mark.sample("0-ddp", "2-scaled")
@pytest.mark.parametrize("how", [ddp, sharded, fully_sharded, scaled])
@pytest.mark.parametrize("overlap", [0, 2])
def test_two_replicas_of_two_workers(how, overlap):
    def train():
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        inner, outer = groups[rank // 2], groups[2 + rank % 2]
        inside, optimizer, options = how(model_of(), inner)
        optimizer = mh.DiLoCo(
            optimizer, every=EVERY, process_group=outer, overlap=overlap, **options
        )
        part = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(inside, *batch(step, rank // 2, part)).backward()
            optimizer.step()
        optimizer.synchronize()
        if how is fully_sharded:
            state = inside.state_dict()
            return [state[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
        return [p.detach() for p in inside.module.parameters()]

    results = run_ranks(4, train)
    for params in results:
        for param, first in zip(params, results[0], strict=True):
            assert torch.equal(param, first)
    if not overlap:
        for param, whole in zip(results[0], plain(0.7, 0.9), strict=True):
            torch.testing.assert_close(param, whole, rtol=1e-9, atol=1e-9)


def test_fragments_of_shares():
    """Each fragment is a third of each share: after a step it is the same in both replicas."""

    def train():
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        inside, optimizer, options = ddp(model_of(), groups[rank // 2])
        optimizer = mh.LocalSGD(
            optimizer, every=EVERY, process_group=groups[2 + rank % 2], fragments=3, **options
        )
        seen = []
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(inside, *batch(step, rank // 2)).backward()
            optimizer.step()
            seen.append(nn.utils.parameters_to_vector(inside.parameters()).detach())
        return torch.stack(seen)

    one, one_too, other, other_too = run_ranks(4, train)
    assert torch.equal(one, one_too) and torch.equal(other, other_too)
    first, second = one.shape[1] // 2, one.shape[1] - one.shape[1] // 2  # the shares
    for step, same in enumerate(one == other):
        fragment = step % 3
        start, stop = first * fragment // 3, first * (fragment + 1) // 3
        expected = torch.zeros(len(same), dtype=torch.bool)
        expected[start:stop] = True
        expected[first + second * fragment // 3 : first + second * (fragment + 1) // 3] = True
        assert torch.equal(same, expected)


@on_ranks(4)
def test_a_worker_whose_processes_are_not_all_finite_is_left_out_as_a_whole():
    """A buffer is infinite in one process of the first worker: no worker may average its slice."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    inner, outer = groups[rank // 2], groups[2 + rank % 2]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    inner_optimizer = AdamW(model.parameters(), lr=0.1)
    optimizer = mh.LocalSGD(
        inner_optimizer, every=1, model=model, process_group=outer, inner_group=inner
    )
    if rank == 1:
        model[1].running_mean.fill_(float("inf"))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    finite = all(t.isfinite().all() for t in [*model.parameters(), *model.buffers()])
    assert (optimizer.left_out, bool(finite)) == ([0], True)
