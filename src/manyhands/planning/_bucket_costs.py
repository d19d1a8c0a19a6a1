"""What DDP, OSS and ShardedDataParallel cost a worker: gradients in buckets.

The numbers come from the layout that the library uses (`sharding/zero/_layout.py`), with its
padding and its uneven slices. `in_flight` is the gradient that autograd has just made and, if
gradients are sharded, the bucket that is being filled, the buckets that are being reduced, and what
has arrived for them: slices, or with a codec messages (and those that are being sent).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from manyhands._core.codec import Codec
from manyhands.planning._sizes import (
    MIB,
    Cost,
    ModelSizes,
    OptimizerParams,
    ParamSize,
    SliceBytes,
    sent_per_worker,
    summed_in,
)
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._reducer import IN_FLIGHT

DDP_BUCKETS = (1 * MIB, 25 * MIB)  # the size of torch's first bucket, and of all others


@dataclass
class _Exchange:
    """Bytes of a bucket on its way. Lists have a number for each rank, or one for all ranks."""

    travelling: list[int]  # what a rank holds meanwhile, besides the bucket
    summing: list[int]  # what the sum takes on top
    sent: int  # all slices, as they travel
    residuals: list[int]  # what a rank keeps of what the codec has left out


@dataclass
class _PlannedBucket:
    """A bucket of gradients."""

    size: int
    slices: list[int]  # bytes of gradients that each rank owns, or one number for all ranks
    exchange: _Exchange
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

    @property
    def gradient_bytes_sent(self) -> int:
        return sum(bucket.exchange.sent for bucket in self.buckets)


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
    residuals = [0] * len(held)
    for bucket in layout.buckets:
        _add_by_rank(residuals, bucket.exchange.residuals)
    if len(held) == 1:
        held, most, residuals = held * workers, most * workers, residuals * workers
    kept = [a + b for a, b in zip(layout.state, residuals, strict=True)]
    worst = max(range(workers), key=lambda rank: held[rank] + kept[rank])
    # The peak may be another rank's than the one that holds most after backward.
    peak = max(map(sum, zip(most, kept, strict=True)))
    sent = layout.gradient_bytes_sent + layout.bucket_bytes
    used_flags = sum(len(optimizer.params) for optimizer in sizes.optimizers)  # one byte each
    return Cost(
        parameters=layout.parameters,
        gradients=held[worst],
        optimizer=layout.state[worst] + layout.state_on_every_rank,
        in_flight=peak - held[worst] - kept[worst],
        sent=sent_per_worker(sent + 2 * used_flags + sizes.buffers, workers),
        # The one is the all-reduce of the flags that say which parameters were used.
        collectives=len(layout.buckets) + layout.parameter_messages + 1 + sizes.buffer_messages,
        residuals=residuals[worst],
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
            _add_by_rank(held, buckets[place - IN_FLIGHT - 1].slices)
        now = held.copy()
        for one in reducing:
            _add_by_rank(now, one.exchange.travelling)
        if reducing:  # Only the oldest bucket is being summed; the others still receive.
            _add_by_rank(now, reducing[0].exchange.summing)
        most = [max(old, size + on_every_rank) for old, size in zip(most, now, strict=True)]
    for one in buckets[-IN_FLIGHT:]:
        _add_by_rank(held, one.slices)
    return held, [max(pair) for pair in zip(held, most, strict=True)]


def _add_by_rank(sizes: list[int], more: Sequence[int]) -> None:
    for rank in range(len(sizes)):
        sizes[rank] += more[rank % len(more)]  # one number stands for all ranks


# -- the library's own layout ------------------------------------------------------------------


def lay_out(
    sizes: ModelSizes, workers: int, bucket_size: int | None, gloo: bool, codec: Codec | None = None
) -> ParamBuckets:
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
            encoding = codec if optimizer.params[indices[0][0]].real else None
            total = sum(elements for _, elements in indices)
            largest = bucket_size or _layout.bucket_size(workers, total)
            if optimizer.elementwise:
                buffers = _layout.even_layout(indices, workers, largest)
            else:
                buffers = _layout.whole_layout(indices, workers, largest, [0] * workers)
            for buffer in buffers:
                for bucket in buffer.buckets:
                    _add_bucket(layout, optimizer, bucket, itemsize, gloo, encoding)
    return layout


def _add_bucket(
    layout: ParamBuckets,
    optimizer: OptimizerParams,
    bucket: _layout.BucketLayout,
    itemsize: int,
    gloo: bool,
    codec: Codec | None,
) -> None:
    workers = len(layout.state)
    size = bucket.size * itemsize
    is_view = bucket.ranges[0].size == bucket.size
    if optimizer.elementwise:
        slices = [bucket.cuts[1]]  # equal slices: one number for all ranks
        layout.parameter_messages += workers if gloo else 1  # N broadcasts, or one all-gather
    else:
        slices = [b - a for a, b in pairwise(bucket.cuts)]
        layout.parameter_messages += sum(length > 0 for length in slices)
    params = [optimizer.params[each.param] for each in bucket.ranges]
    gradients = {id(param): param.bytes for param in params}
    layout.parameters += size
    if codec is None:
        exchange = _plain_exchange(slices, workers, itemsize, gloo, even=optimizer.elementwise)
    else:
        exchange = _encoded_exchange(slices, workers, itemsize, gloo, codec)
    sizes = [elements * itemsize for elements in slices]
    layout.buckets.append(_PlannedBucket(size, sizes, exchange, gradients, is_view))
    if optimizer.elementwise and is_view:
        # A huge parameter has many such buckets; counting them rank by rank would be slow.
        param = optimizer.params[bucket.ranges[0].param]
        layout.state_on_every_rank += param.state_bytes(bucket.cuts[1])
        return
    for rank, index, elements in _owned_ranges(bucket):
        layout.state[rank] += optimizer.params[index].state_bytes(elements)


def _plain_exchange(
    slices: Sequence[int], workers: int, itemsize: int, gloo: bool, even: bool
) -> _Exchange:
    """Count what `RankGroup.reduce_scatter_slices` does with slices of so many elements.

    It receives the other ranks' slices one by one (gloo), calls NCCL's reduce-scatter for even
    slices, or an all-to-all for uneven ones.
    """
    full_precision = itemsize >= 4  # half precision is summed in float32, in memory of its own
    received = workers - 1 if gloo else 1 if even and full_precision else workers
    summing = 3 if not full_precision else 1 if received == workers else 0
    return _Exchange(
        travelling=[received * itemsize * elements for elements in slices],
        summing=[summing * itemsize * elements for elements in slices],
        sent=sum(slices) * itemsize * (workers // len(slices)),
        residuals=[0],
    )


def _encoded_exchange(
    slices: Sequence[int], workers: int, itemsize: int, gloo: bool, codec: Codec
) -> _Exchange:
    """Count what `EncodedSlices` does: each slice becomes a message for its owner.

    Except on gloo, messages are sent from one tensor, into which they are copied.
    """
    copies = 1 if gloo else 2
    wide, alike = summed_in(itemsize).itemsize, workers // len(slices)
    made = [SliceBytes.of(elements, itemsize, codec) for elements in slices]
    sent = alike * sum(one.message for one in made)
    left = alike * sum(one.residual for one in made)
    narrowed = itemsize if itemsize < wide else 0
    return _Exchange(
        travelling=[copies * (sent - one.message) + (workers - 1) * one.message for one in made],
        # the sum, a message's values, and the mean in the gradients' type
        summing=[(2 * wide + narrowed) * elements for elements in slices],
        sent=sent,
        residuals=[left - one.residual for one in made],
    )


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
