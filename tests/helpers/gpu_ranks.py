"""Ways to train on a GPU, alone and as two ranks of one card.

Ranks are spawned: a fork cannot use a GPU that its parent has touched. Each returns what it has
trained by every way, or the traceback.
"""

import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.sharding_oracle import loss_of, make_batches, make_model

STEPS = 7
BLOCKS: dict[str, Callable[..., Any]] = {
    "LocalSGD": partial(mh.LocalSGD, every=3),
    "BMUF": partial(mh.BMUF, block_momentum=0.5, global_sync_iter=3, warmup_iterations=2),
    "SlowMo": partial(mh.SlowMo, every=3),
    "DiLoCo": partial(mh.DiLoCo, every=3),
    "DiLoCo int8, overlap": partial(mh.DiLoCo, every=3, codec="int8", overlap=1),
    "DiLoCo, fragments": partial(mh.DiLoCo, every=4, fragments=2),
}


def train(model, optimizer, device, wrapped=None):
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x, y = (t.to(device) for t in make_batches(STEPS, 1, workers))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped or model, x[step, 0, rank], y[step, 0, rank]).backward()
        optimizer.step()
    if isinstance(optimizer, mh.Blocks):
        optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def train_in_blocks(kind, inner, device):
    model = make_model().to(device)
    optimizer = inner(model.parameters(), lr=0.02)
    return train(model, BLOCKS[kind](optimizer), device)


def _rule(rule, inner, device, **options):
    model = make_model().to(device)
    wrapped = DistributedDataParallel(model)
    optimizer = rule(inner(model.parameters(), lr=0.02, **options), measure_every=1)
    return train(model, optimizer, device, wrapped)


def _oss(device):
    model = make_model().to(device)
    optimizer = mh.OSS(model.parameters(), optim=AdamW, lr=0.02)
    return train(model, optimizer, device, DistributedDataParallel(model))


def _sharded_ddp(device):
    model = make_model().to(device)
    optimizer = mh.OSS(model.parameters(), optim=AdamW, lr=0.02)
    return train(model, optimizer, device, mh.ShardedDataParallel(model, optimizer))


WAYS: dict[str, Callable[..., Any]] = {
    "AdaScale on DDP": partial(_rule, mh.AdaScale, SGD, momentum=0.9),
    "AdamScale on DDP": partial(_rule, mh.AdamScale, AdamW),
    "OSS on DDP": _oss,
    **{kind: partial(train_in_blocks, kind, SGD) for kind in BLOCKS},
}
ALL = {**WAYS, "ShardedDataParallel": _sharded_ddp}


def trained_by_two(device, folder, ways=tuple(WAYS)):
    """Train every way on two ranks through gloo; per rank the parameters of each way."""
    torch.multiprocessing.spawn(_live, (device, str(folder), list(ways)), nprocs=2)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in (0, 1)]


def _live(rank, device, folder, ways):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    found: dict[str, list[torch.Tensor] | str] = {}
    for way in ways:
        try:
            found[way] = [p.cpu() for p in ALL[way](device)]
        except Exception:
            found[way] = traceback.format_exc()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
