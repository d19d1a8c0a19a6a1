"""Runs that are resumed on another number of ranks, with the DataLoader's forked workers.

`mh.load` makes a group of its own and closes it when training begins, while the ranks fork the
loader's processes, which inherit the group's sockets.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import manyhands as mh
from helpers.ranks import run_ranks

REPEATS = 4  # of each of six cases


class Rows(Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator)


def train(folder, keep, *, steps, resume):
    """Train, saving every third step; return the model's parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cursor = mh.Cursor(
        Rows(),
        batch_size=24 if keep == "batch" else 4,
        keep=keep,
        optimizer=optimizer,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    ddp = DistributedDataParallel(model)
    if resume:
        mh.load(folder, model=model, optimizer=optimizer, cursor=cursor)
    for step, rows in enumerate(itertools.islice(cursor, steps)):
        optimizer.zero_grad()
        ddp(rows).square().mean().backward()
        optimizer.step()
        if step % 3 == 2:
            mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)
    dist.barrier()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.long
@pytest.mark.parametrize("keep", ["micro", "batch"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 3)])
def test_resumed_runs_with_forked_loaders_do_not_abort(tmp_path, before, after, keep):
    for repeat in range(REPEATS):
        folder = tmp_path / str(repeat)
        run_ranks(before, train, folder, keep, steps=3, resume=False)
        first, *others = run_ranks(after, train, folder, keep, steps=5, resume=True)
        assert torch.isfinite(first).all()
        assert all(torch.equal(first, other) for other in others)
