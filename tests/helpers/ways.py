"""The ways to hold a model's state on several ranks: the list of the contract of shardings.

A way takes a plain module, a function that returns its parameters (a wrap replaces them), and the
optimizer's class and options. It returns the model and the optimizer. A new sharding joins here.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.new_sharding import Alternate, Around


def under_ddp(module, params, optim, group=None, **options):
    return DistributedDataParallel(module, process_group=group), optim(params(), **options)


def oss(module, params, optim, group=None, **options):
    optimizer = mh.OSS(params(), optim, group, bucket_size=64, **options)
    return DistributedDataParallel(module, process_group=group), optimizer


def sharded_ddp(module, params, optim, group=None, **options):
    optimizer = mh.OSS(params(), optim, group, bucket_size=64, **options)
    return mh.ShardedDataParallel(module, optimizer, process_group=group), optimizer


def fsdp(module, params, optim, group=None, **options):
    for each in module.children():  # it takes no other order of memory
        each.to(memory_format=torch.contiguous_format)
    name, last = list(module.named_children())[-1]
    setattr(module, name, mh.FSDP(last, process_group=group))
    return mh.FSDP(module, process_group=group), optim(params(), **options)


def hybrid(copies):
    """`fsdp` on a mesh of copies, and of the ranks that each is sharded over."""

    def way(module, params, optim, group=None, **options):
        shape = (copies, dist.get_world_size() // copies)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
        return fsdp(module, params, optim, mesh, **options)

    return way


def alternate(module, params, optim, group=None, **options):
    return Around(module, group), Alternate(params(), optim, group, **options)


# Which checkpoints are for: any number of ranks, groups, frozen and tied parameters.
WAYS = {
    "plain": under_ddp,
    "OSS": oss,
    "ShardedDataParallel": sharded_ddp,
    "FSDP": fsdp,
}
HYBRID = {"FSDP, 2 x 2": hybrid(2), "FSDP, 1 x 4": hybrid(1)}
CONTRACT = {**WAYS, **HYBRID, "Alternate": alternate}
