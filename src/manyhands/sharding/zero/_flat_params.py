"""Parameters in flat memory, cut as `_layout.py` says, and the slices that this rank owns.

Tensors we hold
    buffer.data   one flat tensor; the parameters are views of it
    slice.data    what the optimizer updates: a view of the same memory, with the elements of one
                  parameter that lie in this rank's slice of one bucket

A step, as this file sees it: `gradient` gives each slice its part of `param.grad`, the optimizer
updates `slice.data` in place, `start_all_gather` sends the slices and receives the other ranks',
`wait` returns when all parameters are complete.

With one rank nothing is moved: its slices are the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

Kind: TypeAlias = tuple[torch.dtype, torch.device]  # parameters of one kind share buffers


@dataclass(eq=False)
class ParamSlice:
    """Elements `start` to `stop` of a parameter, which this rank keeps up to date."""

    param: int
    start: int
    stop: int
    data: Tensor
    whole: bool  # `data` has the parameter's shape; otherwise it is flat
    number: int = 0  # among this rank's slices of the parameter
    rounded: Tensor | None = None  # the parameter's own elements, if `data` is an exact copy

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class PendingGather:
    """A bucket of parameters on its way, perhaps in a narrower type than theirs."""

    data: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> None:
        """Wait for the other ranks' slices; copy them into the parameters if they came rounded."""
        for work in self.works:
            work.wait()
        if self.sent is not self.data:
            self.data.copy_(self.sent)


@dataclass(eq=False)
class SharedMemoryGather:
    """A bucket of parameters whose slices will be read from their owners' memory."""

    bucket: FlatBucket
    rank: int
    barrier: dist.Work  # until it is over, an owner may still be writing its slice

    def wait(self) -> None:
        """Wait until every owner has written its slice, and copy the slices from their memory."""
        self.barrier.wait()
        for rank, (a, b) in enumerate(pairwise(self.bucket.layout.cuts)):
            if rank != self.rank:
                self.bucket.data[a:b].copy_(self.bucket.on_ranks[rank][a:b])


@dataclass(eq=False)
class FlatBucket:
    """A bucket of parameters in memory."""

    layout: _layout.BucketLayout
    data: Tensor
    on_ranks: list[Tensor]  # every rank's `data`, if the ranks share memory; otherwise empty
    # This rank's, and their places in its slice of the bucket.
    slices: list[tuple[ParamSlice, ParamRange]] = field(default_factory=list)


@dataclass(eq=False)
class FlatBuffer:
    """Some parameters in one flat tensor, and its buckets."""

    layout: _layout.BufferLayout
    data: Tensor
    buckets: list[FlatBucket]


