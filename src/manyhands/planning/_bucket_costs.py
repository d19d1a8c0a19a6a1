"""What DDP, OSS and ShardedDataParallel cost a worker: gradients in buckets.

The numbers come from the layout that the library uses (`sharding/zero/_layout.py`), with its
padding and its uneven slices. `in_flight` is the gradient that autograd has just made and, if
gradients are sharded, the bucket that is being filled, the buckets that are being reduced, and the
slices that have arrived for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from manyhands.planning._sizes import (
    MIB,
    Cost,
    ModelSizes,
    OptimizerParams,
    ParamSize,
    sent_per_worker,
)
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._reducer import IN_FLIGHT

DDP_BUCKETS = (1 * MIB, 25 * MIB)  # the size of torch's first bucket, and of all others


@dataclass
class _PlannedBucket:
    """A bucket of gradients, with the bytes of each rank's slice, or one number for all ranks."""

    size: int
    slices: list[int]
    received: int  # how many slices a rank's receive buffer has room for
    summing: int  # how many more slices of memory the sum takes
    gradients: dict[int, int]  # bytes of each gradient that lies in the bucket, by id of ParamSize
    is_view: bool  # the bucket is a range of one gradient, so nothing is copied into it


@dataclass
class ParamBuckets:
    """All parameters in buckets, and what every rank owns of them."""

    state: list[int]  # bytes of state by rank
    state_on_every_rank: int = 0  # bytes that come on top of these, equal on all ranks
    parameters: int = 0
    parameter_messages: int = 0  # collectives that bring the new parameters
    buckets: list[_PlannedBucket] = field(default_factory=list)

    @property
    def bucket_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def ddp_cost(sizes: ModelSizes, workers: int) -> Cost:
    return Cost(
        parameters=sizes.parameter_bytes,
        gradients=sizes.gradient_bytes,
        optimizer=sizes.state_bytes,
        # Gradients are views of DDP's buckets, so only autograd's newest gradient is extra.
        in_flight=max(param.bytes for param in sizes.trained),
        # An all-reduce is a reduce-scatter and an all-gather, hence twice the gradients.
        sent=sent_per_worker(2 * sizes.gradient_bytes + sizes.buffers, workers),
        collectives=ddp_buckets(sizes.trained) + sizes.buffer_messages,
    )


def ddp_buckets(params: Sequence[ParamSize]) -> int:
    """Return how many buckets DistributedDataParallel reduces in a step.

    A bucket is closed once it has reached its size. Parameters are taken from the last to the
    first, which is about the order in which backward reaches them.
    """
    closed_buckets, filled, closed = 0, dict[Hashable, int](), dict[Hashable, int]()
    for param in reversed(params):
        kind = param.kind
        filled[kind] = filled.get(kind, 0) + param.bytes
        if filled[kind] >= DDP_BUCKETS[min(closed.get(kind, 0), 1)]:
            closed[kind], filled[kind] = closed.get(kind, 0) + 1, 0
            closed_buckets += 1
    return closed_buckets + sum(size > 0 for size in filled.values())


def oss_cost(ddp: Cost, layout: ParamBuckets, workers: int) -> Cost:
    return Cost(
        parameters=layout.parameters,
        gradients=ddp.gradients,
        optimizer=max(layout.state) + layout.state_on_every_rank,
        in_flight=ddp.in_flight,
        sent=ddp.sent + sent_per_worker(layout.bucket_bytes, workers),
        collectives=ddp.collectives + layout.parameter_messages,
    )


def sharded_ddp_cost(sizes: ModelSizes, layout: ParamBuckets, workers: int) -> Cost:
    # With equal slices all ranks hold the same, so one rank is simulated: a huge model on a
    # thousand workers would take minutes otherwise.
    all_alike = all(optimizer.elementwise for optimizer in sizes.optimizers)
    held, most = _simulate_backward(layout.buckets, 1 if all_alike else workers)
    if len(held) == 1:
        held, most = held * workers, most * workers
    worst = max(range(workers), key=lambda rank: held[rank] + layout.state[rank])
    # The peak may be another rank's than the one that holds most after backward.
    peak = max(map(sum, zip(most, layout.state, strict=True)))
    used_flags = sum(len(optimizer.params) for optimizer in sizes.optimizers)  # one byte each
    return Cost(
        parameters=layout.parameters,
        gradients=held[worst],
        optimizer=layout.state[worst] + layout.state_on_every_rank,
        in_flight=peak - held[worst] - layout.state[worst],
        sent=sent_per_worker(2 * layout.bucket_bytes + 2 * used_flags + sizes.buffers, workers),
        # The one is the all-reduce of the flags that say which parameters were used.
        collectives=len(layout.buckets) + layout.parameter_messages + 1 + sizes.buffer_messages,
    )


