"""The same collectives between ranks of one host, through memory that all of them can read.

Each rank makes a file in memory, and the others map it. No bytes are sent. A one-element all_reduce
is the barrier (a bucket is full, a step is made, everything was read). It also orders the memory
accesses before it against those after it on another processor.

The *ring* is where each rank puts the buckets that the others will read. It has two buffers for
each bucket in flight. A rank that finishes bucket q knows that every other rank had filled its q,
and had therefore finished all buckets that were no longer in flight then.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._core.flat import accumulation_dtype

CPU = torch.device("cpu")


class HostRanks(Protocol):
    """What shared memory needs of a `RankGroup`."""

    @property
    def rank(self) -> int: ...
    def all_gather_text(self, text: str, device: torch.device) -> list[str]: ...
    def start_all_reduce_max(self, tensor: Tensor) -> dist.Work: ...


class SharedMemory:
    """Memory of each of some ranks of one host, readable by all of them.

    `workers` is their `RankGroup`. Call every method on every rank.
    """

    def __init__(self, workers: HostRanks) -> None:
        self._workers = workers
        self._ring: list[Tensor] = []  # each worker's, as bytes
        self._places = 0
        self._sent = 0
        self._later: list[DeferredBarrier] = []

    @classmethod
    def of(cls, workers: HostRanks) -> SharedMemory:
        """Share memory between ranks; raise an error if they are on several hosts."""
        if not _host():
            raise RuntimeError("shared_memory=True needs Linux. Leave it out on this system.")
        hosts = workers.all_gather_text(_host(), CPU)
        if len(set(hosts)) > 1:
            listed = ", ".join(f"rank {rank}: {host}" for rank, host in enumerate(hosts[:8]))
            raise ValueError(
                f"shared_memory=True needs all workers on one host, and they are on {listed}. "
                "Leave it out, or give a process group of the workers of one host."
            )
        return cls(workers)

    @classmethod
    def if_possible(cls, workers: HostRanks) -> SharedMemory | None:
        """Share memory between ranks, or return None if they cannot read each other's memory."""
        hosts = workers.all_gather_text(_host(), CPU)
        if len(set(hosts)) > 1 or not hosts[0]:
            return None
        memory = cls(workers)
        return memory if memory._reads_the_others() else None

    def _reads_the_others(self) -> bool:
        """Return whether every rank reads in each rank's memory what that rank has written."""
        tensors, problem = self._open_all(1, torch.int64)
        if problem:
            return False
        # Seven bytes fit an int64, and no memory holds them by chance.
        token = int.from_bytes(os.urandom(7), "little")
        tensors[self._workers.rank].fill_(token)
        tokens = self._workers.all_gather_text(str(token), CPU)
        same = all(int(tensor) == int(sent) for tensor, sent in zip(tensors, tokens, strict=True))
        return all(self._workers.all_gather_text("yes" if same else "", CPU))

    def empty(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Return a new tensor of every rank, in rank order. Write to your own only."""
        tensors, problem = self._open_all(size, dtype)
        if problem:
            raise RuntimeError(
                f"workers cannot read each other's memory ({problem}). They must be of one user, "
                "see each other's processes, and have memory left. shared_memory=False does "
                "without."
            )
        return tensors

    def _open_all(self, size: int, dtype: torch.dtype) -> tuple[list[Tensor], str]:
        """Return a tensor of every rank, and the first problem of any rank ("": none)."""
        problem, place, tensors = "", "", []
        with ExitStack() as stack:  # closed when all ranks have opened the file
            try:
                descriptor = os.memfd_create("manyhands")
                stack.callback(os.close, descriptor)
                # An empty file cannot be mapped.
                os.ftruncate(descriptor, max(size, 1) * dtype.itemsize)
                place = f"/proc/{os.getpid()}/fd/{descriptor}"
            except OSError as error:
                problem = str(error)
            places = self._workers.all_gather_text(place, CPU)
            if all(places):
                try:
                    # True: a shared mapping, so that writes reach the other ranks.
                    tensors = [torch.from_file(p, True, size, dtype=dtype) for p in places]
                except (OSError, RuntimeError) as error:
                    problem = str(error).split("\n")[0] or repr(error)
            # A barrier as well: no file may be closed before all ranks have opened it.
            problems = self._workers.all_gather_text(problem, CPU)
        return tensors, next(filter(None, problems), "")

    def make_ring(self, largest: int, under_way: int) -> None:
        """Allocate a ring for buckets of up to `largest` bytes, some of them in flight at once."""
        self._places = 2 * under_way
        # Whole cache lines, so that a view of any dtype is aligned.
        place = -(-largest // 64) * 64
        if not self._ring or self._ring[0].numel() < place * self._places:
            self._ring = self.empty(place * self._places, torch.uint8)

    def next_buffers(self, size: int) -> list[Tensor]:
        """Return `size` bytes of every rank's ring, in rank order, for the next bucket."""
        place = self._ring[0].numel() // self._places
        start = (self._sent % self._places) * place
        self._sent += 1
        return [ring[start : start + size] for ring in self._ring]

    def reduce_scatter_slices(
        self, bucket: Tensor, cuts: Sequence[int]
    ) -> SharedMemoryReduceScatter:
        """Copy a bucket into the ring; the others read their slices of it after the barrier."""
        places = self.next_buffers(bucket.numel() * bucket.itemsize)
        shown = [place.view(bucket.dtype) for place in places]
        rank = self._workers.rank
        shown[rank].copy_(bucket)
        slices = [each[cuts[rank] : cuts[rank + 1]] for each in shown]
        return SharedMemoryReduceScatter(slices, self.barrier(), bucket)

    def barrier(self) -> dist.Work:
        """Begin a barrier; the result's `wait` returns when every rank has begun it."""
        work = self._workers.start_all_reduce_max(torch.zeros(1))
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
        raise ValueError(
            f"shared_memory=True is for parameters on the CPU; these are on {device}. Leave it "
            "out: NCCL finds the fastest way between the GPUs of a host by itself."
        )


def _host() -> str:
    """Return a text that identifies this host and PID namespace; "" if memory cannot be shared."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux as we know it
        return ""
