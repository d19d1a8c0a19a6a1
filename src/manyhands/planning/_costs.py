"""What each sharding costs a worker: sizes in, bytes and collectives out. Integers only.

A model is its sizes here (`ModelSizes`), without tensors and modules, so costs can be computed, and
tested, for any made-up model.

With N workers, P bytes of parameters, G of gradients (of trained parameters) and S of optimizer
state:

                          parameters  gradients  state   sent in a step
    DDP                   P           G          S       2 G (N-1)/N            all-reduce
    OSS + DDP             P           G          S / N   (2 G + P) (N-1)/N      and new parameters
    ShardedDataParallel   P           G / N      S / N   (G + P) (N-1)/N        slices, parameters
    FSDP                  P / N       G / N      S / N   (2 P + G) (N-1)/N      gathered twice

These are the formulas. The numbers come from the layout that the library uses
(`sharding/zero/_layout.py`; for FSDP the rows of each parameter, in wraps), with its padding and
its uneven shards, for the worker that holds most. `sent` is the mean over the workers.

`in_flight` is the most that a worker holds on top of its gradients while they are made and sent:
the gradient that autograd has just made and, if gradients are sharded, the bucket that is being
filled, the buckets that are being reduced, and the slices that have arrived for them. For FSDP it
it is every whole tensor, and every tensor on its way, while a wrap's gradients are computed.

Two things may come on top. `AdamScale` reads the second moments of all parameters: where they are
sharded, every worker holds a replica of them, in one tensor of the trained parameters' size (two
with RMSprop's `centered`), and gathers it after each step. In blocks (`blocks_cost`) nothing is
sharded: a worker holds P + G + S, an anchor of the trained parameters in float32, the outer step's
memories of the same size, and in a sync round a few chunks; it sends 2 P (N-1)/N in a round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from manyhands.blocks.averaging._chunks import SMALLEST
from manyhands.blocks.averaging._payload import LARGEST
from manyhands.blocks.averaging._round import IN_FLIGHT as CHUNKS_IN_FLIGHT
from manyhands.scaling._preconditioned import MESSAGE
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._reducer import IN_FLIGHT

MIB = 2**20
CHUNKS_HELD = CHUNKS_IN_FLIGHT + 1  # of a sync round at once: those in flight, and the newest
DDP_BUCKETS = (1 * MIB, 25 * MIB)  # the size of torch's first bucket, and of all others


# -- a model in integers: all that is known of it here ---------------------------------------------


@dataclass(frozen=True)
class ParamSize:
    """A parameter's size, and the size of its optimizer state.

    Each shard of the parameter has `state_fixed` bytes of state, and `state_per_element` bytes for
    each of its elements.
    """

    elements: int
    itemsize: int
    kind: Hashable = "float32"  # dtype and device; only parameters of one kind share a bucket
    trained: bool = True
    state_fixed: int = 0
    state_per_element: int = 0
    rows: int = 1  # the first dimension, along which FSDP shards

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def state_bytes(self, elements: int) -> int:
        return self.state_fixed + self.state_per_element * elements

    def shard_elements(self, workers: int) -> int:
        """Elements of FSDP's largest shard, to which all other shards are padded."""
        return -(-self.rows // workers) * (self.elements // max(1, self.rows))


@dataclass(frozen=True)
class OptimizerParams:
    """The parameters of one optimizer, and whether it updates each element by itself."""

    params: tuple[ParamSize, ...]
    elementwise: bool = True

    @property
    def trained(self) -> list[ParamSize]:
        return [param for param in self.params if param.trained and param.elements]


@dataclass(frozen=True)
class WrapParams:
    """The parameters of one FSDP wrap, and the number of the wrap around it."""

    params: tuple[ParamSize, ...]
    outer: int | None = None


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model: the parameters of its optimizers, all others, and its buffers."""

    optimizers: tuple[OptimizerParams, ...]
    others: tuple[ParamSize, ...] = ()
    wraps: tuple[WrapParams, ...] = ()  # in the order in which a forward pass finishes them
    buffers: int = 0  # bytes
    buffer_messages: int = 0  # broadcasts of buffers from rank 0 before each forward

    @property
    def trained(self) -> list[ParamSize]:
        return [param for optimizer in self.optimizers for param in optimizer.trained]

    @property
    def parameter_bytes(self) -> int:
        optimized = sum(param.bytes for one in self.optimizers for param in one.params)
        return optimized + sum(param.bytes for param in self.others)

    @property
    def gradient_bytes(self) -> int:
        return sum(param.bytes for param in self.trained)

    @property
    def state_bytes(self) -> int:
        return sum(param.state_bytes(param.elements) for param in self.trained)


# -- the costs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Bytes that one worker holds, and its bytes and collectives in one step."""

    parameters: int
    gradients: int
    optimizer: int
    in_flight: int
    sent: int
    collectives: int
    replicas: int = 0  # of the second moments, for AdamScale
    blocks: int = 0  # the anchor and the outer step's memories


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
class _BucketLayout:
    """All parameters in buckets, and what every rank owns of them."""

    state: list[int]  # bytes of state by rank
    state_on_every_rank: int = 0  # bytes that come on top of these, equal on all ranks
    parameters: int = 0
    parameter_messages: int = 0  # collectives that bring the new parameters
    buckets: list[_PlannedBucket] = field(default_factory=list)

    @property
    def bucket_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def costs(
    sizes: ModelSizes, workers: int, bucket_size: int | None, gloo: bool, replicas: int = 0
) -> tuple[Cost, ...]:
    """Return the costs of the four ways, in the order of the table above.

    `replicas` is how many of the sharded state's entries every worker needs whole.
    """
    if workers == 1:  # nothing is sharded or sent, and no bucket is made
        alone = Cost(sizes.parameter_bytes, sizes.gradient_bytes, sizes.state_bytes, 0, 0, 0)
        return alone, alone, alone, alone
    layout = _lay_out(sizes, workers, bucket_size, gloo)
    ddp = _ddp_cost(sizes, workers)
    oss = _oss_cost(ddp, layout, workers)
    sharded = _sharded_ddp_cost(sizes, layout, workers)
    fsdp = _fsdp_cost(sizes, workers, gloo)
    if not replicas:
        return ddp, oss, sharded, fsdp
    # The counts of all parameters come by an all-reduce, the moments bucket by bucket.
    counts = 2 * 4 * len(sizes.trained)
    copy = layout.bucket_bytes
    sent = _sent_per_worker(replicas * copy + counts, workers)
    messages = 1 + replicas * layout.parameter_messages
    padded = sum(
        workers * param.shard_elements(workers) * param.itemsize for param in sizes.trained
    )
    gathers = replicas * _messages(sizes.trained, workers) * (workers if gloo else 1)
    return (
        ddp,
        _with_replicas(oss, replicas * copy, sent, messages),
        _with_replicas(sharded, replicas * copy, sent, messages),
        _with_replicas(
            fsdp,
            replicas * sizes.gradient_bytes,
            _sent_per_worker(replicas * padded, workers),
            gathers,
        ),
    )


def _with_replicas(cost: Cost, held: int, sent: int, messages: int) -> Cost:
    return replace(
        cost, replicas=held, sent=cost.sent + sent, collectives=cost.collectives + messages
    )


def _messages(params: Sequence[ParamSize], workers: int) -> int:
    """Return how many messages bring one entry of FSDP's state (`_split_into_messages`)."""
    messages, size = 1, 0
    for number, param in enumerate(params):
        size += param.shard_elements(workers)
        if number and size > MESSAGE:
            messages, size = messages + 1, param.shard_elements(workers)
    return messages


def blocks_cost(sizes: ModelSizes, workers: int, every: int, memories: int) -> Cost:
    """Return the costs of a worker in blocks of `every` steps, whose outer step has `memories`."""
    # 16-bit parameters have an anchor in float32
    anchor = sum(param.elements * max(4, param.itemsize) for param in sizes.trained)
    elements = sum(param.elements for param in sizes.trained)
    chunk = max(SMALLEST, min(LARGEST, elements // 16))
    chunks = -(-elements // chunk)
    alone = workers == 1
    return Cost(
        parameters=sizes.parameter_bytes,
        gradients=sizes.gradient_bytes,
        optimizer=sizes.state_bytes,
        in_flight=0 if alone else min(chunks, CHUNKS_HELD) * min(chunk, elements) * 4,
        sent=0 if alone else _sent_per_worker(2 * anchor + sizes.buffers, workers) // every,
        collectives=0 if alone else -(-chunks // every),
        blocks=(1 + memories) * anchor,
    )


def _sent_per_worker(size: int, workers: int) -> int:
    """Return the bytes each worker sends in one all-gather or reduce-scatter of `size` bytes."""
    return round(size * (workers - 1) / workers)


# -- DDP, OSS and ShardedDataParallel ------------------------------------------------------------


def _ddp_cost(sizes: ModelSizes, workers: int) -> Cost:
    return Cost(
        parameters=sizes.parameter_bytes,
        gradients=sizes.gradient_bytes,
        optimizer=sizes.state_bytes,
        # Gradients are views of DDP's buckets, so only autograd's newest gradient is extra.
        in_flight=max(param.bytes for param in sizes.trained),
        # An all-reduce is a reduce-scatter and an all-gather, hence twice the gradients.
        sent=_sent_per_worker(2 * sizes.gradient_bytes + sizes.buffers, workers),
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


def _oss_cost(ddp: Cost, layout: _BucketLayout, workers: int) -> Cost:
    return Cost(
        parameters=layout.parameters,
        gradients=ddp.gradients,
        optimizer=max(layout.state) + layout.state_on_every_rank,
        in_flight=ddp.in_flight,
        sent=ddp.sent + _sent_per_worker(layout.bucket_bytes, workers),
        collectives=ddp.collectives + layout.parameter_messages,
    )


def _sharded_ddp_cost(sizes: ModelSizes, layout: _BucketLayout, workers: int) -> Cost:
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
        sent=_sent_per_worker(2 * layout.bucket_bytes + 2 * used_flags + sizes.buffers, workers),
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


# -- FSDP --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WrapBytes:
    """Bytes of one wrap, with padding wherever tensors travel."""

    gathered: int  # its whole parameters
    gradients: int  # its whole gradients, as autograd makes them
    reduced: int  # its gradients in the memory of the reduce-scatter
    received: int  # slices that arrive for this rank and are not summed in place


def _fsdp_cost(sizes: ModelSizes, workers: int, gloo: bool) -> Cost:
    state = sum(
        param.state_bytes(param.shard_elements(workers))
        if optimizer.elementwise
        # The state of a whole tensor, of which a shard has its proportion.
        else -(-param.state_fixed * param.shard_elements(workers) // param.elements)
        for optimizer in sizes.optimizers
        for param in optimizer.trained
    )
    wraps = [_wrap_bytes(wrap, workers, gloo) for wrap in sizes.wraps]
    gathered = sum(wrap.gathered for wrap in wraps)
    reduced = sum(wrap.reduced for wrap in wraps)
    # The outermost wrap stays gathered from forward to backward; all others are gathered twice.
    stays = sum(
        b.gathered for b, wrap in zip(wraps, sizes.wraps, strict=True) if wrap.outer is None
    )
    all_gathers = sum(1 if wrap.outer is None else 2 for wrap in sizes.wraps if wrap.params)
    used_flags = sum(len(wrap.params) for wrap in sizes.wraps)  # one byte each
    most = _most_in_fsdp_backward(sizes.wraps, wraps, workers)
    return Cost(
        parameters=gathered // workers,
        gradients=reduced // workers,
        optimizer=state,
        in_flight=max(0, most - reduced // workers),
        sent=_sent_per_worker(2 * gathered - stays + reduced + 2 * used_flags, workers),
        collectives=all_gathers * (workers if gloo else 1)  # on gloo N broadcasts
        + sum(wrap.reduced > 0 for wrap in wraps)
        + 1,  # the flags
    )


def _wrap_bytes(wrap: WrapParams, workers: int, gloo: bool) -> _WrapBytes:
    trained = [param for param in wrap.params if param.trained]
    reduced = sum(workers * param.shard_elements(workers) * param.itemsize for param in trained)
    in_place = all(param.itemsize >= 4 for param in trained)  # half precision is summed in float32
    return _WrapBytes(
        gathered=sum(workers * p.shard_elements(workers) * p.itemsize for p in wrap.params),
        gradients=sum(param.bytes for param in trained),
        reduced=reduced,
        received=reduced // workers * (workers - 1 - in_place) if gloo else 0,
    )


def _most_in_fsdp_backward(
    wraps: Sequence[WrapParams], sizes: Sequence[_WrapBytes], workers: int
) -> int:
    """Return the most bytes of gradients, their shards and whole parameters during backward.

    A wrap is whole while any wrap inside it computes. Its gradients are reduced once all wraps
    inside it are done. Meanwhile the parameters of the next wrap arrive, and the gradients of the
    last one are still being reduced, until the next ones are laid out.
    """
    most = owned = leaving = 0
    open_wraps: list[int] = []
    for number in reversed(range(len(wraps))):
        open_wraps.append(number)
        arriving = sizes[number - 1].gathered if number else 0  # prefetched
        present = sum(sizes[i].gathered + sizes[i].gradients for i in open_wraps)
        most = max(most, owned + leaving + arriving + present)
        next_outer = wraps[number - 1].outer if number else None
        # Close every wrap that does not contain the next one.
        while open_wraps and (not number or open_wraps[-1] != next_outer):
            done = sizes[open_wraps.pop()]
            present -= done.gathered
            owned += done.reduced // workers
            # Gradients and the reduce-scatter's copy of them are there together for a moment.
            most = max(most, owned + arriving + present + done.reduced)
            present -= done.gradients
            leaving = done.reduced + done.received if done.reduced else leaving
    return most


# -- the library's own layout ------------------------------------------------------------------


def _lay_out(sizes: ModelSizes, workers: int, bucket_size: int | None, gloo: bool) -> _BucketLayout:
    """Put all parameters into buckets, as `OSS` does (see `_flat_params.py`)."""
    layout = _BucketLayout([0] * workers)
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
    layout: _BucketLayout,
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
