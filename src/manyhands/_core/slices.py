"""Collectives on the slices of a flat bucket: rank r owns `bucket[cuts[r]:cuts[r + 1]]`.

    reduce_scatter_slices   every rank's bucket in, the sum of its own slice out
    all_gather_slices       every rank's slice in, the whole bucket out

Each begins at once and returns something to wait for. Which of torch's collectives carries the
slices depends on the backend:

              equal slices      uneven slices         sums in another dtype (half precision)
    NCCL      reduce_scatter    a reduce per owner    all_to_all, summed here in float32
    gloo      messages between pairs of ranks: gloo's reduce_scatter moves twice the bytes needed
    NCCL      all_gather        a broadcast per owner
    gloo      a broadcast per owner

Tensors held: the bucket, until it was sent; on gloo one row per other rank, each as long as our
slice, until `PendingReduceScatter.mean` has added them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._core.flat import accumulation_dtype

TAG = 28_008  # of our messages between two ranks, so that no other library's are taken for ours


class RankIdentity(Protocol):
    """What the collectives need to know of a `RankGroup`."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...
    def on_gloo(self, device: torch.device) -> bool: ...


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
        # `to` returns the row itself if the dtype is the same: the sum needs no memory of its own.
        total = first.to(accumulation_dtype(self.sent.dtype))
        for row in others:
            total.add_(row)
        return total.div_(workers).to(dtype)


def reduce_scatter_slices(
    ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int], into: Tensor | None
) -> PendingReduceScatter:
    """Begin to send every slice of `bucket` to its owner, who will sum what arrives.

    `into` is memory for the sum. Leave it and `bucket` alone until the sum is there.
    """
    own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]
    summed_as_sent = bucket.dtype == accumulation_dtype(bucket.dtype)
    check_backend(ranks, bucket.device)
    if ranks.on_gloo(bucket.device):
        return _send_by_pairs(ranks, bucket, cuts, into if summed_as_sent else None)
    sizes = [b - a for a, b in pairwise(cuts)]
    if summed_as_sent and len(set(sizes)) > 1:
        # NCCL's reduce_scatter takes equal slices only.
        works = [
            dist.reduce(part, group_dst=rank, group=ranks.group, async_op=True)
            for rank, part in enumerate(bucket.split(sizes))
            if part.numel()
        ]
        return PendingReduceScatter(own, [], works, bucket)
    if summed_as_sent:
        total = torch.empty_like(own)
        work = _reduce_scatter(total, bucket, group=ranks.group, async_op=True)
        return PendingReduceScatter(None, [total], [work], bucket)
    # NCCL would sum in half precision: move the slices unsummed instead.
    rows = bucket.new_empty(ranks.size * own.numel())
    work = dist.all_to_all_single(
        rows, bucket, [own.numel()] * ranks.size, sizes, group=ranks.group, async_op=True
    )
    return PendingReduceScatter(None, list(rows.view(ranks.size, own.numel())), [work], bucket)


def check_backend(ranks: RankIdentity, device: torch.device) -> None:
    """Raise a RuntimeError if gloo would have to send tensors from a device that it cannot read."""
    if device.type != "cpu" and ranks.on_gloo(device):
        raise RuntimeError(
            f"gloo cannot exchange slices of tensors on {device}. Start the process group with "
            '"nccl" (or "cpu:gloo,cuda:nccl").'
        )


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

    In each turn every rank sends to one other and receives from one other: no rank is a
    bottleneck.
    """
    for distance in range(1, ranks.size):
        yield (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size


def all_gather_slices(ranks: RankIdentity, bucket: Tensor, cuts: Sequence[int]) -> list[dist.Work]:
    """Begin to fill `bucket` on every rank with the slices that each rank owns of it."""
    if not ranks.on_gloo(bucket.device) and len({b - a for a, b in pairwise(cuts)}) == 1:
        own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(bucket, own, group=ranks.group, async_op=True)]
    return [
        dist.broadcast(bucket[a:b], group_src=rank, group=ranks.group, async_op=True)
        for rank, (a, b) in enumerate(pairwise(cuts))
        if a < b
    ]


def reduce_scatter(
    ranks: RankIdentity, total: Tensor, bucket: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> None:
    """Fill `total` with our slice of all ranks' buckets, reduced by `op`; equal slices."""
    _reduce_scatter(total, bucket, op=op, group=ranks.group)


def _reduce_scatter(total: Tensor, bucket: Tensor, **options: Any) -> Any:
    # torch is renaming the function: take the new name where there is one.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(total, bucket, **options)
