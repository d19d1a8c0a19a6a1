"""`RankGroup`: the ranks of a process group, with collectives for numbers, text and tensors.

    identity   `size`, `rank`, `group`, backends by device
    numbers    `all_gather`, `sum_and_gather`, `all_reduce`
    text       `all_gather_text`
    tensors    `broadcast`, `broadcast_from_first`, `all_to_all`; slices of a bucket (`slices.py`)

With a single rank, every collective returns immediately, so callers need no branch.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed.distributed_c10d import _get_default_store

from manyhands._ranks import presence, slices
from manyhands._ranks.dry_run import DryGroup
from manyhands._ranks.groups import Lease, connect, name_of_ranks, new_prefix
from manyhands._ranks.presence import RollCall
from manyhands._ranks.slices import PendingReduceScatter, SharedMemory, SharedMemoryReduceScatter
from manyhands._tensors.flat import group_by_type, is_dtensor
from manyhands._tensors.profiler import Range
from manyhands._warn import warn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FIRST_ROUND = 512  # bytes of a text in the first all_gather
SENT_ALONE = 65_536  # elements: larger tensors are broadcast separately, without a copy
JOIN = "Call manyhands.start(), or torch.distributed.init_process_group(), before this."

# Whether the members of the default group change. Then only `engines/survive` exchanges messages in
# this group, and other parts work as on a single rank.
_elastic = False
_settled = False  # whether this process has a process group or has received a warning


def let_members_change() -> None:
    """Note that the members of the default group change."""
    global _elastic
    _elastic = True


def members_change() -> bool:
    return _elastic


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train a model together, seen from one rank."""

    size: int = 1
    rank: int = 0
    # A ProcessGroup, a crew's ProcessGroupGloo, or a substitute; None: the default group.
    group: Any = None
    own_group: bool = False  # whether manyhands has exclusive use of the group
    lease: Lease | None = None  # prevents the end of an exclusive group
    patience: timedelta | None = None  # timeout for texts, instead of the group's timeout
    shared_memory: SharedMemory | None = None  # set if ranks of a host exchange through memory
    mesh: DeviceMesh | None = None  # (copies, shards), if each copy is sharded separately

    @classmethod
    def of(cls, group: Any = None, world_size: int | None = None) -> RankGroup:
        """Return the ranks of a process group (default: all ranks); a single rank if there is none.

        `world_size` is the expected number of ranks. 1 inside a larger group: each rank trains
        alone.
        """
        ready = dist.is_available() and dist.is_initialized()
        size = 1
        rank = 0
        if ready:
            size = dist.get_world_size(group)
            rank = dist.get_rank(group)
        if world_size == 1 or (_elastic and group is None):
            return cls()
        _warn_if_alone(ready)
        if world_size is not None and world_size != size:
            found = f"the process group has {size} workers. Leave it out."
            if not ready:
                found = f"there is no process group. {JOIN}"
            raise ValueError(f"world_size={world_size}, but {found}")
        if size < 1:  # torch reports -1 to a process that is not in the group
            raise ValueError("this process is not a member of the process group that was given.")
        if size > 1:
            presence.begin()
        return cls(size, rank, group)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> RankGroup:
        """Return the ranks of a mesh of shards, or of copies and shards."""
        if mesh.ndim == 1:
            return cls.of(mesh.get_group())
        if mesh.ndim != 2 or mesh.size(1) < 2 or not mesh.mesh_dim_names:
            raise ValueError(
                "needs a mesh with two named dimensions, copies of the model and two or more ranks "
                'per copy: init_device_mesh("cuda", (copies, ranks), mesh_dim_names=("copies", '
                f'"ranks")), got {mesh}.'
            )
        group = _group_of_mesh(mesh, sorted(mesh.mesh.flatten().tolist()))
        return replace(cls.of(group), mesh=mesh)

    @cached_property
    def shards(self) -> RankGroup:
        """The ranks that together store a sharded copy."""
        return self if self.mesh is None else RankGroup.of(self.mesh.get_group(1))

    @property
    def ranks(self) -> list[int]:
        if self.lease is not None:  # torch has no record of exclusive groups
            return list(self.lease.ranks)
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    def with_own_group(self, device: torch.device, *, pairs: bool = False) -> RankGroup:
        """Return these ranks in an exclusive gloo group (`groups.py`), if gloo serves this CPU.

        Otherwise return `self`: a further NCCL communicator needs GPU memory. Set `pairs` for
        slices and broadcasts.
        """
        if self.size == 1 or device.type != "cpu" or not self.on_gloo(device):
            return self
        return self.with_cpu_group(pairs=pairs)

    def with_cpu_group(self, *, pairs: bool = False) -> RankGroup:
        """Return these ranks in an exclusive gloo group, for any backend of the tensors."""
        if self.size == 1:
            return self
        gather = partial(self.all_gather, device=self.any_device)
        store = _get_default_store()
        lease = connect(store, self.ranks, self.rank, self._timeout, gather, pairs=pairs)
        return RankGroup(self.size, self.rank, lease.group, own_group=True, lease=lease)

    def roll_call(self, name: str = "") -> RollCall:
        store = _get_default_store()
        gather = partial(self.all_gather, device=self.any_device)
        if name:
            prefix = f"manyhands/{name}/{name_of_ranks(self.ranks)}"
        else:
            prefix = new_prefix(store, "roll call", self.ranks, gather)
        return RollCall(store, self.rank, self.size, prefix, self.ranks)

    def with_background_group(self, device: torch.device) -> RankGroup:
        """Return these ranks in a group for use in a background thread."""
        if self.size == 1:
            return self
        if device.type == "cpu" and self.on_gloo(device):
            return self.with_own_group(device, pairs=True)
        # From torch: ranks may not be allowed to end NCCL communicators at different times.
        own = dist.new_group(self.ranks, timeout=self._timeout, use_local_synchronization=True)
        return RankGroup(self.size, self.rank, own, own_group=True)

    @property
    def _timeout(self) -> timedelta | None:
        """The timeout of the group; None if unknown."""
        group = self._process_group
        # torch has no public way to read the timeout of a group.
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            return getattr(options, "_timeout", None)
        return None

    @cached_property
    def _process_group(self) -> Any:
        return self.group or dist.group.WORLD

    @cached_property
    def reducing_group(self) -> Any:
        """The group for summing norms of sharded gradients; None for a single rank."""
        return self._process_group if self.size > 1 else None

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The backend per device type, as in "cpu:gloo,cuda:nccl"."""
        # torch has no record of exclusive groups and groups of crews: both use gloo.
        if self.lease is not None or isinstance(self.group, dist.ProcessGroupGloo):
            return {"cpu": "gloo"}
        backends = {}
        for pair in dist.get_backend_config(self.group).split(","):
            device, _, backend = pair.partition(":")
            if backend:
                backends[device] = backend
        return backends

    def on_gloo(self, device: torch.device) -> bool:
        return self._backends.get(device.type) == "gloo"

    def has_backend(self, device: torch.device) -> bool:
        backend = self._backends.get(device.type)
        return backend is not None and (backend != "gloo" or device.type == "cpu")

    @property
    def any_device(self) -> torch.device:
        if self.size == 1 or "cpu" in self._backends:
            return torch.device("cpu")
        return torch.device(next(iter(self._backends)))

    def with_shared_memory(self, required: bool = True) -> RankGroup:
        """Return these ranks with exchange of slices through shared memory.

        If sharing is impossible, raise if `required`, else exchange through the group.
        """
        if self.size == 1:
            return self
        return replace(self, shared_memory=SharedMemory.of(self, required))

    # -- slices of a bucket --------------------------------------------------------------------

    def reduce_scatter_slices(
        self, bucket: Tensor, cuts: Sequence[int], into: Tensor | None = None
    ) -> PendingReduceScatter | SharedMemoryReduceScatter:
        """Start to send each slice of all ranks' buckets to the owner of the slice, for summing."""
        with Range("manyhands::launch reduce_scatter"):
            if self.shared_memory is not None:
                return self.shared_memory.reduce_scatter_slices(bucket, cuts)
            return slices.reduce_scatter_slices(self, bucket, cuts, into)

    def all_gather_slices(self, bucket: Tensor, cuts: Sequence[int]) -> list[dist.Work]:
        """Start to fill `bucket` on every rank with the owners' slices."""
        with Range("manyhands::launch all_gather"):
            return slices.all_gather_slices(self, bucket, cuts)

    # -- tensors -------------------------------------------------------------------------------

    def all_to_all(
        self, outgoing: Sequence[Tensor], sizes: Sequence[int], tag: int
    ) -> tuple[list[Tensor], list[Any]]:
        """Start to send bytes to each rank; return incoming tensors and works.

        `outgoing` (uint8 tensors) and `sizes` (numbers of incoming bytes) have an entry per rank,
        which is empty for this rank.
        """
        device = outgoing[0].device
        inbox = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        incoming = [inbox[:0]] * self.size
        start = 0
        for rank, size in enumerate(sizes):
            if size:
                incoming[rank] = inbox[start : start + size]
                start += size
        group = self._process_group
        if not self.on_gloo(device):
            lengths = [data.numel() for data in outgoing]  # len() takes 1 µs
            full = [data for data, length in zip(outgoing, lengths, strict=True) if length]
            sent = torch.cat(full) if full else outgoing[0]
            with Range("manyhands::launch all_to_all"):
                work = group.alltoall_base(inbox, sent, list(sizes), lengths)
            return incoming, [work]
        works = []
        with Range("manyhands::launch all_to_all"):
            for to, source in slices.partners(self):
                works.append(group.recv([incoming[source]], source, tag))
                works.append(group.send([outgoing[to]], to, tag))
        return incoming, works

    def broadcast_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Fill the tensors on every rank with the values of rank 0. Combine small tensors."""
        if self.size == 1:
            return
        small_tensors: list[Tensor] = []
        for tensor in map(Tensor.detach, tensors):
            if tensor.numel() > SENT_ALONE and tensor.is_contiguous():
                dist.broadcast(tensor, group_src=0, group=self.group)
            else:
                small_tensors.append(tensor)
        for small in group_by_type(small_tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in small])
            dist.broadcast(flat, group_src=0, group=self.group)
            parts = flat.split([tensor.numel() for tensor in small])
            for tensor, part in zip(small, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def broadcast(self, tensor: Tensor, source: int, recipient: int) -> None:
        """Fill `tensor` on the recipient (-1: on every rank) with the values of rank `source`."""
        if recipient == -1:
            dist.broadcast(tensor, group_src=source, group=self.group)
        elif self.rank == source:
            dist.send(tensor, group_dst=recipient, group=self.group)
        elif self.rank == recipient:
            dist.recv(tensor, group_src=source, group=self.group)

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """Sum a tensor over the ranks in place, or take the largest values."""
        if self.size > 1:
            work = self.start_all_reduce(tensor, largest=largest)
            with Range("manyhands::wait all_reduce"):
                work.wait()
        return tensor

    def start_all_reduce(
        self, tensor: Tensor, rows: Any = None, own: Any = None, *, largest: bool = False
    ) -> dist.Work:
        """Start to sum a tensor over the ranks in place, or to take the largest values.

        `rows` are views of a part of the tensor. Each rank writes `own` to the row of this rank.
        """
        if rows is not None:
            rows.zero_()
            rows[self.rank] = own
        options: Any = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with Range("manyhands::launch all_reduce"):
            work = self._process_group.allreduce([tensor], options)
        if rows is not None and isinstance(self._process_group, DryGroup):
            rows.copy_(own.expand_as(rows))  # all ranks send equal rows
        return work

    # -- numbers and text ----------------------------------------------------------------------

    def sum_and_gather(self, row: Tensor, summed: int) -> PendingSums:
        """Start to sum `row[:summed]` over the ranks, and to gather the rest of each rank's row.

        Both use a single small collective. gloo gathers all rows, which takes half the time of a
        reduction. NCCL reduces over many ranks in fewer steps: there the rows are summed, with a
        separate range for the rest of each rank.
        """
        if self.size == 1:
            return PendingSums(row, summed)
        if self.on_gloo(row.device):
            table = row.new_empty(self.size * len(row))
            # torch's function would spend 40 microseconds on checks.
            with Range("manyhands::launch numbers"):
                work = self._process_group._allgather_base(table, row)
            return PendingSums(table.view(self.size, len(row)), summed, work)
        own = row[summed:]
        total = torch.cat([row, own.new_empty((self.size - 1) * len(own))])
        work = self.start_all_reduce(total, total[summed:].view(self.size, -1), own)
        return PendingSums(total, summed, work)

    def all_gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=widest_float(device), device=device)
        everyone = self.sum_and_gather(own, 0).wait()
        rows: list[list[float]] = everyone.view(self.size, -1).tolist()
        return rows

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. Wait up to `patience` for it."""
        if self.size == 1:
            return [text]
        sent = zlib.compress(text.encode(), 1)
        # all_gather needs rows of equal length: first the lengths and the start of each text, then
        # the rest, if any.
        rows = self._all_gather_bytes(len(sent).to_bytes(8, "little") + sent, FIRST_ROUND)
        sizes = [int.from_bytes(row[:8], "little") for row in rows]
        rest = max(sizes) + 8 - FIRST_ROUND
        if rest > 0:
            more = self._all_gather_bytes(sent[FIRST_ROUND - 8 :], rest)
            rows = [row + other for row, other in zip(rows, more, strict=True)]
        pairs = zip(rows, sizes, strict=True)
        return [zlib.decompress(row[8 : 8 + size]).decode() for row, size in pairs]

    def _all_gather_bytes(self, sent: bytes, size: int) -> list[bytes]:
        data = torch.frombuffer(bytearray(sent[:size].ljust(size, b"\0")), dtype=torch.uint8)
        own = data.to(self.any_device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        options = AllgatherOptions()
        if self.patience is not None:
            options.timeout = self.patience
        # Unlike `dist.all_gather`, this method accepts a timeout, and works after
        # `destroy_process_group`, when an asynchronous save may still run.
        self._process_group.allgather([rows], [own], options).wait()
        return [ctypes.string_at(row.data_ptr(), size) for row in map(Tensor.cpu, rows)]


@dataclass
class PendingSums:
    """A pending `sum_and_gather`: the sums, then the gathered numbers in rank order.

    Do not drop this object before the next `sum_and_gather`: the thread of the collective, which
    may release tensors after `wait` returns, must not have the last reference at exit.
    """

    table: Tensor  # a row per rank; a single row if the collective has computed the sums
    summed: int
    work: dist.Work | None = None

    @property
    def done(self) -> bool:
        return self.work is None or self.work.is_completed()

    def done_within(self, seconds: float) -> bool:
        """Wait up to this long; return whether all rows have arrived."""
        deadline = time.monotonic() + seconds
        while not self.done:
            # Poll, because a wait with a timeout would raise an error.
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def read(self) -> list[float]:
        """Wait, and return the result as numbers on the host."""
        self._wait()
        # A single rank, summed by the collective, or faster to sum on the device.
        if self.table.dim() == 1 or self.table.device.type != "cpu":
            return self.wait().tolist()
        rows = self.table.tolist()
        columns = zip(*(row[: self.summed] for row in rows), strict=True)
        result: list[float] = [sum(column) for column in columns]
        for row in rows:
            result += row[self.summed :]
        return result

    def wait(self) -> Tensor:
        """Wait, and return the result as a tensor on the device."""
        self._wait()
        if self.table.dim() == 1:
            return self.table
        sums = self.table[:, : self.summed].sum(dim=0)
        return torch.cat([sums, self.table[:, self.summed :].flatten()])

    def _wait(self) -> None:
        if self.work is not None:
            with Range("manyhands::wait numbers"):
                self.work.wait()


def _warn_if_alone(has_group: bool) -> None:
    global _settled
    size = os.environ.get("WORLD_SIZE", "")
    alone = not has_group and size.isdecimal() and int(size) > 1
    if alone and not _settled:
        warn(
            f"WORLD_SIZE={size} in the environment, but there is no process group: each of the "
            f"{size} processes trains a separate model. {JOIN}",
        )
    _settled = _settled or has_group or alone


def widest_float(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def rank_group_of(
    params: Sequence[Tensor], group: Any = None, world_size: int | None = None
) -> RankGroup:
    """Return the ranks that share the gradients of these parameters."""
    meshes = {p.device_mesh for p in params if is_dtensor(p)}
    if not meshes:
        return RankGroup.of(group, world_size)
    everyone = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    if len(everyone) > 1:
        raise ValueError(
            f"the parameters are sharded over different workers: ranks {sorted(everyone)}. "
            "Create a separate optimizer for the parameters of each mesh."
        )
    ranks = list(everyone.pop())
    mesh = meshes.pop()
    if mesh.ndim > 1 and group in mesh.get_all_groups():
        group = None  # a dimension of the mesh
    workers = RankGroup.of(group or _group_of_mesh(mesh, ranks), world_size)
    if workers.size != len(ranks):
        raise ValueError(
            f"the parameters are sharded over {len(ranks)} workers, and the process group has "
            f"{workers.size}. Omit process_group and world_size."
        )
    return workers


def _group_of_mesh(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of a mesh; None for the default group."""
    if ranks == list(range(dist.get_world_size())):
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    # A mesh of two dimensions has a group per dimension, but no group of all ranks.
    return dist.new_group(ranks, use_local_synchronization=True)
