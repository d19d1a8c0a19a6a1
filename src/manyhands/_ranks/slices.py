"""Reduce and gather the slices of a flat bucket: rank r owns `bucket[cuts[r]:cuts[r + 1]]`.

The cuts of equal slices are a range.

    reduce_scatter_slices   every rank's bucket in, the sum of this rank's slice out
    all_gather_slices       every rank's slice in, the full bucket out

Each begins at once and returns something to wait for. Which of torch's collectives carries the
slices depends on the backend:

              equal slices      uneven slices         sums in another dtype (half precision)
    NCCL      reduce_scatter    a reduce per owner    all_to_all, summed here in float32
    gloo      messages between pairs of ranks: gloo's reduce_scatter moves twice the bytes needed
    NCCL      all_gather        a broadcast per owner
    gloo      a broadcast per owner

Tensors held: the bucket, until it was sent; on gloo one row per other rank, each as long as our
slice, until `PendingReduceScatter.mean` has added them up.

**`SharedMemory`** does the same between ranks of one host, through memory that all of them can
read. Each rank makes a file in memory, and the others map it. No bytes are sent. A one-element
all_reduce is the barrier (a bucket is full, a step is made, everything was read). It also orders
the memory accesses before it against those after it on another processor.

The *ring* is where each rank puts the buckets that the others will read. It has two buffers for
each bucket in flight. A rank that finishes bucket q knows that every other rank had filled its q,
and had therefore finished all buckets that were no longer in flight then.
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

TAG = 28_008  # of our messages between two ranks, so that no other library's are taken for ours


class RankIdentity(Protocol):
    """The methods of a `RankGroup` that collectives and shared memory need."""

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
    """A reduce_scatter under way: rows that arrive for our slice, to be added up at the end."""

    own: Tensor | None  # our own slice of our bucket, unless a row contains it already
    rows: list[Tensor]  # each of our slice's length
    works: list[dist.Work]
    sent: Tensor  # the bucket, kept alive until it was sent

    def mean(self, workers: float, dtype: torch.dtype) -> Tensor:
        """Return the sum divided by `workers`, as `dtype`; half precision is summed in float32."""
        for work in self.works:
            work.wait()
        if not self.rows:  # summed in place by a reduce, or the slice is empty
            assert self.own is not None
            return (self.own / workers).to(dtype)
        first, *others = self.rows
        if self.own is not None:
            others.append(self.own)
        # `to` returns the row itself if the dtype is the same: the sum needs no other memory.
        total = first.to(accumulation_dtype(self.sent.dtype))
        for row in others:
            total.add_(row)
        return total.div_(workers).to(dtype)


def reduce_scatter_slices(
    ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int], into: Tensor | None
) -> PendingReduceScatter:
    """Begin to send every slice of `bucket` to its owner, who will sum the slices."""
    # `into` is memory for the sum. Leave it and `bucket` alone until the sum is there.
    own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]
    summed_as_sent = bucket.dtype == accumulation_dtype(bucket.dtype)
    if ranks.on_gloo(bucket.device):
        if bucket.device.type != "cpu":  # which gloo cannot read
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
    # NCCL would sum in half precision: move the slices unsummed instead.
    sizes = [b - a for a, b in pairwise(cuts)]
    rows = bucket.new_empty(ranks.size * own.numel())
    work = dist.all_to_all_single(
        rows, bucket, [own.numel()] * ranks.size, sizes, group=ranks.group, async_op=True
    )
    return PendingReduceScatter(None, list(rows.view(ranks.size, own.numel())), [work], bucket)


def _send_by_pairs(
    ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int], first: Tensor | None
) -> PendingReduceScatter:
    """Send every slice straight to its owner. `first` is memory for the first row to arrive."""
    own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]  # needs no copy, unlike in an all_to_all
    rows: list[Tensor] = []
    works: list[Any] = []  # torch's types allow None: for a rank that is not in the group
    for to, source in partners(ranks):
        if own.numel():
            rows.append(torch.empty_like(own) if rows or first is None else first)
            works.append(dist.irecv(rows[-1], group=ranks.group, tag=TAG, group_src=source))
        if cuts[to] < cuts[to + 1]:
            part = bucket[cuts[to] : cuts[to + 1]]
            works.append(dist.isend(part, group=ranks.group, tag=TAG, group_dst=to))
    return PendingReduceScatter(own, rows, works, bucket)


def partners(ranks: RankIdentity) -> Iterator[tuple[int, int]]:
    """Yield (destination, source) for each turn of an exchange between pairs of ranks.

    In each turn every rank sends to one other and receives from one other: no rank is a bottleneck.
    """
    for distance in range(1, ranks.size):
        yield (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size


def all_gather_slices(ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int]) -> list[dist.Work]:
    """Begin to fill `bucket` on every rank with the slices that each rank owns of it."""
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
    """Fill `total` with this rank's slice of all ranks' buckets; the slices are equal."""
    # torch is renaming the function: take the new name where there is one.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(total, bucket, **options)


class SharedMemory:
    """Memory of each of some ranks of one host, readable by all of them.

    `workers` is their `RankGroup`. Call every method on every rank.
    """

    def __init__(self, workers: RankIdentity) -> None:
        self._workers = workers
        self._ring: list[Tensor] = []  # each worker's, as bytes
        self._slots = 0
        self._sent = 0
        self._later: list[DeferredBarrier] = []

    @classmethod
    def of(cls, workers: RankIdentity, required: bool = True) -> SharedMemory | None:
        """Share memory between ranks. If they cannot, raise if it is `required`, or return None."""
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
            f"shared_memory=True needs all workers on one host, and they are on {listed}."
        )

    def _reads_the_others(self) -> bool:
        """Return whether every rank reads the number that each rank has written to its memory."""
        tensors, problem = self._open_all(1, torch.int64)
        if problem:
            return False
        # Seven bytes fit an int64, and no memory holds them by chance.
        token = int.from_bytes(os.urandom(7), "little")
        tensors[self._workers.rank].fill_(token)
        tokens = self._workers.all_gather_text(str(token))
        same = list(map(int, tensors)) == list(map(int, tokens))
        return "False" not in self._workers.all_gather_text(str(same))

    def empty(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Return a new tensor of every rank, in rank order. Write to your own only."""
        tensors, problem = self._open_all(size, dtype)
        if problem:
            raise RuntimeError(
                f"workers cannot read each other's memory ({problem}). Set shared_memory=False."
            )
        return tensors

    def _open_all(self, size: int, dtype: torch.dtype) -> tuple[list[Tensor], str]:
        """Return a tensor of every rank, and the first problem of any rank ("": none)."""
        problem = ""
        path = ""
        tensors = []
        with ExitStack() as stack:  # closed when all ranks have opened the file
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
                    # True: a shared mapping, so that writes reach the other ranks.
                    tensors = [torch.from_file(path, True, size, dtype=dtype) for path in paths]
                except (OSError, RuntimeError) as error:
                    problem = str(error).split("\n")[0] or repr(error)
            # A barrier as well: no file may be closed before all ranks have opened it.
            problems = self._workers.all_gather_text(problem)
        return tensors, next(filter(None, problems), "")

    def make_ring(self, largest: int, under_way: int) -> None:
        """Allocate a ring for buckets of up to `largest` bytes, some of them in flight at once."""
        self._slots = 2 * under_way
        # Whole cache lines, so that a view of any dtype is aligned.
        slot = -(-largest // 64) * 64
        if not self._ring or self._ring[0].numel() < slot * self._slots:
            self._ring = self.empty(slot * self._slots, torch.uint8)

    def next_buffers(self, size: int) -> list[Tensor]:
        """Return `size` bytes of every rank's ring, in rank order, for the next bucket."""
        slot = self._ring[0].numel() // self._slots
        start = (self._sent % self._slots) * slot
        self._sent += 1
        return [ring[start : start + size] for ring in self._ring]

    def reduce_scatter_slices(
        self, bucket: Tensor, cuts: Sequence[int]
    ) -> SharedMemoryReduceScatter:
        """Copy a bucket into the ring; the others read their slices of it after the barrier."""
        buffers = self.next_buffers(bucket.numel() * bucket.itemsize)
        shown = [buffer.view(bucket.dtype) for buffer in buffers]
        rank = self._workers.rank
        shown[rank].copy_(bucket)
        slices = [each[cuts[rank] : cuts[rank + 1]] for each in shown]
        return SharedMemoryReduceScatter(slices, self.barrier(), bucket)

    def barrier(self) -> dist.Work:
        """Begin a barrier; the result's `wait` returns when every rank has begun it."""
        group = self._workers.group
        work = dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        # This barrier begins after everything that these wait for, so it serves them too.
        for later in self._later:
            later.work = work
        self._later.clear()
        return work

    def deferred_barrier(self) -> DeferredBarrier:
        """Return a barrier that begins with the next `barrier`, or when it is waited for."""
        self._later.append(DeferredBarrier(self))
        return self._later[-1]


class DeferredBarrier:
    """A barrier that may not have begun."""

    def __init__(self, host: SharedMemory) -> None:
        self._host = host
        self.work: dist.Work | None = None

    def wait(self) -> None:
        """Wait for the barrier, which the next barrier of this memory also begins."""
        if self.work is None:
            self._host.barrier()  # which sets `work`
        assert self.work is not None
        self.work.wait()


@dataclass
class SharedMemoryReduceScatter:
    """Our slice of a bucket, in all ranks' memory."""

    slices: list[Tensor]
    barrier: dist.Work
    sent: Tensor  # the bucket that we copied from

    def mean(self, workers: float, dtype: torch.dtype) -> Tensor:
        """Return the mean over the ranks, as `dtype`; half precision is summed in float32."""
        self.barrier.wait()
        # (elements of our slice,) for each rank; there are two or more, or nothing is shared.
        first, second, *others = self.slices
        total = torch.add(first.to(accumulation_dtype(first.dtype)), second)
        for other in others:
            total.add_(other)
        return total.div_(workers).to(dtype)


def check_on_cpu(device: torch.device) -> None:
    """Raise a ValueError unless parameters on this device can lie in shared memory."""
    if device.type != "cpu":
        raise ValueError(f"shared_memory=True is for parameters on the CPU, got {device}.")


def _host_identity() -> str:
    """Return a text that identifies this host and PID namespace; "" if memory cannot be shared."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux as we know it
        return ""
