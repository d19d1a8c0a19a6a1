"""Compute the bytes and collectives that each way to train costs a worker. Integers only.

With N workers, P bytes of parameters, G of gradients (of trained parameters) and S of optimizer
state:

                          parameters  gradients  state   sent per step
    DDP                   P           G          S       2 G (N-1)/N            all-reduce
    OSS + DDP             P           G          S / N   (2 G + P) (N-1)/N      and new parameters
    ShardedDataParallel   P           G / N      S / N   (G + P) (N-1)/N        slices, parameters
    FSDP                  P / N       G / N      S / N   (2 P + G) (N-1)/N      gathered twice
    FSDP, C copies        P / M       G / M      S / M   (2 P + G) (M-1)/M + 2 G/M (C-1)/C

On a mesh of N = C M workers each copy is sharded over M of them; the copies' gradients are summed.
These are the formulas. The numbers come from the layout that the library uses
(`sharding/zero/_layout.py`; for FSDP the rows of each parameter, in wraps), with its padding and
its uneven shards, for the worker that holds most. `sent` is the mean over the workers.

`in_flight` is the most that a worker holds on top of its gradients during a backward pass.

`AdamScale` reads the second moments of all parameters: where they are sharded, every worker holds a
replica of them, in one tensor of the trained parameters' size (two with RMSprop's `centered`), and
gathers it after each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import add

from manyhands._tensors.flat import in_groups
from manyhands.blocks.averaging._chunks import PARTS, elements_per_chunk
from manyhands.blocks.averaging._payload import REPORT
from manyhands.checkpoint._tensor_parts import LEAST
from manyhands.scaling._payload import CLAIMS
from manyhands.scaling._preconditioned import MESSAGE
from manyhands.sharding.fsdp._whole_tensors import BUCKET, bucket_ranges
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._reducer import IN_FLIGHT

DDP_BUCKETS = (2**20, 25 * 2**20)  # the size of torch's first bucket, and of all others


# -- a model in integers ---------------------------------------------------------------------------


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
    """The parameters of one optimizer."""

    params: tuple[ParamSize, ...]
    elementwise: bool = True  # each element is updated by itself
    owned_whole: bool = False  # under FSDP ranks own tensors whole to step them

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
        found = []
        for optimizer in self.optimizers:
            found += optimizer.trained
        return found

    @property
    def parameter_bytes(self) -> int:
        optimized = sum(_bytes_of(optimizer.params) for optimizer in self.optimizers)
        return optimized + _bytes_of(self.others)


def _bytes_of(params: Iterable[ParamSize]) -> int:
    return sum(param.bytes for param in params)


@dataclass(frozen=True)
class Cost:
    """Bytes that one worker holds, and its bytes and collectives in one step."""

    parameters: int
    gradients: int
    optimizer: int
    in_flight: int = 0
    sent: int = 0
    collectives: int = 0
    scaling: int = 0  # AdamScale's replica of the second moments
    saved: int = 0  # written by `mh.save`: what several ranks hold alike, by one of them

    def with_messages(self, sent: int, collectives: int, scaling: int = 0) -> Cost:
        """Return the cost with these bytes and collectives of a scaling rule added."""
        return replace(
            self,
            sent=self.sent + sent,
            collectives=self.collectives + collectives,
            scaling=self.scaling + scaling,
        )


def _sent_per_worker(size: int, workers: int) -> int:
    """Return the bytes each worker sends in one all-gather or reduce-scatter of `size` bytes."""
    return round(size * (workers - 1) / workers)


def rule_cost(groups: int, workers: int, gloo: bool) -> tuple[int, int]:
    """Return what a scaling rule adds to a step that it measures: bytes sent, and collectives.

    A payload has two numbers for each parameter group, and the claims of every rank. It is
    all-gathered on gloo, and else all-reduced, with a place for each rank's claims.
    """
    if gloo:
        numbers = (2 * groups + len(CLAIMS)) * workers
    else:
        numbers = 2 * (2 * groups + len(CLAIMS) * workers)  # an all-reduce sends all of it twice
    return _sent_per_worker(8 * numbers, workers), int(workers > 1)


def round_cost(sizes: ModelSizes, workers: int) -> tuple[int, int]:
    """Return what a sync round of `DiLoCo` sends: bytes, and collectives."""
    # The values in chunks, all-reduced in float32; the first and the last with all reports.
    lengths = Counter[Hashable]()
    for param in sizes.trained:
        lengths[param.kind] += param.elements
    chunks = 0
    for length in lengths.values():
        chunks += -(-length // elements_per_chunk(length))
    numbers = lengths.total() + min(2, chunks) * workers * REPORT * PARTS
    return _sent_per_worker(2 * 4 * numbers, workers), chunks * (workers > 1)


def hybrid_cost(sizes: ModelSizes, mesh: tuple[int, int], gloo: bool, replicas: int = 0) -> Cost:
    """Return the cost of FSDP on a mesh of copies and shards: the last way of the table above."""
    copies, shards = mesh
    cost = _fsdp_cost(sizes, shards, gloo, copies)
    cost = replace(cost, saved=_written(cost.parameters + cost.optimizer, copies))
    return cost.with_messages(*_moments_under_fsdp(sizes, shards, gloo, replicas))


def _written(alike: int, workers: int) -> int:
    """Return the bytes that each writer has of what all ranks hold alike."""
    return alike // max(1, min(workers, -(-alike // LEAST)))


def costs(sizes: ModelSizes, workers: int, gloo: bool, replicas: int = 0) -> tuple[Cost, ...]:
    """Return the costs of the first four ways, in the order of the table above."""
    # `replicas` is the number of the sharded state's entries that every worker needs whole.
    params = sizes.parameter_bytes
    state = sum(param.state_bytes(param.elements) for param in sizes.trained)
    alone = Cost(params, _bytes_of(sizes.trained), state, saved=_written(params + state, workers))
    if workers == 1:  # nothing is sharded or sent, and no bucket is made
        return alone, alone, alone, alone
    ddp = replace(
        alone,
        # Gradients are views of DDP's buckets, so only autograd's newest gradient is extra.
        in_flight=max([param.bytes for param in sizes.trained], default=0),
        # An all-reduce is a reduce-scatter and an all-gather, hence twice the gradients.
        sent=_sent_per_worker(2 * alone.gradients + sizes.buffers, workers),
        collectives=ddp_buckets(sizes.trained) + sizes.buffer_messages,
    )
    layout = _lay_out(sizes, workers, gloo)
    largest_state = max(layout.state) + layout.state_on_every_rank
    oss = replace(
        ddp,
        parameters=layout.parameters,
        optimizer=largest_state,
        sent=ddp.sent + _sent_per_worker(layout.bucket_bytes, workers),
        collectives=ddp.collectives + layout.parameter_messages,
        saved=_written(params, workers) + largest_state,
    )
    sharded = _sharded_ddp_cost(sizes, layout, workers)
    sharded = replace(sharded, saved=_written(params, workers) + sharded.optimizer)
    fsdp = _fsdp_cost(sizes, workers, gloo)
    fsdp = replace(fsdp, saved=fsdp.parameters + fsdp.optimizer)
    if replicas:
        # The counts of all parameters come by an all-reduce, the moments bucket by bucket.
        held = replicas * layout.bucket_bytes
        sent = _sent_per_worker(held + 2 * 4 * len(sizes.trained), workers)
        moments = (sent, 1 + replicas * layout.parameter_messages, held)
        oss = oss.with_messages(*moments)
        sharded = sharded.with_messages(*moments)
        fsdp = fsdp.with_messages(*_moments_under_fsdp(sizes, workers, gloo, replicas))
    return ddp, oss, sharded, fsdp


def _moments_under_fsdp(
    sizes: ModelSizes, workers: int, gloo: bool, replicas: int
) -> tuple[int, int, int]:
    """Return what AdamScale adds under FSDP: bytes sent, collectives, and bytes held."""
    shards = []
    padded = 0
    for param in sizes.trained:
        elements = param.shard_elements(workers)
        shards.append(elements)
        padded += workers * elements * param.itemsize
    gathers = replicas * len(list(in_groups(shards, int, MESSAGE)))
    if gloo:
        gathers *= workers
    held = replicas * _bytes_of(sizes.trained)
    return _sent_per_worker(replicas * padded, workers), gathers, held


# -- gradients in buckets: DDP, OSS, ShardedDataParallel -------------------------------------------


def ddp_buckets(params: Sequence[ParamSize]) -> int:
    """Return the number of buckets that DistributedDataParallel reduces in a step."""
    # Parameters are taken from the last to the first, about as backward reaches them.
    closed_buckets = 0
    filled = dict[Hashable, int]()
    closed = dict[Hashable, int]()
    for param in reversed(params):
        kind = param.kind
        filled[kind] = filled.get(kind, 0) + param.bytes
        if filled[kind] >= DDP_BUCKETS[min(closed.get(kind, 0), 1)]:
            closed[kind] = closed.get(kind, 0) + 1
            filled[kind] = 0
            closed_buckets += 1
    return closed_buckets + sum(size > 0 for size in filled.values())


@dataclass(frozen=True)
class _Bucket:
    """A bucket of gradients.

    While a bucket is reduced, a rank holds `received` times its slice on top of the bucket, and
    `summed` times its slice for the oldest bucket.
    """

    size: int
    slices: list[int]  # bytes of gradients that each rank owns, or one number for all ranks
    received: int
    summed: int
    gradients: dict[int, int]  # bytes of each gradient that lies in the bucket, by id of ParamSize
    is_view: bool  # the bucket is a range of one gradient, so nothing is copied into it


@dataclass
class _Buckets:
    """All parameters in buckets, and what every rank owns of them."""

    state: list[int]  # bytes of state by rank
    parameters: int  # bytes, with padding
    state_on_every_rank: int = 0  # bytes that come on top of `state`, equal on all ranks
    gradient_messages: int = 0  # collectives that bring the gradients to their owners
    parameter_messages: int = 0  # and those that bring the new parameters
    buckets: list[_Bucket] = field(default_factory=list)

    @property
    def bucket_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def _sharded_ddp_cost(sizes: ModelSizes, layout: _Buckets, workers: int) -> Cost:
    """Return what a worker holds and sends with OSS and ShardedDataParallel."""
    # With equal slices all ranks hold the same, so one of them is enough.
    ranks = workers
    if all(optimizer.elementwise for optimizer in sizes.optimizers):
        ranks = 1
    held, most = _gradients_held(layout.buckets, ranks)
    held = held * (workers // ranks)
    most = most * (workers // ranks)
    with_state = list(map(add, held, layout.state))
    worst = with_state.index(max(with_state))
    # Another rank may have the peak during backward.
    peak = max(map(add, most, layout.state))
    # one byte each, and two for passes that ranks have given up
    used_flags = 2
    for optimizer in sizes.optimizers:
        used_flags += len(optimizer.params)
    sent = 2 * layout.bucket_bytes + 2 * used_flags + sizes.buffers
    return Cost(
        parameters=layout.parameters,
        gradients=held[worst],
        optimizer=layout.state[worst] + layout.state_on_every_rank,
        in_flight=peak - held[worst] - layout.state[worst],
        sent=_sent_per_worker(sent, workers),
        # The one is the all-reduce of the flags that say which parameters were used.
        collectives=1
        + layout.gradient_messages
        + layout.parameter_messages
        + sizes.buffer_messages,
    )


def _gradients_held(buckets: Sequence[_Bucket], ranks: int) -> tuple[list[int], list[int]]:
    """Return each rank's bytes of gradients after a backward pass, and the most during it."""
    # The most is over the buckets: while one is filled, the `IN_FLIGHT` before it are whole, with
    # what has arrived for them, and of all earlier ones a rank holds its slice.
    places = []
    for place in range(len(buckets) + 1):  # at the last one all are full
        first = max(0, place - IN_FLIGHT)
        window = buckets[first : place + 1]
        viewed: dict[int, int] = {}  # bytes of the gradients that are buckets themselves
        whole = 0
        for bucket in window:
            if bucket.is_view:
                viewed.update(bucket.gradients)
            else:
                whole += bucket.size
        whole += sum(viewed.values())
        # One autograd node makes the gradients of a weight and its bias together, so a gradient
        # of the next bucket may be there already.
        newest = 0
        for bucket in buckets[place : place + 2]:
            for key, size in bucket.gradients.items():
                if key not in viewed:
                    newest = max(newest, size)
        places.append((first, place, whole + newest))
    held = []
    most = []
    for rank in range(ranks):
        slices = [bucket.slices[rank % len(bucket.slices)] for bucket in buckets]
        done = [0, *accumulate(slices)]
        peak = done[-1]
        for first, place, whole in places:
            size = done[first] + whole
            for number in range(first, place):
                size += buckets[number].received * slices[number]
            if place > first:
                size += buckets[first].summed * slices[first]
            peak = max(peak, size)
        held.append(done[-1])
        most.append(peak)
    return held, most


