"""The collectives we use. With one worker they do nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Workers:
    """The processes that train one model together, and this one's place among them."""

    size: int = 1
    rank: int = 0
    group: Any = None

    @classmethod
    def of(cls, group: Any = None, world_size: int | None = None) -> Workers:
        """The workers of a process group (by default all), or one worker without a group.

        `world_size` states what the caller expects; 1 inside a larger group means that each
        worker trains on its own.
        """
        ready = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size(group) if ready else 1
        if world_size == 1:
            return cls()
        if world_size is not None and world_size != size:
            raise ValueError(
                f"world_size={world_size}, but the process group has {size} worker(s). "
                "Leave world_size out to take it from the process group"
                + ("." if ready else ", and call torch.distributed.init_process_group first.")
            )
        if size < 1:
            raise ValueError("this process is not a member of the process group that was given.")
        return cls(size, dist.get_rank(group) if ready else 0, group)

    def sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start summing `tensor` over the workers in place; wait on the result, if any."""
        if self.size == 1:
            return None
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
        """Every worker's `numbers`, in rank order."""
        if self.size == 1:
            return [numbers]
        table = torch.zeros(self.size, len(numbers), dtype=precise(device), device=device)
        table[self.rank] = torch.tensor(numbers, dtype=table.dtype)
        dist.all_reduce(table, group=self.group)  # the gathers of torch 2.11 and 2.13 differ
        return table.tolist()


def precise(device: torch.device) -> torch.dtype:
    """The widest float that the device can add."""
    return torch.float32 if device.type == "mps" else torch.float64
