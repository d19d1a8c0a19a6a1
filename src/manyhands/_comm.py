"""The collectives we use. With one worker they do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Workers:
    """The processes that train one model together, and this one's place among them."""

    size: int = 1
    rank: int = 0
    group: Any = None
    own_group: bool = False  # which nobody else's collectives go through

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

    def apart(self) -> Workers:
        """The same workers, whose collectives cannot be taken for anybody else's.

        In a group of their own on gloo, where it costs two connections. With NCCL a group costs
        a communicator's GPU memory, and the one that was given is used.
        """
        if self.size == 1 or not self._on_gloo:
            return self
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return Workers(self.size, self.rank, own, own_group=True)

    def combine(self, row: torch.Tensor, summed: int) -> Combination:
        """Begin to sum `row[:summed]` over the workers, and to collect every worker's rest.

        In one small collective: on gloo each worker's numbers are gathered, which takes half
        the time of reducing them; with NCCL, which reduces in fewer steps among many, a sum
        in which every worker has a place of its own.
        """
        if self.size == 1:
            return Combination([row], summed)
        if self._on_gloo:
            rows = [torch.empty_like(row) for _ in range(self.size)]
            # the group's own method: dist.all_gather looks it up and checks for 40 microseconds
            work = self._process_group.allgather([rows], [row])
            return Combination(rows, summed, work)
        own = row[summed:]
        table = torch.zeros(self.size, own.numel(), dtype=own.dtype, device=own.device)
        table[self.rank] = own
        total = torch.cat([row[:summed], table.flatten()])
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return Combination([total], summed, work)

    @cached_property
    def _process_group(self) -> Any:
        return self.group or dist.group.WORLD

    @cached_property
    def _on_gloo(self) -> bool:
        return bool(dist.get_backend(self.group) == "gloo")

    def gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
        """Every worker's `numbers`, in rank order."""
        own = torch.tensor(numbers, dtype=precise(device), device=device)
        everyone, n = self.combine(own, 0).read(), len(numbers)
        return [everyone[i : i + n] for i in range(0, len(everyone), n)]

    def check_agreement(self, who: str, mine: Mapping[str, float], device: torch.device) -> None:
        """Raise on every worker where they were not given the same."""
        everyone = self.gather(list(mine.values()), device)
        for name, values in zip(mine, zip(*everyone, strict=True), strict=True):
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {r}: {v:g}" for r, v in enumerate(values[:8]))
                raise ValueError(
                    f"workers disagree on the {name}: {listed}. "
                    f"Build the same {who} on every worker."
                )


@dataclass
class Combination:
    """The result of `combine`: the sums, then every worker's own numbers, in rank order.

    Keep it until the next one has begun: the thread that ran the collective may let go of its
    tensors later than `wait` returns, and must not be the last to do so as the program ends.
    """

    rows: list[torch.Tensor]
    summed: int
    work: dist.Work | None = None

    @property
    def done(self) -> bool:
        return self.work is None or self.work.is_completed()

    def read(self) -> list[float]:
        """The result as numbers on the host."""
        if self.work is not None:
            self.work.wait()
        if self.rows[0].device.type != "cpu":
            return self.wait().tolist()
        rows = [row.tolist() for row in self.rows]
        if len(rows) == 1:  # summed up already, or one worker's alone
            return rows[0]
        sums = [sum(column) for column in zip(*(row[: self.summed] for row in rows), strict=True)]
        return [*sums, *(number for row in rows for number in row[self.summed :])]

    def wait(self) -> torch.Tensor:
        """The result on the device."""
        if self.work is not None:
            self.work.wait()
        if len(self.rows) == 1:
            return self.rows[0]
        table = torch.stack(self.rows)
        return torch.cat([table[:, : self.summed].sum(dim=0), table[:, self.summed :].flatten()])


def precise(device: torch.device) -> torch.dtype:
    """The widest float that the device can add."""
    return torch.float32 if device.type == "mps" else torch.float64