def _lay_out(sizes: ModelSizes, workers: int, gloo: bool) -> _Buckets:
    """Put all parameters into buckets, as `OSS` does (see `_flat_params.py`)."""
    layout = _Buckets([0] * workers, _bytes_of(sizes.others))
    for optimizer in sizes.optimizers:
        kinds: dict[Hashable, list[tuple[int, int]]] = {}  # (index, elements) of its parameters
        for i, param in reversed(list(enumerate(optimizer.params))):
            if not param.trained:
                layout.parameters += param.bytes
            elif param.elements:
                kinds.setdefault(param.kind, []).append((i, param.elements))
        for indices in kinds.values():
            elements = sum([count for _, count in indices])
            largest = _layout.bucket_size(workers, elements)
            if optimizer.elementwise:
                buffers = _layout.even_layout(indices, workers, largest)
            else:
                buffers = _layout.whole_layout(indices, workers, largest, [0] * workers)
            for buffer in buffers:
                for bucket in buffer.buckets:
                    _add_bucket(layout, optimizer, bucket, gloo)
    return layout


def _add_bucket(
    layout: _Buckets, optimizer: OptimizerParams, bucket: _layout.BucketLayout, gloo: bool
) -> None:
    """Count what `RankGroup.reduce_scatter_slices` does with a bucket."""
    # It receives the other ranks' slices one by one (gloo), or calls NCCL's reduce-scatter for even
    # slices, a reduce for each uneven one, or an all-to-all for half precision.
    workers = len(layout.state)
    even = optimizer.elementwise
    params = [optimizer.params[each.param] for each in bucket.ranges]
    itemsize = params[0].itemsize
    if even:
        slices = [bucket.cuts[1]]
        gathers = 1
        if gloo:
            gathers = workers  # broadcasts
    else:
        slices = [b - a for a, b in pairwise(bucket.cuts)]
        gathers = len(slices) - slices.count(0)
    layout.parameter_messages += gathers
    full_precision = itemsize >= 4  # half precision is summed in separate float32 memory
    if full_precision and not even and not gloo:
        layout.gradient_messages += gathers
    else:
        layout.gradient_messages += 1
    received = workers
    if gloo:
        received = workers - 1
    elif even and full_precision:
        received = 1
    summed = 0
    if not full_precision:
        summed = 3
    elif received == workers:
        summed = 1
    one = _Bucket(
        size=bucket.size * itemsize,
        slices=[elements * itemsize for elements in slices],
        received=received,
        summed=summed,
        gradients={id(param): param.bytes for param in params},
        is_view=bucket.ranges[0].size == bucket.size,
    )
    layout.buckets.append(one)
    layout.parameters += one.size
    if even and one.is_view:
        # A huge parameter has many such buckets; counting them rank by rank would be slow.
        layout.state_on_every_rank += params[0].state_bytes(bucket.cuts[1])
        return
    for rank, index, elements in _owned_ranges(bucket):
        layout.state[rank] += optimizer.params[index].state_bytes(elements)


