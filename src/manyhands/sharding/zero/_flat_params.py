"""Parameters in flat memory, cut as `_layout.py` says, and the pieces that are this worker's.

Tensors we hold
    data         of each segment: the parameters are views of it
    piece.data   what the optimizer updates: a view of the same memory, of one parameter's
                 elements in this worker's slice of one bucket

With one worker nothing is moved: its pieces are the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from manyhands._core.flat import flatten, unflatten
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded_gradient import ShardedGradient
from manyhands._core.shared_memory import check_on_cpu
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._layout import ParamRange


@dataclass(eq=False)
class ParamSlice:
    """Elements `start` to `stop` of a parameter, which this worker keeps up to date."""

    param: int
    start: int
    stop: int
    data: Tensor
    whole: bool  # has the parameter's shape, and not only its elements
    number: int = 0  # among this worker's pieces of the parameter
    rounded: Tensor | None = None  # the parameter's own elements, where `data` is a wider copy

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class PendingGather:
    """A bucket of parameters on its way, perhaps in a narrower type than they have."""

    data: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.sent is not self.data:
            self.data.copy_(self.sent)


@dataclass(eq=False)
class SharedMemoryGather:
    """A bucket of parameters whose slices are to be read from their owners' memory."""

    bucket: FlatBucket
    rank: int
    told: Any

    def wait(self) -> None:
        self.told.wait()
        for rank, (a, b) in enumerate(pairwise(self.bucket.layout.cuts)):
            if rank != self.rank:
                self.bucket.data[a:b].copy_(self.bucket.on_ranks[rank][a:b])


@dataclass(eq=False)
class FlatBucket:
    """A bucket of parameters in memory."""

    layout: _layout.BucketLayout
    data: Tensor
    on_ranks: list[Tensor]  # every worker's `data`, where workers share a host's memory
    slices: list[tuple[ParamSlice, ParamRange]] = field(
        default_factory=list
    )  # ours, and where in our slice
    sharing: PendingGather | SharedMemoryGather | None = None  # of the last step

    def wait(self) -> None:
        """Until the values of the last step are there."""
        if self.sharing is not None:
            self.sharing.wait()
            self.sharing = None


@dataclass(eq=False)
class FlatBuffer:
    layout: _layout.BufferLayout
    data: Tensor
    buckets: list[FlatBucket]