class Shards:
    """All parameters of an optimizer, by index, and which rank owns what of them.

    `even` chooses the layout. `largest` is the number of elements in a bucket (None: a good one;
    0: a bucket for each parameter). A parameter's *place* is its part of the flat memory. A frozen
    one is left where it is until it thaws. Once a parameter has its place, it keeps it.

    With `wire`, parameters travel in that narrower type, and every rank, their owner too, trains
    with the rounded values. The owner keeps an exact copy, so that small updates are not lost.
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
        self._gathers: list[PendingGather | SharedMemoryGather] = []  # of this step
        self.params: list[Tensor] = []
        self.slices: list[list[ParamSlice]] = []
        self.buffers: list[FlatBuffer] = []
        self._load: dict[Kind, list[int]] = {}  # elements per rank
        self._where: dict[int, tuple[Tensor, int]] = {}  # param -> its buffer and start in it

    def extend(self, params: Sequence[Tensor]) -> None:
        """Add parameters; `lay_out` gives them their places."""
        self.params.extend(params)
        self.slices.extend([] for _ in params)

    @property
    def missing(self) -> list[int]:
        """Indices of trained parameters without a place: those that `lay_out` is for."""
        return [i for i in self.without_slices if self.params[i].requires_grad or not self._divided]

    @property
    def without_slices(self) -> list[int]:
        """Indices of parameters without a place: frozen ones, and those that `lay_out` is for."""
        return [
            i
            for i, (param, slices) in enumerate(zip(self.params, self.slices, strict=True))
            if not slices and i not in self._where and (param.numel() or not self._divided)
        ]

    @property
    def _divided(self) -> bool:
        return self.workers.size > 1

    def lay_out(self) -> list[ParamSlice]:
        """Give places to the parameters that need one; return this rank's new slices."""
        new = self.missing
        if self.workers.size == 1:
            for i in new:
                param = self.params[i]
                self.slices[i] = [ParamSlice(i, 0, param.numel(), param, whole=True)]
            return [owned for i in new for owned in self.slices[i]]
        kinds: dict[Kind, list[int]] = {}
        for i in reversed(new):  # about the order in which backward finishes them
            kinds.setdefault((self.params[i].dtype, self.params[i].device), []).append(i)
        for kind, indices in kinds.items():
            for layout in self._make_layouts(kind, indices):
                self._build(layout, kind)
        return [owned for i in new for owned in self.slices[i]]

    def _make_layouts(self, kind: Kind, indices: list[int]) -> list[_layout.BufferLayout]:
        """Decide which rank owns what of these parameters of one kind; a layout per buffer."""
        sizes = [(i, self.params[i].numel()) for i in indices]
        largest = self.largest
        if largest is None:
            largest = _layout.bucket_size(self.workers.size, sum(size for _, size in sizes))
        if self.even:
            return _layout.even_layout(sizes, self.workers.size, largest)
        load = self._load.setdefault(kind, [0] * self.workers.size)
        return _layout.whole_layout(sizes, self.workers.size, largest, load)

    @torch.no_grad()
    def _build(self, layout: _layout.BufferLayout, kind: Kind) -> None:
        """Allocate a layout's buffer, move its parameters there, and find this rank's slices."""
        dtype, device = kind
        data, on_ranks = self._allocate(layout.size, dtype, device)
        self._move_into(data, layout)
        buckets = [FlatBucket(b, *_range_of_bucket(b, data, on_ranks)) for b in layout.buckets]
        self.buffers.append(FlatBuffer(layout, data, buckets))
        for bucket in buckets:
            self._find_slices(bucket)

    def _move_into(self, data: Tensor, layout: _layout.BufferLayout) -> None:
        """Copy the parameters of a layout into flat memory, and make them views of it."""
        for index, start in layout.starts.items():
            param = self.params[index]
            view = unflatten(data[start : start + param.numel()], param)
            view.copy_(param)
            # `.data` keeps the Parameter object, which the model and the optimizer refer to.
            param.data = view
            self._where[index] = (data, start)

    def _allocate(
        self, size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[Tensor]]:
        """Return memory for a buffer: our own, and every rank's if the ranks share memory."""
        host = self.workers.shared_memory
        if host is None:
            return torch.zeros(size, dtype=dtype, device=device), []
        check_on_cpu(device)
        on_ranks = host.empty(size, dtype)
        return on_ranks[self.workers.rank], on_ranks

    def _find_slices(self, bucket: FlatBucket) -> None:
        """Find this rank's slices of parameters in a bucket."""
        rank = self.workers.rank
        own = bucket.data[bucket.layout.cuts[rank] : bucket.layout.cuts[rank + 1]]
        for place in bucket.layout.owned(rank):
            owned = ParamSlice(place.param, place.start, place.stop, own, whole=not self.even)
            self._set_data(owned, own[place.offset : place.offset + place.size])
            owned.number = len(self.slices[place.param])
            self.slices[place.param].append(owned)
            bucket.slices.append((owned, place))

    def _set_data(self, owned: ParamSlice, flat: Tensor) -> None:
        """Make a slice a view of these elements; or a copy, if they are the rounded ones."""
        data = unflatten(flat, self.params[owned.param]) if owned.whole else flat
        exact = _narrows(self.wire, data)
        owned.data = torch.nn.Parameter(data.clone() if exact else data)
        owned.rounded = data if exact else None

    @property
    def buckets(self) -> Iterator[FlatBucket]:
        """All buckets, in about the order in which backward finishes them."""
        for buffer in self.buffers:
            yield from buffer.buckets

    def held_by(self, rank: int, members: Iterable[int]) -> list[Tensor]:
        """Return what rank `rank` owns of some parameters: whole ones, or views of slices."""
        chosen = set(members)
        if self.workers.size == 1:
            return [self.params[i] for i in sorted(chosen)]
        owned = [place for bucket in self.buckets for place in bucket.layout.owned(rank)]
        held = [(self.params[place.param], place) for place in owned if place.param in chosen]
        return [
            p if place.size == p.numel() else flatten(p, p)[place.start : place.stop]
            for p, place in held
        ]

    def active(self, bucket: FlatBucket) -> bool:
        """Return whether any parameter in the bucket is trained."""
        return any(self.params[place.param].requires_grad for place in bucket.layout.ranges)

    @property
    def to_step(self) -> list[FlatBucket]:
        """The buckets that a step may change, in about the order in which forward uses them."""

        def may_change(bucket: FlatBucket) -> bool:
            params = (self.params[place.param] for place in bucket.layout.ranges)
            return any(param.requires_grad or param.grad is not None for param in params)

        return [bucket for bucket in self.buckets if may_change(bucket)][::-1]

    def release(self) -> None:
        """Forget all places. Only possible before optimizer state is tied to the slices."""
        self.buffers = []
        self._where = {}
        self._load = {}
        self.slices = [[] for _ in self.params]

    # -- parameters that were moved ------------------------------------------------------------

    @property
    def moved(self) -> bool:
        """Whether `model.to(...)` or `half()` has put parameters outside of our buffers."""
        return any(
            self.params[i].data_ptr() != data.data_ptr() + place * data.element_size()
            for i, (data, place) in self._where.items()
        )

    @torch.no_grad()
    def rebuild_buffers(self) -> list[ParamSlice]:
        """Build the buffers anew on the device and in the dtype that parameters have now."""
        # Slices keep their ranges. Return those whose `data` is another tensor now.
        changed: list[ParamSlice] = []
        for buffer in self.buffers:
            kinds = {(self.params[i].dtype, self.params[i].device) for i in buffer.layout.starts}
            if len(kinds) > 1:
                names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
                raise RuntimeError(
                    f"parameters that share a bucket are {names}. Move the whole model, or build "
                    "the optimizer after moving."
                )
            ((dtype, device),) = kinds
            data, on_ranks = self._allocate(buffer.layout.size, dtype, device)
            self._move_into(data, buffer.layout)
            buffer.data = data
            rank = self.workers.rank
            for bucket in buffer.buckets:
                bucket.data, bucket.on_ranks = _range_of_bucket(bucket.layout, data, on_ranks)
                own = bucket.data[bucket.layout.cuts[rank] : bucket.layout.cuts[rank + 1]]
                for owned, place in bucket.slices:
                    self._set_data(owned, own[place.offset : place.offset + place.size])
                    changed.append(owned)
        return changed

    # -- between gradients and slices ----------------------------------------------------------

    def gradient(self, owned: ParamSlice) -> Tensor | None:
        """Return the gradient of a slice, in the shape of its data."""
        param = self.params[owned.param]
        grad = param.grad
        if grad is None or self.workers.size == 1:
            return grad
        if isinstance(grad, ShardedGradient):
            flat = grad.slices[owned.number]
            return unflatten(flat, param) if owned.whole else flat
        return grad if owned.whole else flatten(grad, param)[owned.start : owned.stop]

    # -- parameters before and after a step ----------------------------------------------------

    @torch.no_grad()
    def take_changes(self) -> None:
        """Before a step: update exact copies of parameters that were changed, as by loading."""
        for slices in self.slices:
            for owned in slices:
                if owned.rounded is not None:
                    # An exact value that does not round to the parameter's is out of date.
                    kept = owned.data.to(self.wire).to(owned.data.dtype) == owned.rounded
                    owned.data.copy_(torch.where(kept, owned.data, owned.rounded))

    def raise_versions(self) -> None:
        """Raise the parameters' versions: autograd then notices a backward through old values."""
        # Other ranks' slices arrive in `data`, which does not count for the views of it.
        params = [self.params[place.param] for b in self.to_step for place in b.layout.ranges]
        torch.autograd.graph.increment_version(params)

    @torch.no_grad()
    def start_all_gather(self, buckets: Sequence[FlatBucket]) -> None:
        """Begin to send this rank's slices of the buckets, and to receive the other ranks'."""
        for bucket in buckets:
            for owned, _ in bucket.slices:
                if owned.rounded is not None:
                    owned.rounded.copy_(owned.data)
        memory = self.workers.shared_memory
        if memory is not None:
            barrier = memory.barrier()  # one for all of the buckets
            self._gathers += [SharedMemoryGather(b, self.workers.rank, barrier) for b in buckets]
            return
        for bucket in buckets:
            sent = bucket.data
            if _narrows(self.wire, sent):
                sent = sent.to(self.wire)
            works = self.workers.all_gather_slices(sent, bucket.layout.cuts)
            self._gathers.append(PendingGather(bucket.data, sent, works))

    def wait(self) -> None:
        """Wait until all parameters of this step have arrived."""
        for gather in self._gathers:
            gather.wait()
        if self._gathers and self.workers.shared_memory is not None:
            # A rank must not change its slices while another is still reading them.
            self.workers.shared_memory.barrier().wait()
        self._gathers.clear()


def _range_of_bucket(
    layout: _layout.BucketLayout, data: Tensor, on_ranks: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return a bucket's range of a buffer, and of every rank's buffer."""
    start = layout.start
    stop = layout.start + layout.size
    return data[start:stop], [each[start:stop] for each in on_ranks]


def _narrows(wire: torch.dtype | None, tensor: Tensor) -> bool:
    """Return whether sending a tensor as `wire` rounds it."""
    return wire is not None and tensor.is_floating_point() and tensor.itemsize > wire.itemsize
