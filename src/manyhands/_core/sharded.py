"""Sharded tensors: which part of a tensor is on this rank?

**DTensors** are torch's, as `fully_shard` makes parameters. A DTensor has the whole tensor's shape;
`to_local()` is this rank's shard. Its *mesh* arranges the ranks in one dimension, or in two (HSDP:
shards and their replicas). For each dimension of the mesh a *placement* says what its ranks do with
the tensor: `Shard(dim)` cuts it, `Replicate()` gives every rank the same. Importing
torch.distributed.tensor takes half a second. So it is looked up in `sys.modules` and not imported:
as long as nobody has imported it, there are no DTensors.

Gradients that are sharded by `ShardedDataParallel` are in `sharded_gradient.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from manyhands._core.trees import tensors_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank holds: a DTensor's shard, or the whole of any other tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # or else to_local() is recorded by autograd
        return tensor.to_local()


def check_own_shards(state: object, params: Iterable[Tensor]) -> None:
    """Raise a ValueError if a state of these parameters has shards that another rank has saved."""
    own = dict.fromkeys(_place(param) for param in params if is_dtensor(param))
    for tensor in tensors_in(state):
        if is_dtensor(tensor) and (saved := _place(tensor)) not in own:
            here = "This one has " + " or ".join(own) if own else "These parameters are whole"
            raise ValueError(
                f"this optimizer state is {saved}, as torch.save on a single rank leaves it. "
                f"{here}. Save with mh.save(folder, model=model, optimizer=optimizer) on every "
                "rank: mh.load gives every rank its part, on any number of ranks."
            )


def _place(tensor: DTensor) -> str:
    """Name the part of a DTensor that its rank holds. A mesh keeps its rank when it is pickled."""
    mesh = tensor.device_mesh
    sizes = " x ".join(map(str, mesh.shape))
    return f"the shard of rank {', '.join(map(str, mesh.get_coordinate() or ()))} of {sizes}"


@dataclass(frozen=True)
class DimRange:
    """Indices `start` to `start + length` of one dimension of a tensor."""

    dim: int
    start: int
    length: int

    def narrow(self, whole: Tensor) -> Tensor:
        """Return a view of this range of the whole tensor."""
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class DTensorShards:
    """Which rank holds what of a DTensor that is sharded in one dimension at most."""

    mesh: DeviceMesh
    mesh_dim: int | None  # the dimension whose ranks hold different shards; None: nothing is cut
    ranges: tuple[DimRange, ...]  # by rank in that dimension of the mesh
    rank: int
    first_replica: bool  # True on exactly one of the ranks that hold the same shard

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorShards:
        """Read a DTensor's placements; raise a ValueError if they are not of the known kinds."""
        from torch.distributed.tensor import Replicate, Shard

        mesh, placements = tensor.device_mesh, tensor.placements
        # `type(...) is`: strided shards, of tensor parallelism, are a class derived from Shard.
        cutting = [(d, p) for d, p in enumerate(placements) if type(p) is Shard]
        others = [d for d, p in enumerate(placements) if type(p) is not Shard]
        if len(cutting) > 1 or any(type(placements[d]) is not Replicate for d in others):
            raise ValueError(
                f"gradients placed as {placements} are not measured. A rule needs parameters cut "
                "by one Shard placement, as by fully_shard, without tensor parallelism."
            )
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # a rank outside of the mesh has none, and no DTensor of it
        first = all(coordinate[d] == 0 for d in others)
        if not cutting:
            everything = DimRange(0, 0, tensor.size(0) if tensor.dim() else 1)
            return cls(mesh, None, (everything,), 0, first)
        mesh_dim, placement = cutting[0]
        dim, workers = placement.dim, mesh.size(mesh_dim)
        size = tensor.size(dim)
        step = -(-size // workers)  # as torch.chunk: the last shards are shorter, or empty
        starts = [min(rank * step, size) for rank in range(workers + 1)]
        ranges = [DimRange(dim, a, b - a) for a, b in pairwise(starts)]
        return cls(mesh, mesh_dim, tuple(ranges), coordinate[mesh_dim], first)

    @property
    def own(self) -> DimRange:
        """This rank's range."""
        return self.ranges[self.rank]
