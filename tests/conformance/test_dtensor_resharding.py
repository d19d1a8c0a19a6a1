"""torch's resharding tests of distributed checkpoints, with `mh.save` and `mh.load`.

The cases are those of pytorch's `test/distributed/checkpoint/`: `test_dtensor_resharding.py`
(0554fa8), `test_dtensor_checkpoint.py` (1f30f74), `test_hsdp_checkpoint.py` (001b303),
`test_fsdp_model_state.py` (02f1c1a), `test_fsdp_optim_state.py` (05a963f), `test_tp_checkpoint.py`
(0734fe0) and `test_fsdp_tp_checkpoint_conversion.py` (3f0959b). The FSDP cases use `fully_shard`.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # slow, so imported before ranks are forked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import manyhands as mh
from helpers.ranks import on_ranks

VALUES = torch.arange(16.0).view(4, 4)
LAYOUTS = [  # mesh, placements
    *(((4,), [placement]) for placement in (Shard(0), Replicate())),
    *(((2, 2), list(pair)) for pair in itertools.product((Replicate(), Shard(0)), repeat=2)),
]


class Holder(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))
        self.extra = 1

    def get_extra_state(self):
        return {"extra": self.extra, "tensor": torch.full((1,), float(self.extra))}

    def set_extra_state(self, state):
        assert state["tensor"].item() == state["extra"]
        self.extra = state["extra"]


@on_ranks(4)
def test_every_placement_loads_into_every_other(tmp_path):
    """All changes of the placement and of the mesh, from and to one and two dimensions."""
    for number, (shape, placements) in enumerate(LAYOUTS):
        saved = distribute_tensor(VALUES, init_device_mesh("cpu", shape), placements)
        mh.save(tmp_path / str(number), model=Holder(tensor=saved))
        for other, new in LAYOUTS:
            mesh = init_device_mesh("cpu", other)
            model = Holder(tensor=zeros([4, 4], device_mesh=mesh, placements=new))
            mh.load(tmp_path / str(number), model=model)
            assert model.tensor.placements == tuple(new)
            assert torch.equal(model.tensor.full_tensor(), VALUES)


@on_ranks(2)
def test_sharded_and_replicated_tensors_and_extra_state(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    for factor in (1, 10):
        sharded = distribute_tensor(factor * VALUES, mesh, [Shard(0)])
        copied = distribute_tensor(-factor * VALUES, mesh, [Replicate()])
        model = Holder(sharded=sharded, copied=copied)
        model.extra = factor
        if factor == 1:
            mh.save(tmp_path, model=model)
    mh.load(tmp_path, model=model)
    assert torch.equal(model.sharded.full_tensor(), VALUES)
    assert torch.equal(model.copied.full_tensor(), -VALUES)
    assert model.extra == 1


# -- models and optimizers -------------------------------------------------------------------------


def plain(model):
    return model


def fsdp(model, mesh=None):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model):
    return fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def two_groups(model):
    """Shard separately among the ranks 0 and 1 and among the ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("groups", "shard"))
    return fsdp(model, mesh["shard"])


def tensor_parallel(model):
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


WAYS = {each.__name__: each for each in (plain, fsdp, hsdp, two_groups, tensor_parallel)}


def trained(way, sizes, seed):
    """Return a model and an optimizer after one step; each way has the same values."""
    torch.manual_seed(seed)
    layers = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    model = WAYS[way](layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = param.detach() * 2
    optimizer.step()
    return model, optimizer


def values_of(model, optimizer):
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        for tensor in (param.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]):
            found.append(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
    return found


@pytest.mark.parametrize(
    "sizes", [pytest.param((5, 8, 4, 12), marks=pytest.mark.long), (5, 10, 15, 30)], ids=str
)
@on_ranks(4)
def test_every_sharding_of_a_model_and_its_optimizer_loads_into_every_other(sizes, tmp_path):
    for way in WAYS:
        model, optimizer = trained(way, sizes, seed=0)
        saved = values_of(model, optimizer)
        mh.save(tmp_path / way, model=model, optimizer=optimizer)
        for other in WAYS:
            model, optimizer = trained(other, sizes, seed=1)
            mh.load(tmp_path / way, model=model, optimizer=optimizer)
            where = f"{way} to {other}"
            assert all(map(torch.equal, values_of(model, optimizer), saved)), where
