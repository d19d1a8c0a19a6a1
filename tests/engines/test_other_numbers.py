"""A run that goes on in another number of ranks: the batch stays, or it follows the ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import manyhands as mh
from helpers.ranks import run_ranks


def train(folder, passes, steps):
    """Take some steps from the last checkpoint on, and save; return what a user would look at."""
    job = mh.start(checkpoints=folder)
    assert (job.rank, job.world_size) == (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    ddp = DistributedDataParallel(model)
    sgd = SGD(model.parameters(), lr=0.05)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=passes)
    cosine = CosineAnnealingLR(optimizer, T_max=100)
    scheduler = mh.ProgressScheduler(cosine, optimizer, end=100)
    step = job.load(model=model, optimizer=optimizer, scheduler=scheduler).get("step", 0)
    loaded = optimizer.progress
    for _ in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            seed = step * passes * job.world_size + job.rank * passes + number
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            ((ddp(x) - x.sum(dim=1, keepdim=True)).square().mean() / passes).backward()
        optimizer.step()
        scheduler.step()
        step += 1
    job.save(model=model, optimizer=optimizer, scheduler=scheduler, step=step)
    return [loaded, optimizer.progress, optimizer.scale, sgd.param_groups[0]["lr"]]


@pytest.mark.parametrize(("passes", "scale"), [(1, 4.0), (4, 16.0)])
def test_from_two_ranks_to_four(passes, scale, tmp_path):
    """Two passes on two ranks are a batch of four: one pass on four ranks is the same batch."""
    before = run_ranks(2, train, tmp_path / "run", 2, 6)
    assert before[0][2] == 4.0
    (loaded, progress, now, rate), *others = run_ranks(4, train, tmp_path / "run", passes, 6)
    assert all(other == [loaded, progress, now, rate] for other in others)
    assert loaded == before[0][1]
    assert now == scale
    assert 6.0 <= progress - loaded <= 6 * scale
    # The schedule follows progress (its whole steps), and not the number of steps.
    assert rate == pytest.approx(0.025 * (1 + math.cos(math.pi * int(progress) / 100)))


def test_the_same_batch_on_fewer_ranks_is_the_same_training(tmp_path):
    run_ranks(2, train, tmp_path / "a", 2, 6)
    run_ranks(2, train, tmp_path / "b", 2, 6)
    same = run_ranks(2, train, tmp_path / "a", 2, 6)[0]
    fewer = run_ranks(1, train, tmp_path / "b", 4, 6)[0]
    assert fewer == pytest.approx(same, rel=1e-5)