def _owned_ranges(bucket: _layout.BucketLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, parameter, elements), as `BucketLayout.owned` does for one rank."""
    cuts = bucket.cuts
    for each in bucket.ranges:
        at = each.offset
        end = each.offset + each.size
        rank = bisect_right(cuts, at) - 1
        while at < end:
            stop = min(end, cuts[rank + 1])
            if stop > at:
                yield rank, each.param, stop - at
            at = stop
            rank = rank + 1


# -- FSDP: the rows of each parameter, in wraps ----------------------------------------------------


@dataclass(frozen=True)
class _Wrap:
    """Bytes of one wrap, with padding wherever tensors travel."""

    gathered: int  # its whole parameters
    gradients: int  # its whole gradients, as autograd makes them
    reduced: int  # its gradients in the memory of the reduce-scatter
    received: int  # what arrives for this rank and is not summed in place
    outer: int | None


def _fsdp_cost(sizes: ModelSizes, workers: int, gloo: bool, copies: int = 1) -> Cost:
    """Return what a worker holds and sends with FullyShardedDataParallel."""
    # `workers` are those that one copy of the model is sharded over.
    wraps = []
    used_flags = 8  # bytes that compare the order of the wraps, and a byte for each parameter
    gathered = 0
    gathered_again = 0
    reduced = 0
    collectives = 1  # the flags
    for params in sizes.wraps:
        wrap = _wrap_bytes(params, workers, gloo)
        wraps.append(wrap)
        used_flags += len(params.params)
        gathered += wrap.gathered
        reduced += wrap.reduced
        gathers = 1
        if wrap.outer is not None:  # the outermost stays gathered from forward to backward
            gathered_again += wrap.gathered
            gathers = 2
        if gloo:
            gathers *= workers  # broadcasts
        if params.params:
            collectives += gathers
        if wrap.reduced:
            collectives += 1 + (copies > 1)
    between = 2 * reduced // workers * (copies - 1) / copies
    flags = 2 * used_flags * (workers * copies - 1) / (workers * copies)
    in_shards = (gathered + gathered_again + reduced) * (workers - 1) / workers
    in_flight = max(0, _most_in_fsdp_backward(wraps, workers) - reduced // workers)
    sent = round(in_shards + flags + between)
    state = 0
    for optimizer in sizes.optimizers:
        if optimizer.owned_whole:
            owned = _owned_whole(optimizer.params, workers)
            state += owned.optimizer
            in_flight = max(in_flight, owned.in_flight)
            sent += owned.sent
            collectives += owned.collectives
        else:
            for param in optimizer.trained:
                state += param.state_bytes(param.shard_elements(workers))
    return Cost(
        parameters=gathered // workers,
        gradients=reduced // workers,
        optimizer=state,
        in_flight=in_flight,
        sent=sent,
        collectives=collectives,
    )


def _owned_whole(params: Sequence[ParamSize], workers: int) -> Cost:
    """Return what a `WholeTensorOptimizer` adds, for the rank with most."""
    # Its rank owns P / N of the parameters whole, with their state. The shards of a gradient go to
    # one owner, and those of the result come back from there: 2 G (N-1)/N² more are sent.
    owners = _layout.deal_out([(n, p.elements) for n, p in enumerate(params)], [0] * workers)
    held = [0] * workers
    gradients = [0] * workers
    for number, param in enumerate(params):
        held[owners[number]] += param.bytes
        if param.trained and param.elements:
            held[owners[number]] += param.state_bytes(param.elements)
            gradients[owners[number]] += param.bytes
    trained = [param for param in params if param.trained]
    total = _bytes_of(trained)
    bucket = min(total, BUCKET * _widest(trained))
    buckets = bucket_ranges([(param.kind, param.elements) for param in trained])
    # Each message goes to one rank. And a byte of each tensor says whether it has moved.
    flags = _sent_per_worker(2 * len(params), workers)
    arriving = _sent_per_worker(min(max(gradients), -(-bucket // workers)), workers)
    return Cost(
        parameters=0,
        gradients=0,
        optimizer=max(held),
        in_flight=max(gradients) + arriving,
        sent=2 * _sent_per_worker(total, workers) // workers + flags,
        collectives=2 * len(buckets) + 1,
    )


def _wrap_bytes(wrap: WrapParams, workers: int, gloo: bool) -> _Wrap:
    """Return the bytes of one FSDP wrap, in each state that it takes in a step."""
    trained = [param for param in wrap.params if param.trained]
    elements = sum(param.shard_elements(workers) for param in trained)
    itemsize = _widest(trained)
    received = 0
    if gloo:
        in_place = itemsize >= 4  # half precision is summed in float32
        received = (workers - 1 - in_place) * itemsize * elements
    gathered = 0
    for param in wrap.params:
        gathered += workers * param.shard_elements(workers) * param.itemsize
    return _Wrap(
        gathered=gathered,
        gradients=_bytes_of(trained),
        reduced=workers * itemsize * elements,
        received=received,
        outer=wrap.outer,
    )


def _widest(params: Sequence[ParamSize]) -> int:
    return max([param.itemsize for param in params], default=0)


def _most_in_fsdp_backward(wraps: Sequence[_Wrap], workers: int) -> int:
    """Return the most bytes of gradients, their shards and whole parameters in a backward pass."""
    # A wrap is whole while any wrap inside it computes. Its gradients are reduced once all wraps
    # inside it are done. Meanwhile the parameters of the next wrap arrive, and the gradients of the
    # last one are still being reduced, until the next ones are laid out.
    most = 0
    owned = 0
    leaving = 0
    open_wraps: list[_Wrap] = []
    for number in reversed(range(len(wraps))):
        open_wraps.append(wraps[number])
        arriving = 0
        next_outer = None
        if number > 0:
            arriving = wraps[number - 1].gathered  # prefetched
            next_outer = wraps[number - 1].outer
        present = sum(wrap.gathered + wrap.gradients for wrap in open_wraps)
        most = max(most, owned + leaving + arriving + present)
        # Close every wrap that does not contain the next one.
        while open_wraps and (next_outer is None or open_wraps[-1] is not wraps[next_outer]):
            done = open_wraps.pop()
            present -= done.gathered
            owned += done.reduced // workers
            # Gradients and the reduce-scatter's copy of them are there together for a moment.
            most = max(most, owned + arriving + present + done.reduced)
            present -= done.gradients
            if done.reduced:
                leaving = done.reduced + done.received
    return most
