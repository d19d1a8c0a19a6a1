"""The collectives we use. With one worker they do nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from manyhands._core.groups import Lease, connect
from manyhands._core.norms import summed_in
from manyhands._core.shared_memory import SharedMemory, SharedMemoryReduceScatter

TAG = 28_008  # of our messages between two workers, apart from other people's
LARGE = 65_536  # elements: a message of its own costs less than a copy


@dataclass(frozen=True)
class RankGroup:
    """The processes that train one model together, and this one's place among them."""

    size: int = 1
    rank: int = 0
    group: Any = None
    own_group: bool = False  # which nobody else's collectives go through
    lease: Lease | None = None  # which keeps that group alive
    host: SharedMemory | None = None  # that they exchange through, if they are all on one

    @classmethod
    def of(cls, group: Any = None, world_size: int | None = None) -> RankGroup:
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

    @property
    def ranks(self) -> list[int]:
        """Of the workers among all processes."""
        if self.lease is not None:  # torch has no record of our own groups
            return list(self.lease.ranks)
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    def with_own_group(self, device: torch.device) -> RankGroup:
        """The same workers, whose collectives cannot be taken for anybody else's.

        In a group of our own on gloo (`groups.py`). With NCCL a group costs a communicator's GPU
        memory, and the one that was given is used.
        """
        if self.size == 1 or device.type != "cpu" or not self.on_gloo(device):
            return self
        gather = partial(self.all_gather, device=device)
        lease = connect(self.ranks, self.rank, self._timeout, gather)
        return RankGroup(self.size, self.rank, lease.group, own_group=True, lease=lease)

    def with_background_group(self, device: torch.device) -> RankGroup:
        """The same workers, in a group which another thread may use."""
        if self.size == 1:
            return self
        if device.type == "cpu" and self.on_gloo(device):
            return self.with_own_group(device)
        # torch's own: when ranks end a communicator at different moments is not ours to try.
        own = dist.new_group(self.ranks, timeout=self._timeout, use_local_synchronization=True)
        return RankGroup(self.size, self.rank, own, own_group=True)

    @property
    def _timeout(self) -> timedelta | None:
        """How long the group waits; None: as long as any."""
        group: Any = self.group or dist.group.WORLD
        options = getattr(group._get_backend(group._device_types[0]), "options", None)
        return getattr(options, "_timeout", None)

    def sum_and_gather(self, row: torch.Tensor, summed: int) -> PendingSums:
        """Begin to sum `row[:summed]` over the workers, and to collect every worker's rest.

        In one small collective: on gloo each worker's numbers are gathered, which takes half
        the time of reducing them; with NCCL, which reduces in fewer steps among many, a sum
        in which every worker has a place of its own.
        """
        if self.size == 1:
            return PendingSums([row], summed)
        if self.on_gloo(row.device):
            rows = [torch.empty_like(row) for _ in range(self.size)]
            # the group's own method: dist.all_gather looks it up and checks for 40 microseconds
            work = self._process_group.allgather([rows], [row])
            return PendingSums(rows, summed, work)
        own = row[summed:]
        table = torch.zeros(self.size, own.numel(), dtype=own.dtype, device=own.device)
        table[self.rank] = own
        total = torch.cat([row[:summed], table.flatten()])
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return PendingSums([total], summed, work)

    @cached_property
    def _process_group(self) -> Any:
        return self.group or dist.group.WORLD

    @cached_property
    def _backends(self) -> dict[str, str]:
        """By type of device. (A group may have several: "cpu:gloo,cuda:nccl".)"""
        # (groups that torch has no record of: ours, and a crew's)
        if self.lease is not None or isinstance(self.group, dist.ProcessGroupGloo):
            return {"cpu": "gloo"}
        pairs = dist.get_backend_config(self.group).split(",")
        return dict(pair.split(":") for pair in pairs if ":" in pair)

    def on_gloo(self, device: torch.device) -> bool:
        """Whether gloo sends what is on such a device."""
        return self._backends.get(device.type) == "gloo"

    def has_backend(self, device: torch.device) -> bool:
        """Whether the group is made for tensors on such a device."""
        backend = self._backends.get(device.type)
        return backend is not None and (backend != "gloo" or device.type == "cpu")

    @property
    def any_device(self) -> torch.device:
        """A device whose tensors the group sends: the same on every rank, whatever it holds."""
        types = self._backends if self.size > 1 else {"cpu": ""}
        return torch.device("cpu" if "cpu" in types else next(iter(types)))

    def with_shared_memory(self, where_possible: bool = False) -> RankGroup:
        """The same workers, who exchange through memory that all can read; or else an error.

        `where_possible`: as they are, where they cannot. Collectives of theirs say when.
        """
        if self.size == 1:
            return self
        host = SharedMemory.where_possible(self) if where_possible else SharedMemory.of(self)
        return replace(self, host=host)

    # -- slices of a bucket --------------------------------------------------------------------

    def reduce_scatter_slices(
        self,
        bucket: torch.Tensor,
        cuts: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> PendingReduceScatter | SharedMemoryReduceScatter:
        """Begin to bring every worker its slice of all workers' `bucket`s, to be summed there.

        `into` is memory that may be used for the sum; `bucket` and it are to be left alone until
        then.

        gloo's reduce-scatter moves twice the bytes that are needed, so each slice is sent to its
        owner, who adds up what comes. With NCCL its own is used, or, for uneven slices, a reduction
        to each owner; and an all-to-all in half precision, which is summed in float32.
        """
        if self.host is not None:
            return self.host.reduce_scatter_slices(bucket, cuts)
        own = bucket[cuts[self.rank] : cuts[self.rank + 1]]
        as_sent = bucket.dtype == summed_in(bucket.dtype)
        if self.on_gloo(bucket.device):
            if bucket.device.type != "cpu":
                raise RuntimeError(
                    f"gloo cannot exchange slices of tensors on {bucket.device}. Start the process "
                    'group with "nccl" (or "cpu:gloo,cuda:nccl").'
                )
            return self._reduce_scatter_by_pairs(bucket, own, cuts, into if as_sent else None)
        sizes = [b - a for a, b in pairwise(cuts)]
        if as_sent and len(set(sizes)) > 1:
            works = [
                dist.reduce(part, group_dst=rank, group=self.group, async_op=True)
                for rank, part in enumerate(bucket.split(sizes))
                if part.numel()
            ]
            return PendingReduceScatter(own, [], works, bucket)
        if as_sent:
            total = torch.empty_like(own)
            return PendingReduceScatter(
                None, [total], [_reduce_scatter(total, bucket, self.group)], bucket
            )
        rows = bucket.new_empty(self.size * own.numel())
        work = dist.all_to_all_single(
            rows, bucket, [own.numel()] * self.size, sizes, group=self.group, async_op=True
        )
        return PendingReduceScatter(None, list(rows.view(self.size, own.numel())), [work], bucket)

    def _reduce_scatter_by_pairs(
        self,
        bucket: torch.Tensor,
        own: torch.Tensor,
        cuts: Sequence[int],
        first: torch.Tensor | None,
    ) -> PendingReduceScatter:
        """Every slice straight to its owner: its own needs no copy, as in an all-to-all."""
        rows: list[torch.Tensor] = []
        works = []
        for to, source in self._partners():
            if own.numel():
                rows.append(torch.empty_like(own) if rows or first is None else first)
                works.append(dist.irecv(rows[-1], group=self.group, tag=TAG, group_src=source))
            if cuts[to] < cuts[to + 1]:
                part = bucket[cuts[to] : cuts[to + 1]]
                works.append(dist.isend(part, group=self.group, tag=TAG, group_dst=to))
        return PendingReduceScatter(own, rows, works, bucket)

    def _partners(self) -> Iterator[tuple[int, int]]:
        """To whom and from whom, in turns in which nobody is asked twice."""
        for distance in range(1, self.size):
            yield (self.rank + distance) % self.size, (self.rank - distance) % self.size

    def all_gather_slices(self, bucket: torch.Tensor, cuts: Sequence[int]) -> list[dist.Work]:
        """Begin to fill `bucket` on every worker with the slices that each owns of it."""
        own = bucket[cuts[self.rank] : cuts[self.rank + 1]]
        if not self.on_gloo(bucket.device) and len({b - a for a, b in pairwise(cuts)}) == 1:
            return [_all_gather(bucket, own, self.group)]
        return [
            dist.broadcast(bucket[a:b], group_src=rank, group=self.group, async_op=True)
            for rank, (a, b) in enumerate(pairwise(cuts))
            if a < b
        ]

    def reduce_scatter(self, total: torch.Tensor, bucket: torch.Tensor, op: Any) -> None:
        """Fill `total` with this worker's slice of all workers' `bucket`s, reduced."""
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce(total, bucket, op=op, group=self.group)

    # -- messages ------------------------------------------------------------------------------

    def all_to_all(
        self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int], tag: int
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Begin to send bytes to each worker; what arrives from each, and what to wait for.

        `sizes` are the bytes that come from each. Both have one entry for each rank, the own
        one empty. On gloo they go straight from one to the other, without a copy.
        """
        device = outgoing[0].device
        inbox = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        incoming = list(inbox.split(list(sizes)))
        group = self._process_group
        if not self.on_gloo(device):
            work = group.alltoall_base(
                inbox, torch.cat(list(outgoing)), list(sizes), [len(data) for data in outgoing]
            )
            return incoming, [work]
        works = []
        for to, source in self._partners():
            works.append(group.recv([incoming[source]], source, tag))
            works.append(group.send([outgoing[to]], to, tag))
        return incoming, works

    def broadcast_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every worker rank 0's values of these tensors; small ones of a type together."""
        if self.size == 1:
            return
        kinds: dict[Any, list[torch.Tensor]] = {}
        for tensor in map(torch.Tensor.detach, tensors):
            if tensor.numel() > LARGE and tensor.is_contiguous():
                dist.broadcast(tensor, group_src=0, group=self.group)
            else:
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.broadcast(flat, group_src=0, group=self.group)
            parts = flat.split([tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def broadcast(self, tensor: torch.Tensor, source: int, recipient: int) -> None:
        """Fill `tensor` on the recipient (-1: on every worker) with that of `source`."""
        if recipient == -1:
            dist.broadcast(tensor, group_src=source, group=self.group)
        elif self.rank == source:
            dist.send(tensor, group_dst=recipient, group=self.group)
        elif self.rank == recipient:
            dist.recv(tensor, group_src=source, group=self.group)

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """The sum over the workers, or the largest; on the device."""
        if self.size > 1:
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        """Begin to add up a tensor over the workers, in place."""
        return self._process_group.allreduce([tensor])

    def start_all_reduce_max(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to take the largest value over the workers, in place."""
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        return work

    def all_gather_text(self, text: str, device: torch.device) -> list[str]:
        """Every worker's `text`, in rank order."""
        if self.size == 1:
            return [text]
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        sizes = [int(size[0]) for size in self.all_gather([float(own.numel())], device)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: own.numel()] = own
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded, group=self.group)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    # -- numbers -------------------------------------------------------------------------------

    def all_gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
        """Every worker's `numbers`, in rank order."""
        own = torch.tensor(numbers, dtype=precise(device), device=device)
        everyone, n = self.sum_and_gather(own, 0).read(), len(numbers)
        return [everyone[i : i + n] for i in range(0, len(everyone), n)]

    def check_equal(self, who: str, mine: Mapping[str, float], device: torch.device) -> None:
        """Raise on every worker where they were not given the same."""
        everyone = self.all_gather(list(mine.values()), device)
        for name, values in zip(mine, zip(*everyone, strict=True), strict=True):
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {r}: {v:g}" for r, v in enumerate(values[:8]))
                raise ValueError(
                    f"workers disagree on the {name}: {listed}. "
                    f"Build the same {who} on every worker."
                )


@dataclass
class PendingReduceScatter:
    """What the workers send for our slice: `rows` to be added up, with our `own` if it is apart."""

    own: torch.Tensor | None
    rows: list[torch.Tensor]
    works: list[Any]
    sent: torch.Tensor  # kept until it has gone

    def mean(self, workers: float, dtype: torch.dtype) -> torch.Tensor:
        """The mean over so many workers, as `dtype`; half precision is summed in float32."""
        for work in self.works:
            work.wait()
        if not self.rows:  # our part was summed up in place, or is empty
            assert self.own is not None
            return (self.own / workers).to(dtype)
        first, *others = self.rows
        if self.own is not None:
            others.append(self.own)
        total = first.to(summed_in(self.sent.dtype))
        for row in others:
            total.add_(row)
        return total.div_(workers).to(dtype)


@dataclass
class PendingSums:
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

    def done_within(self, seconds: float) -> bool:
        """Wait for the other ranks, but not longer; whether all of them have sent theirs."""
        deadline = time.monotonic() + seconds
        while not self.done:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

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


def _reduce_scatter(out: torch.Tensor, bucket: torch.Tensor, group: Any) -> dist.Work:
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(out, bucket, group=group, async_op=True)


def _all_gather(bucket: torch.Tensor, own: torch.Tensor, group: Any) -> dist.Work:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(bucket, own, group=group, async_op=True)
