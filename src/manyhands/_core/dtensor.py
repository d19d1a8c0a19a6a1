"""torch's own sharded tensors, as `fully_shard` makes parameters: which part is here?

A DTensor has the whole tensor's shape; `to_local()` is this worker's part. Its mesh names the
workers, in one dimension or (HSDP) two, and a placement for each dimension says what they do with
the tensor: `Shard(dim)` cuts it, `Replicate()` gives each the same.

Importing torch.distributed.tensor takes half a second, so it is looked up, not imported: where
nobody has imported it there are no DTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._core.ranks import RankGroup


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this worker holds: of a DTensor its part, of another tensor everything."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Part:
    """Elements `start` to `start + length` of a dimension of a tensor."""

    dim: int
    start: int
    length: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class Share:
    """Who holds what of a DTensor that is sharded in one dimension at most.

    Several workers may hold the same part (HSDP); `counted` is true on one of them.
    """

    mesh: Any
    mesh_dim: int | None  # of the workers that cut it; None: nobody does
    parts: tuple[Part, ...]  # by rank among those
    rank: int
    counted: bool

    @classmethod
    def of(cls, tensor: Any) -> Share:
        from torch.distributed.tensor import Replicate, Shard

        mesh, placements = tensor.device_mesh, tensor.placements
        cutting = [d for d, placement in enumerate(placements) if type(placement) is Shard]
        others = [p for p in placements if type(p) is not Shard]
        if len(cutting) > 1 or any(type(placement) is not Replicate for placement in others):
            raise ValueError(
                f"gradients placed as {placements} are not measured. Scaling works over "
                "fully_shard on a mesh of one dimension, or two (shards and their replicas): "
                "parameters cut by one Shard placement, without tensor parallelism."
            )
        coordinate = mesh.get_coordinate()
        counted = all(c == 0 for d, c in enumerate(coordinate) if d not in cutting)
        if not cutting:
            return cls(mesh, None, (Part(0, 0, tensor.size(0) if tensor.dim() else 1),), 0, counted)
        mesh_dim = cutting[0]
        dim, workers = placements[mesh_dim].dim, mesh.size(mesh_dim)
        size = tensor.size(dim)
        step = -(-size // workers)  # as torch.chunk: the last parts are shorter, or empty
        starts = [min(rank * step, size) for rank in range(workers + 1)]
        parts = [Part(dim, a, b - a) for a, b in pairwise(starts)]
        return cls(mesh, mesh_dim, tuple(parts), coordinate[mesh_dim], counted)

    @property
    def mine(self) -> Part:
        return self.parts[self.rank]


def workers_of(
    params: Sequence[Tensor], group: Any = None, world_size: int | None = None
) -> RankGroup:
    """Who shares the gradients of these parameters.

    The process group that was given, or that over which the parameters are sharded, or all.
    """
    meshes = {p.device_mesh for p in params if is_dtensor(p)}  # type: ignore[attr-defined]
    if not meshes:
        return RankGroup.of(group, world_size)
    everyone = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    if len(everyone) > 1:
        raise ValueError(
            f"the parameters are sharded over different workers: ranks {sorted(everyone)}. "
            "Give each mesh's parameters an optimizer of their own."
        )
    ranks = list(everyone.pop())
    workers = RankGroup.of(group or _group(meshes.pop(), ranks), world_size)
    if workers.size != len(ranks):
        raise ValueError(
            f"the parameters are sharded over {len(ranks)} workers, and the statistics are to be "
            f"of {workers.size}. Leave process_group and world_size out."
        )
    return workers


def _group(mesh: Any, ranks: list[int]) -> Any:
    """The process group of all workers of a mesh; None for that of all processes."""
    if ranks == list(range(dist.get_world_size())):
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.new_group(ranks, use_local_synchronization=True)
