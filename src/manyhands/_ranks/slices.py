"""Reduce and gather the slices of a flat bucket: rank r owns `bucket[cuts[r]:cuts[r + 1]]`.

The cuts of equal slices are a range.

    reduce_scatter_slices   input: a bucket per rank; output: the sum of this rank's slices
    all_gather_slices       input: a slice per rank; output: the full bucket

The backend determines the collective:

              equal slices      uneven slices         sums in a wider dtype (half precision)
    NCCL      reduce_scatter    a reduce per owner    all_to_all, summed locally in float32
    gloo      messages between pairs of ranks: gloo's reduce_scatter moves twice the bytes needed
    NCCL      all_gather        a broadcast per owner
    gloo      a broadcast per owner

Memory: the bucket, until sent. With gloo also a row per other rank, of the length of our slice,
until `PendingReduceScatter.mean` has added the rows.

**`SharedMemory`** exchanges slices between ranks of a host without sending bytes. Each rank creates
a file in memory, which the other ranks map. A one-element all_reduce is the barrier. It also orders
memory accesses across processors.

Ranks write buckets to a *ring* with two buffers per bucket in flight. When a rank finishes bucket
q, all other ranks have filled bucket q, and have therefore finished the buckets before those in
flight.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._tensors.flat import accumulation_dtype
from manyhands._tensors.profiler import Range

TAG = 28_008  # distinguishes our messages from messages of other libraries


class RankIdentity(Protocol):
    """The methods of `RankGroup` that this file uses."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...
    def on_gloo(self, device: torch.device) -> bool: ...
    def all_gather_text(self, text: str) -> list[str]: ...


@dataclass
class PendingReduceScatter:
    """A pending reduce_scatter: incoming rows for our slice, which `mean` adds."""

    own: Tensor | None  # our slice of our bucket, unless contained in a row
    rows: list[Tensor]  # each with the length of our slice
    works: list[dist.Work]
    sent: Tensor  # the bucket, referenced until sent

    def mean(self, workers: float, dtype: torch.dtype) -> Tensor:
        """Return the sum divided by `workers`, as `dtype`. Half precision is summed in float32."""
        with Range("manyhands::wait reduce_scatter"):
            for work in self.works:
                work.wait()
        if not self.rows:  # summed in place by a reduce, or empty
            assert self.own is not None
            return (self.own / workers).to(dtype)
        first, *rest = self.rows
        if self.own is not None:
            rest.append(self.own)
        # `to` does not copy if the dtypes are equal: the sum needs no additional memory.
        total = first.to(accumulation_dtype(self.sent.dtype))
        for row in rest:
            total.add_(row)
        return total.div_(workers).to(dtype)


def reduce_scatter_slices(
    ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int], into: Tensor | None
) -> PendingReduceScatter:
    """Start to send every slice of `bucket` to the owner, which sums the slices.

    Do not modify `bucket` and `into`, the memory for the sum, before the sum is computed.
    """
    own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]
    summed_as_sent = bucket.dtype == accumulation_dtype(bucket.dtype)
    if ranks.on_gloo(bucket.device):
        if bucket.device.type != "cpu":
            raise RuntimeError(
                f"gloo cannot exchange slices on {bucket.device}. Use a process group of "
                '"cpu:gloo,cuda:nccl".'
            )
        return _send_by_pairs(ranks, bucket, cuts, into if summed_as_sent else None)
    if summed_as_sent and not isinstance(cuts, range):
        # NCCL's reduce_scatter takes equal slices only.
        works = []
        for rank, (start, end) in enumerate(pairwise(cuts)):
            if start < end:
                part = bucket[start:end]
                works.append(dist.reduce(part, group_dst=rank, group=ranks.group, async_op=True))
        return PendingReduceScatter(own, [], works, bucket)
    if summed_as_sent:
        total = torch.empty_like(own)
        work = reduce_scatter(total, bucket, group=ranks.group, async_op=True)
        return PendingReduceScatter(None, [total], [work], bucket)
    # NCCL would sum in half precision, so exchange the slices without summing.
    sizes = [b - a for a, b in pairwise(cuts)]
    rows = bucket.new_empty(ranks.size * own.numel())
    work = dist.all_to_all_single(
        rows, bucket, [own.numel()] * ranks.size, sizes, group=ranks.group, async_op=True
    )
    return PendingReduceScatter(None, list(rows.view(ranks.size, own.numel())), [work], bucket)