class Shards:
    """All parameters of an optimizer, by index, and who holds what of them.

    `even` chooses the layout, `largest` is the number of elements in a bucket (None: a good one;
    0: each parameter by itself). Frozen
    parameters are left where they are until they thaw; once laid out a parameter stays so.
    With `wire`, parameters travel in that type, and every worker, their owner too, trains with
    what has travelled; the owner keeps the exact values beside them, so that nothing is lost.
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
        self._unread = False
        self.version = 0  # grows whenever parameters get new places
        self.params: list[Tensor] = []
        self.slices: list[list[ParamSlice]] = []
        self.buffers: list[FlatBuffer] = []
        self._load: dict[Any, list[int]] = {}
        self._where: dict[int, tuple[Tensor, int]] = {}  # param -> its storage and place in it

    def extend(self, params: Sequence[Tensor]) -> None:
        """Take in more parameters; `lay_out` gives them their places."""
        self.params.extend(params)
        self.slices.extend([] for _ in params)

    @property
    def missing(self) -> list[int]:
        """Parameters that are to be trained and have no place yet."""
        return [i for i in self.without_slices if self.params[i].requires_grad or not self._divided]

    @property
    def without_slices(self) -> list[int]:
        """Parameters that have no place: frozen ones, and those that `lay_out` is for."""
        return [
            i
            for i, (param, pieces) in enumerate(zip(self.params, self.slices, strict=True))
            if not pieces and i not in self._where and (param.numel() or not self._divided)
        ]

    @property
    def _divided(self) -> bool:
        return self.workers.size > 1

    def lay_out(self) -> list[ParamSlice]:
        """Give places to the parameters that need one; returns this worker's new pieces."""
        new = self.missing
        self.version += bool(new)
        if self.workers.size == 1:
            for i in new:
                param = self.params[i]
                self.slices[i] = [ParamSlice(i, 0, param.numel(), param, whole=True)]
            return [piece for i in new for piece in self.slices[i]]
        kinds: dict[Any, list[int]] = {}
        for i in reversed(new):  # about the order in which backward comes to them
            kinds.setdefault((self.params[i].dtype, self.params[i].device), []).append(i)
        for kind, indices in kinds.items():
            for plan in self._planned(kind, indices):
                self._build(plan, kind)
        return [piece for i in new for piece in self.slices[i]]

    def _planned(self, kind: Any, indices: list[int]) -> list[_layout.BufferLayout]:
        sizes = [(i, self.params[i].numel()) for i in indices]
        largest = self.largest
        if largest is None:
            largest = _layout.bucket_size(self.workers.size, sum(size for _, size in sizes))
        if self.even:
            return _layout.even_layout(sizes, self.workers.size, largest)
        load = self._load.setdefault(kind, [0] * self.workers.size)
        return _layout.whole_layout(sizes, self.workers.size, largest, load)

    @torch.no_grad()
    def _build(self, plan: _layout.BufferLayout, kind: Any) -> None:
        dtype, device = kind
        data, on_ranks = self._memory(plan.size, dtype, device)
        for index, place in plan.starts.items():
            param = self.params[index]
            view = unflatten(data[place : place + param.numel()], param)
            view.copy_(param)
            param.data = view
            self._where[index] = (data, place)
        buckets = [FlatBucket(b, *_part(b, data, on_ranks)) for b in plan.buckets]
        self.buffers.append(FlatBuffer(plan, data, buckets))
        for bucket in buckets:
            self._cut(bucket)

    def _memory(
        self, size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[Tensor]]:
        """Room for a segment: our own, and every worker's if they share a host's memory."""
        host = self.workers.shared_memory
        if host is None:
            return torch.zeros(size, dtype=dtype, device=device), []
        check_on_cpu(device)
        on_ranks = host.empty(size, dtype)
        return on_ranks[self.workers.rank], on_ranks

    def _cut(self, bucket: FlatBucket) -> None:
        """Find this worker's pieces of a bucket."""
        rank = self.workers.rank
        own = bucket.data[bucket.layout.cuts[rank] : bucket.layout.cuts[rank + 1]]
        for run in bucket.layout.owned(rank):
            piece = ParamSlice(run.param, run.start, run.stop, own, whole=not self.even)
            self._point(piece, own[run.offset : run.offset + run.size])
            piece.number = len(self.slices[run.param])
            self.slices[run.param].append(piece)
            bucket.slices.append((piece, run))

    def _point(self, piece: ParamSlice, flat: Tensor) -> None:
        """Let a piece have these elements."""
        data = unflatten(flat, self.params[piece.param]) if piece.whole else flat
        exact = _narrows(self.wire, data)
        piece.data = torch.nn.Parameter(data.clone() if exact else data)
        piece.rounded = data if exact else None

    @property
    def buckets(self) -> Iterator[FlatBucket]:
        """All buckets, in about the order in which backward finishes them."""
        for segment in self.buffers:
            yield from segment.buckets

    def held_by(self, rank: int, members: Iterable[int]) -> list[Tensor]:
        """What worker `rank` keeps up to date of some parameters: these, or parts of them."""
        chosen = set(members)
        if self.workers.size == 1:
            return [self.params[i] for i in sorted(chosen)]
        return [
            self.params[run.param]
            if run.size == self.params[run.param].numel()
            else flatten(self.params[run.param], self.params[run.param])[run.start : run.stop]
            for bucket in self.buckets
            for run in bucket.layout.owned(rank)
            if run.param in chosen
        ]

    def buckets_of(self, params: Iterable[Tensor]) -> list[FlatBucket]:
        """Those in which any of these parameters lies."""
        wanted = {id(param) for param in params}
        return [
            bucket
            for bucket in self.buckets
            if any(id(self.params[run.param]) in wanted for run in bucket.layout.ranges)
        ]

    def active(self, bucket: FlatBucket) -> bool:
        """Whether anything in the bucket is being trained."""
        return any(self.params[run.param].requires_grad for run in bucket.layout.ranges)

    @property
    def to_step(self) -> list[FlatBucket]:
        """The buckets in which a step may change something; first what forward wants first."""

        def may_change(bucket: FlatBucket) -> bool:
            params = (self.params[run.param] for run in bucket.layout.ranges)
            return any(param.requires_grad or param.grad is not None for param in params)

        return [bucket for bucket in self.buckets if may_change(bucket)][::-1]

    def release(self) -> None:
        """Forget all places (before any optimizer state is tied to them)."""
        self.buffers, self._where, self._load = [], {}, {}
        self.slices = [[] for _ in self.params]

    # -- parameters that were moved ------------------------------------------------------------

    @property
    def moved(self) -> bool:
        """Whether parameters were moved or converted, so that they lie elsewhere now."""
        return any(
            self.params[i].data_ptr() != data.data_ptr() + place * data.element_size()
            for i, (data, place) in self._where.items()
        )

    @torch.no_grad()
    def follow(self) -> list[ParamSlice]:
        """Lay parameters that were moved out again where they are now; pieces keep their cuts.

        Returns the pieces whose `data` is another tensor now.
        """
        changed: list[ParamSlice] = []
        for segment in self.buffers:
            kinds = {(self.params[i].dtype, self.params[i].device) for i in segment.layout.starts}
            if len(kinds) > 1:
                names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
                raise RuntimeError(
                    "parameters that share a bucket were moved or converted one by one "
                    f"({names}). Move the whole model, or build the optimizer after moving."
                )
            ((dtype, device),) = kinds
            data, on_ranks = self._memory(segment.layout.size, dtype, device)
            for index, place in segment.layout.starts.items():
                param = self.params[index]
                view = unflatten(data[place : place + param.numel()], param)
                view.copy_(param)
                param.data = view
                self._where[index] = (data, place)
            segment.data = data
            for bucket in segment.buckets:
                rank = self.workers.rank
                bucket.data, bucket.on_ranks = _part(bucket.layout, data, on_ranks)
                own = bucket.data[bucket.layout.cuts[rank] : bucket.layout.cuts[rank + 1]]
                for piece, run in bucket.slices:
                    self._point(piece, own[run.offset : run.offset + run.size])
                    changed.append(piece)
        return changed

    # -- between gradients and pieces ----------------------------------------------------------

    def gradient(self, piece: ParamSlice) -> Tensor | None:
        """The gradient of a piece, in the shape of its data."""
        param = self.params[piece.param]
        grad = param.grad
        if grad is None or self.workers.size == 1:
            return grad
        if isinstance(grad, ShardedGradient):
            flat = grad.slices[piece.number]
            return unflatten(flat, param) if piece.whole else flat
        return grad if piece.whole else flatten(grad, param)[piece.start : piece.stop]

    # -- parameters before and after a step ----------------------------------------------------

    @torch.no_grad()
    def take_changes(self) -> None:
        """Where a parameter was changed from outside, the exact copies of it no longer count."""
        for pieces in self.slices:
            for piece in pieces:
                if piece.rounded is not None:
                    kept = piece.data.to(self.wire).to(piece.data.dtype) == piece.rounded
                    piece.data.copy_(torch.where(kept, piece.data, piece.rounded))

    def note_change(self) -> None:
        """Let autograd know that a step has changed the parameters, as it does of a plain one."""
        params = [self.params[run.param] for b in self.to_step for run in b.layout.ranges]
        torch.autograd.graph.increment_version(params)

    @torch.no_grad()
    def share(self, buckets: Sequence[FlatBucket]) -> None:
        """Begin to send this worker's slices to the others, and to receive theirs."""
        for bucket in buckets:
            for piece, _ in bucket.slices:
                if piece.rounded is not None:
                    piece.rounded.copy_(piece.data)
        host = self.workers.shared_memory
        told = None if host is None else host.barrier()
        for bucket in buckets:
            if host is not None:
                self._unread = True
                bucket.sharing = SharedMemoryGather(bucket, self.workers.rank, told)
                continue
            sent = bucket.data
            if _narrows(self.wire, sent):
                sent = sent.to(self.wire)
            works = self.workers.all_gather_slices(sent, bucket.layout.cuts)
            bucket.sharing = PendingGather(bucket.data, sent, works)

    def wait(self) -> None:
        """Until all parameters that the last step made are there."""
        for bucket in self.buckets:
            bucket.wait()
        if self._unread and self.workers.shared_memory is not None:
            self._unread = False
            self.workers.shared_memory.barrier().wait()  # nobody changes what another still reads


def _part(
    layout: _layout.BucketLayout, data: Tensor, on_ranks: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """A bucket's part of a segment's memory, and of every worker's."""
    start, stop = layout.start, layout.start + layout.size
    return data[start:stop], [each[start:stop] for each in on_ranks]


def _narrows(wire: torch.dtype | None, tensor: Tensor) -> bool:
    return wire is not None and tensor.is_floating_point() and tensor.itemsize > wire.itemsize
