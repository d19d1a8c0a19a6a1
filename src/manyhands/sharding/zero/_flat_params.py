"""Move parameters to flat memory, and cut slices as in `_layout.py`.

Tensors
    buffer.data   a flat tensor; parameters are views of it
    slice.data    a view of the same memory: the elements of a parameter in this rank's slice of a
                  bucket, updated by the optimizer

In a step, `gradient` returns a slice's part of `param.grad`, the optimizer updates `slice.data` in
place, `start_all_gather` sends slices, and `wait` completes the parameters.

On a single rank, slices are the unmoved parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._ranks.slices import check_on_cpu
from manyhands._tensors.flat import flatten, unflatten
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._layout import ParamRange

Kind: TypeAlias = tuple[torch.dtype, torch.device]  # parameters of equal kind share buffers


@dataclass(eq=False)
class ParamSlice:
    """Elements `start` to `stop` of a parameter, which this rank updates."""

    param: int
    start: int
    stop: int
    data: Tensor
    whole: bool  # `data` has the parameter's shape; otherwise it is flat
    rounded: Tensor | None = None  # the elements, if `data` is an exact copy


@dataclass(eq=False)
class PendingGather:
    """A bucket of parameters in an all_gather, perhaps in a narrower type."""

    data: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.sent is not self.data:
            self.data.copy_(self.sent)


@dataclass(eq=False)
class SharedMemoryGather:
    """A bucket of parameters to read from the memory of other ranks."""

    bucket: FlatBucket
    rank: int
    barrier: dist.Work  # until then, an owner may write a slice

    def wait(self) -> None:
        self.barrier.wait()
        for rank, (a, b) in enumerate(pairwise(self.bucket.layout.cuts)):
            if rank != self.rank:
                self.bucket.data[a:b].copy_(self.bucket.on_ranks[rank][a:b])


@dataclass(eq=False)
class FlatBucket:
    layout: _layout.BucketLayout
    data: Tensor
    on_ranks: list[Tensor]  # every rank's `data`, with shared memory; else empty
    # This rank's slices, with places in the bucket.
    slices: list[tuple[ParamSlice, ParamRange]] = field(default_factory=list)


@dataclass(eq=False)
class FlatBuffer:
    layout: _layout.BufferLayout
    data: Tensor
    buckets: list[FlatBucket]


class Shards:
    """All parameters of an optimizer, by index, and the ranks that own their elements.

    `largest` is the number of elements in a bucket (None: the default; 0: a bucket per parameter).
    A *place* is a parameter's part of the flat memory, assigned when the parameter is first
    trained.

    With `wire`, ranks send parameters in that narrower type and train with rounded values. Owners
    store exact copies, so that small updates are not lost.
    """

    def __init__(
        self,
        workers: RankGroup,
        *,
        even: bool,
        largest: int | None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.workers = workers
        self.even = even
        self.largest = largest
        self.wire = wire
        self._gathers: list[PendingGather | SharedMemoryGather] = []
        self.params: list[Tensor] = []
        self.slices: list[list[ParamSlice]] = []
        self.buffers: list[FlatBuffer] = []
        self._load: dict[Kind, list[int]] = {}  # elements per rank
        self._where: dict[int, tuple[Tensor, int]] = {}  # param -> buffer, start in the buffer

    def extend(self, params: Sequence[Tensor]) -> None:
        self.params.extend(params)
        self.slices.extend([] for _ in params)

    @property
    def missing(self) -> list[int]:
        """Indices of trained parameters without a place."""
        if self.workers.size == 1:
            return self.without_slices
        return [i for i in self.without_slices if self.params[i].requires_grad]

    @property
    def without_slices(self) -> list[int]:
        """Indices of all parameters without a place."""
        found = []
        for i, param in enumerate(self.params):
            empty = self.workers.size > 1 and not param.numel()
            if not self.slices[i] and i not in self._where and not empty:
                found.append(i)
        return found

    def lay_out(self) -> list[ParamSlice]:
        """Assign places to the `missing` parameters; return this rank's new slices."""
        ranks = self.workers.size
        new = self.missing
        kinds: dict[Kind, list[int]] = {}
        for i in reversed(new):  # approximates the order of gradients in backward
            param = self.params[i]
            if ranks == 1:
                self.slices[i] = [ParamSlice(i, 0, param.numel(), param, whole=True)]
            else:
                kinds.setdefault((param.dtype, param.device), []).append(i)
        for kind, indices in kinds.items():
            sizes = [(i, self.params[i].numel()) for i in indices]
            largest = self.largest
            if largest is None:
                largest = _layout.bucket_size(ranks, sum(size for _, size in sizes))
            if self.even:
                layouts = _layout.even_layout(sizes, ranks, largest)
            else:
                load = self._load.setdefault(kind, [0] * ranks)
                layouts = _layout.whole_layout(sizes, ranks, largest, load)
            for layout in layouts:
                self._build(layout, kind)
        return [owned for i in new for owned in self.slices[i]]

    @torch.no_grad()
    def _build(self, layout: _layout.BufferLayout, kind: Kind) -> None:
        dtype, device = kind
        on_ranks: list[Tensor] = []
        if self.workers.shared_memory is None:
            data = torch.zeros(layout.size, dtype=dtype, device=device)
        else:
            check_on_cpu(device)
            on_ranks = self.workers.shared_memory.empty(layout.size, dtype)
            data = on_ranks[self.workers.rank]
        for index, start in layout.starts.items():
            param = self.params[index]
            view = unflatten(data[start : start + param.numel()], param)
            view.copy_(param)
            # Preserves the Parameter object.
            param.data = view
            self._where[index] = (data, start)
        buckets = []
        for each in layout.buckets:
            within = slice(each.start, each.start + each.size)
            bucket = FlatBucket(each, data[within], [other[within] for other in on_ranks])
            self._find_slices(bucket)
            buckets.append(bucket)
        self.buffers.append(FlatBuffer(layout, data, buckets))

    def _find_slices(self, bucket: FlatBucket) -> None:
        start = bucket.layout.cuts[self.workers.rank]
        for place in bucket.layout.owned(self.workers.rank):
            data = bucket.data[start + place.offset : start + place.offset + place.size]
            if not self.even:
                data = unflatten(data, self.params[place.param])
            rounded = None
            if _narrows(self.wire, data):
                rounded = data
                data = data.clone()
            owned = ParamSlice(
                place.param,
                place.start,
                place.stop,
                torch.nn.Parameter(data),
                whole=not self.even,
                rounded=rounded,
            )
            self.slices[place.param].append(owned)
            bucket.slices.append((owned, place))

    @property
    def buckets(self) -> Iterator[FlatBucket]:
        for buffer in self.buffers:
            yield from buffer.buckets

    def held_by(self, rank: int, members: range) -> list[Tensor]:
        """Return parameters of rank `rank`, or views of slices."""
        if self.workers.size == 1:
            return [self.params[i] for i in members]
        held = []
        for bucket in self.buckets:
            for place in bucket.layout.owned(rank):
                param = self.params[place.param]
                if place.param in members and place.size == param.numel():
                    held.append(param)
                elif place.param in members:
                    held.append(flatten(param, param)[place.start : place.stop])
        return held

    @property
    def to_step(self) -> list[FlatBucket]:
        """The buckets to step, approximately in forward order."""
        chosen = []
        for bucket in self.buckets:
            params = [self.params[place.param] for place in bucket.layout.ranges]
            if any(param.requires_grad or param.grad is not None for param in params):
                chosen.append(bucket)
        chosen.reverse()
        return chosen

    def release(self) -> None:
        """Discard all places. Only before optimizer state exists."""
        self.buffers = []
        self._where = {}
        self._load = {}
        self.slices = [[] for _ in self.params]

    # -- parameters that were moved ------------------------------------------------------------

    @property
    def moved(self) -> bool:
        """Whether `model.to(...)` or `half()` has moved parameters out of the buffers."""
        for i, (data, start) in self._where.items():
            param = self.params[i]
            in_buffer = torch._C._is_alias_of(param, data)  # type: ignore[attr-defined]
            if not in_buffer or param.storage_offset() != start:
                return True
        return False

    def rebuild_buffers(self) -> None:
        layouts: list[tuple[_layout.BufferLayout, Kind]] = []
        for buffer in self.buffers:
            kinds = {(self.params[i].dtype, self.params[i].device) for i in buffer.layout.starts}
            if len(kinds) > 1:
                names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
                raise RuntimeError(
                    f"parameters that share a bucket are {names}. Move the whole model, or build "
                    "the optimizer after moving."
                )
            layouts.append((buffer.layout, kinds.pop()))
        self.buffers = []
        self.slices = [[] for _ in self.params]
        for layout, kind in layouts:
            self._build(layout, kind)

    # -- between gradients and slices ----------------------------------------------------------

    def gradient(self, owned: ParamSlice) -> Tensor | None:
        param = self.params[owned.param]
        grad = param.grad
        if isinstance(grad, ShardedGradient):
            flat = grad.slices[self.slices[owned.param].index(owned)]
            return unflatten(flat, param) if owned.whole else flat
        if grad is None or owned.whole:
            return grad
        return flatten(grad, param)[owned.start : owned.stop]

    # -- parameters before and after a step ----------------------------------------------------

    @torch.no_grad()
    def take_changes(self) -> None:
        """Refresh exact copies of parameters that were changed."""
        for slices in self.slices:
            for owned in slices:
                if owned.rounded is not None:
                    # Keep exact values that round to the parameter's value.
                    kept = owned.data.to(self.wire).to(owned.data.dtype) == owned.rounded
                    owned.data.copy_(torch.where(kept, owned.data, owned.rounded))

    @torch.no_grad()
    def start_all_gather(self, buckets: Sequence[FlatBucket]) -> None:
        for bucket in buckets:
            for owned, _ in bucket.slices:
                if owned.rounded is not None:
                    owned.rounded.copy_(owned.data)
        memory = self.workers.shared_memory
        if memory is not None:
            barrier = memory.barrier()
            self._gathers += [SharedMemoryGather(b, self.workers.rank, barrier) for b in buckets]
            return
        for bucket in buckets:
            sent = bucket.data
            if _narrows(self.wire, sent):
                sent = sent.to(self.wire)
            works = self.workers.all_gather_slices(sent, bucket.layout.cuts)
            self._gathers.append(PendingGather(bucket.data, sent, works))

    def wait(self) -> None:
        # Autograd detects a backward through old values by versions, which writes to `data` do not
        # change.
        params = [self.params[place.param] for b in self.to_step for place in b.layout.ranges]
        torch.autograd.graph.increment_version(params)
        for gather in self._gathers:
            gather.wait()
        if self._gathers and self.workers.shared_memory is not None:
            # Slices must not change while other ranks read.
            self.workers.shared_memory.barrier().wait()
        self._gathers.clear()


def _narrows(wire: torch.dtype | None, tensor: Tensor) -> bool:
    return wire is not None and tensor.is_floating_point() and tensor.itemsize > wire.itemsize