def _simulate_backward(
    buckets: Sequence[_PlannedBucket], ranks: int
) -> tuple[list[int], list[int]]:
    """Return each rank's bytes of gradients after backward, and the most while backward runs."""
    held, most = [0] * ranks, [0] * ranks
    # The last round has no bucket to fill: all are full, and the last ones are being reduced.
    for place, bucket in enumerate([*buckets, None]):
        reducing = buckets[max(0, place - IN_FLIGHT) : place]
        present = [*reducing, bucket] if bucket else reducing
        copied = sum(one.size for one in present if not one.is_view)
        viewed = {i: size for one in present if one.is_view for i, size in one.gradients.items()}
        # One autograd node makes the gradients of a weight and its bias together, so a gradient
        # of the next bucket may be there already.
        newest = buckets[place : place + 2]
        arriving = [s for one in newest for i, s in one.gradients.items() if i not in viewed]
        on_every_rank = copied + sum(viewed.values()) + max(arriving, default=0)
        if place > IN_FLIGHT:
            _add_slices(held, buckets[place - IN_FLIGHT - 1].slices)
        now = held.copy()
        for one in reducing:
            # Only the oldest bucket is being summed; the others still receive.
            times = one.received + (one.summing if one is reducing[0] else 0)
            _add_slices(now, one.slices, times)
        most = [max(old, size + on_every_rank) for old, size in zip(most, now, strict=True)]
    for one in buckets[-IN_FLIGHT:]:
        _add_slices(held, one.slices)
    return held, [max(pair) for pair in zip(held, most, strict=True)]


def _add_slices(sizes: list[int], slices: Sequence[int], times: int = 1) -> None:
    for rank in range(len(sizes)):
        sizes[rank] += times * slices[rank % len(slices)]  # one number stands for all ranks


# -- the library's own layout ------------------------------------------------------------------


def lay_out(sizes: ModelSizes, workers: int, bucket_size: int | None, gloo: bool) -> ParamBuckets:
    """Put all parameters into buckets, as `OSS` does (see `_flat_params.py`)."""
    layout = ParamBuckets([0] * workers)
    frozen = [param for one in sizes.optimizers for param in one.params if not param.trained]
    layout.parameters = sum(param.bytes for param in (*frozen, *sizes.others))
    for optimizer in sizes.optimizers:
        kinds: dict[Hashable, list[tuple[int, int]]] = {}  # (index, elements) of its parameters
        for i, param in reversed(list(enumerate(optimizer.params))):
            if param.trained and param.elements:
                kinds.setdefault(param.kind, []).append((i, param.elements))
        for indices in kinds.values():
            itemsize = optimizer.params[indices[0][0]].itemsize
            total = sum(elements for _, elements in indices)
            largest = bucket_size or _layout.bucket_size(workers, total)
            if optimizer.elementwise:
                buffers = _layout.even_layout(indices, workers, largest)
            else:
                buffers = _layout.whole_layout(indices, workers, largest, [0] * workers)
            for buffer in buffers:
                for bucket in buffer.buckets:
                    _add_bucket(layout, optimizer, bucket, itemsize, gloo)
    return layout


def _add_bucket(
    layout: ParamBuckets,
    optimizer: OptimizerParams,
    bucket: _layout.BucketLayout,
    itemsize: int,
    gloo: bool,
) -> None:
    workers = len(layout.state)
    size = bucket.size * itemsize
    is_view = bucket.ranges[0].size == bucket.size
    if optimizer.elementwise:
        slices = [bucket.cuts[1] * itemsize]  # equal slices: one number for all ranks
        layout.parameter_messages += workers if gloo else 1  # N broadcasts, or one all-gather
    else:
        slices = [(b - a) * itemsize for a, b in pairwise(bucket.cuts)]
        layout.parameter_messages += sum(length > 0 for length in slices)
    # `RankGroup.reduce_scatter_slices` receives the other ranks' slices one by one (gloo), calls
    # NCCL's reduce-scatter for even slices, or an all-to-all for uneven ones.
    full_precision = itemsize >= 4  # half precision is summed in float32, in memory of its own
    if gloo:
        received = workers - 1
    else:
        received = 1 if optimizer.elementwise and full_precision else workers
    summing = 3 if not full_precision else 1 if received == workers else 0
    params = [optimizer.params[each.param] for each in bucket.ranges]
    gradients = {id(param): param.bytes for param in params}
    layout.parameters += size
    layout.buckets.append(_PlannedBucket(size, slices, received, summing, gradients, is_view))
    if optimizer.elementwise and is_view:
        # A huge parameter has many such buckets; counting them rank by rank would be slow.
        param = optimizer.params[bucket.ranges[0].param]
        layout.state_on_every_rank += param.state_bytes(bucket.cuts[1])
        return
    for rank, index, elements in _owned_ranges(bucket):
        layout.state[rank] += optimizer.params[index].state_bytes(elements)


def _owned_ranges(bucket: _layout.BucketLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, parameter, elements) for each range of a parameter that one rank owns.

    `BucketLayout.owned` answers the same for one rank. Asking it for a thousand ranks would read
    all ranges a thousand times.
    """
    cuts = bucket.cuts
    for each in bucket.ranges:
        at, end = each.offset, each.offset + each.size
        rank = bisect_right(cuts, at) - 1
        while at < end:
            stop = min(end, cuts[rank + 1])
            if stop > at:
                yield rank, each.param, stop - at
            at, rank = stop, rank + 1
