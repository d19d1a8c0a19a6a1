"""Interpret the options `process_group` and `compute_device` of FullyShardedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from manyhands._ranks.ranks import RankGroup
from manyhands.sharding._agreement import GroupLike

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DummyProcessGroup:
    """A stand-in for a process group of a single rank, without `init_process_group`.

    >>> from manyhands.fairscale import DummyProcessGroup
    >>> group = DummyProcessGroup(rank=0, size=1)
    >>> group.rank(), group.size()
    (0, 1)

    The group cannot send. A size above 1 works only in code without communication.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the rank given to the constructor."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks given to the constructor."""
        return self._size


def find_ranks(process_group: GroupLike | DeviceMesh | None) -> RankGroup:
    from torch.distributed.device_mesh import DeviceMesh  # not needed to import manyhands

    if isinstance(process_group, DeviceMesh):
        return RankGroup.of_mesh(process_group)
    # A stand-in may represent a single rank.
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return RankGroup.of(process_group)
    if process_group.size() != 1:
        raise ValueError(
            f"a {type(process_group).__name__} of {process_group.size()} ranks cannot send data. "
            "Pass a group from torch.distributed.new_group, or a stand-in of size 1."
        )
    return RankGroup()


def find_group(process_group: GroupLike | DeviceMesh | None) -> GroupLike | DeviceMesh | None:
    """Return the public `process_group` of a wrap: as given, else all ranks, else a stand-in."""
    if process_group is not None:
        return process_group
    if dist.is_initialized():
        return dist.group.WORLD
    return DummyProcessGroup(rank=0, size=1)


def find_device(
    module: nn.Module, ranks: RankGroup, compute_device: torch.device | str | None
) -> torch.device:
    """Return `compute_device`, or the parameters' device, or the group's accelerator."""
    if compute_device is not None:
        return torch.device(compute_device)
    for tensor in (*module.parameters(), *module.buffers()):
        # An accelerator wins over the CPU and meta.
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    if ranks.size > 1 and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        # On a machine with GPUs, a gloo group may be limited to CPU tensors.
        if accelerator is not None and ranks.has_backend(accelerator):
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