def _send_by_pairs(
    ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int], first: Tensor | None
) -> PendingReduceScatter:
    """Send every slice directly to the owner. `first` is memory for the first incoming row."""
    own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]  # no copy, unlike all_to_all
    rows: list[Tensor] = []
    works: list[Any] = []  # isend and irecv return None outside the group
    for to, source in partners(ranks):
        if own.numel():
            rows.append(torch.empty_like(own) if rows or first is None else first)
            works.append(dist.irecv(rows[-1], group=ranks.group, tag=TAG, group_src=source))
        if cuts[to] < cuts[to + 1]:
            part = bucket[cuts[to] : cuts[to + 1]]
            works.append(dist.isend(part, group=ranks.group, tag=TAG, group_dst=to))
    return PendingReduceScatter(own, rows, works, bucket)


def partners(ranks: RankIdentity) -> Iterator[tuple[int, int]]:
    """Yield (destination, source) for each turn of an exchange between pairs of ranks."""
    for distance in range(1, ranks.size):
        yield (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size


def all_gather_slices(ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int]) -> list[dist.Work]:
    """Start to fill `bucket` on every rank with the owners' slices."""
    if not ranks.on_gloo(bucket.device) and isinstance(cuts, range):
        own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(bucket, own, group=ranks.group, async_op=True)]
    works = []
    for rank, (start, end) in enumerate(pairwise(cuts)):
        if start < end:
            part = bucket[start:end]
            works.append(dist.broadcast(part, group_src=rank, group=ranks.group, async_op=True))
    return works


def reduce_scatter(total: Tensor, bucket: Tensor, **options: Any) -> Any:
    """Fill `total` with this rank's slice of all ranks' buckets. Slices have equal size."""
    # torch is renaming this function.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(total, bucket, **options)


class SharedMemory:
    """Memory that all ranks of a host can read. Call every method on every rank."""

    def __init__(self, workers: RankIdentity) -> None:
        self._workers = workers
        self._ring: list[Tensor] = []  # per worker, as bytes
        self._slots = 0
        self._sent = 0
        self._later: list[DeferredBarrier] = []

    @classmethod
    def of(cls, workers: RankIdentity, required: bool = True) -> SharedMemory | None:
        """Share memory between ranks. If impossible, raise if `required`, else return None."""
        own = _host_identity()
        if required and not own:
            raise RuntimeError("shared_memory=True needs Linux. Leave it out on this system.")
        hosts = workers.all_gather_text(own)
        memory = cls(workers)
        together = len(set(hosts)) == 1
        if together and (required or (own and memory._reads_the_others())):
            return memory
        if together or not required:
            return None
        listed = ", ".join(f"rank {rank}: {host}" for rank, host in enumerate(hosts[:8]))
        raise ValueError(
            f"shared_memory=True needs all workers on the same host, got {listed}. Set "
            "shared_memory=False."
        )

    def _reads_the_others(self) -> bool:
        tensors, problem = self._open_all(1, torch.int64)
        if problem:
            return False
        token = int.from_bytes(os.urandom(7), "little")
        tensors[self._workers.rank].fill_(token)
        tokens = self._workers.all_gather_text(str(token))
        same = list(map(int, tensors)) == list(map(int, tokens))
        return "False" not in self._workers.all_gather_text(str(same))

    def empty(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Return a new tensor per rank, in rank order. A rank must only write to its tensor."""
        tensors, problem = self._open_all(size, dtype)
        if problem:
            raise RuntimeError(
                f"workers cannot read each other's memory ({problem}). Set shared_memory=False."
            )
        return tensors

    def _open_all(self, size: int, dtype: torch.dtype) -> tuple[list[Tensor], str]:
        problem = ""
        path = ""
        tensors = []
        with ExitStack() as stack:  # closes the file after all ranks have opened it
            try:
                descriptor = os.memfd_create("manyhands")
                stack.callback(os.close, descriptor)
                # An empty file cannot be mapped.
                os.ftruncate(descriptor, max(size, 1) * dtype.itemsize)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            except OSError as error:
                problem = str(error)
            paths = self._workers.all_gather_text(path)
            if all(paths):
                try:
                    # True: a shared mapping, with writes visible to other ranks.
                    tensors = [torch.from_file(path, True, size, dtype=dtype) for path in paths]
                except (OSError, RuntimeError) as error:
                    problem = str(error).split("\n")[0] or repr(error)
            # Also a barrier: no file may be closed before all ranks have opened it.
            problems = self._workers.all_gather_text(problem)
        return tensors, next(filter(None, problems), "")

    def make_ring(self, largest: int, under_way: int) -> None:
        """Allocate a ring for `under_way` simultaneous buckets of up to `largest` bytes."""
        self._slots = 2 * under_way
        # Multiples of a cache line, which align views of all dtypes.
        slot = -(-largest // 64) * 64
        if not self._ring or self._ring[0].numel() < slot * self._slots:
            self._ring = self.empty(slot * self._slots, torch.uint8)

    def next_buffers(self, size: int) -> list[Tensor]:
        """Return `size` bytes of each rank's ring for the next bucket, in rank order."""
        slot = self._ring[0].numel() // self._slots
        start = (self._sent % self._slots) * slot
        self._sent += 1
        return [ring[start : start + size] for ring in self._ring]

    def reduce_scatter_slices(
        self, bucket: Tensor, cuts: Sequence[int]
    ) -> SharedMemoryReduceScatter:
        """Copy a bucket to the ring. Other ranks read slices after the barrier."""
        buffers = self.next_buffers(bucket.numel() * bucket.itemsize)
        shown = [buffer.view(bucket.dtype) for buffer in buffers]
        rank = self._workers.rank
        shown[rank].copy_(bucket)
        slices = [each[cuts[rank] : cuts[rank + 1]] for each in shown]
        return SharedMemoryReduceScatter(slices, self.barrier(), bucket)

    def barrier(self) -> dist.Work:
        """Start a barrier; `wait` of the result returns after all ranks have started it."""
        group = self._workers.group
        work = dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        # This barrier also serves all earlier deferred barriers.
        for later in self._later:
            later.work = work
        self._later.clear()
        return work

    def deferred_barrier(self) -> DeferredBarrier:
        """Return a barrier that starts with the next `barrier`, or with its `wait`."""
        self._later.append(DeferredBarrier(self))
        return self._later[-1]


class DeferredBarrier:
    """A barrier that starts with the next barrier of the same memory, or with `wait`."""

    def __init__(self, host: SharedMemory) -> None:
        self._host = host
        self.work: dist.Work | None = None

    def wait(self) -> None:
        if self.work is None:
            self._host.barrier()  # sets `work`
        assert self.work is not None
        self.work.wait()


@dataclass
class SharedMemoryReduceScatter:
    slices: list[Tensor]  # our slice of each rank's bucket
    barrier: dist.Work
    sent: Tensor  # our bucket before the copy

    def mean(self, workers: float, dtype: torch.dtype) -> Tensor:
        """Return the sum divided by `workers`, as `dtype`. Half precision is summed in float32."""
        with Range("manyhands::wait reduce_scatter"):
            self.barrier.wait()
        first, second, *rest = self.slices  # two or more ranks share memory
        total = torch.add(first.to(accumulation_dtype(first.dtype)), second)
        for other in rest:
            total.add_(other)
        return total.div_(workers).to(dtype)


def check_on_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(f"shared_memory=True is for parameters on the CPU, got {device}.")


def _host_identity() -> str:
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # an unusual Linux without these files
        return ""
