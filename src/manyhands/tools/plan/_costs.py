"""Compute the memory and communication of each sharding, in integers.

With N workers, P bytes of parameters, G of gradients and S of optimizer state:

                          parameters  gradients  state   sent per step
    DDP                   P           G          S       2 G (N-1)/N            all-reduce
    OSS + DDP             P           G          S / N   (2 G + P) (N-1)/N
    ShardedDataParallel   P           G / N      S / N   (G + P) (N-1)/N
    FSDP                  P / N       G / N      S / N   (2 P + G) (N-1)/N      gathers twice
    FSDP, C copies        P / M       G / M      S / M   (2 P + G) (M-1)/M + 2 G/M (C-1)/C

In the last row, a mesh of N = C M workers shards each copy over M workers.

The code applies the library's layouts, with padding and uneven shards, and returns the highest
memory of all workers. `sent` is the mean over workers. `in_flight` is the peak of a backward pass
minus the gradients after the pass.

`AdamScale` gathers sharded second moments on every worker after each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import add

from manyhands._tensors.flat import deal_out, in_groups
from manyhands.blocks.averaging._chunks import PARTS, elements_per_chunk
from manyhands.blocks.averaging._payload import REPORT
from manyhands.checkpoint._tensor_parts import LEAST
from manyhands.scaling._payload import CLAIMS
from manyhands.scaling._preconditioned import MESSAGE
from manyhands.sharding.fsdp._whole_tensors import BUCKET, bucket_ranges
from manyhands.sharding.zero import _layout

DDP_BUCKETS = (2**20, 25 * 2**20)  # sizes of torch's first bucket, and of all later buckets


# -- a model in integers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamSize:
    """The size of a parameter, with optimizer state.

    The state of each shard has `state_fixed` bytes, plus `state_per_element` per element.
    """

    elements: int
    itemsize: int
    kind: Hashable = "float32"  # dtype and device, equal in a bucket
    trained: bool = True
    state_fixed: int = 0
    state_per_element: int = 0
    rows: int = 1  # size of the first dimension, which FSDP shards

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def state_bytes(self, elements: int) -> int:
        return self.state_fixed + self.state_per_element * elements

    def shard_elements(self, workers: int) -> int:
        """Elements of the largest FSDP shard."""
        return -(-self.rows // workers) * (self.elements // max(1, self.rows))


@dataclass(frozen=True)
class OptimizerParams:
    params: tuple[ParamSize, ...]
    elementwise: bool = True  # updates elements independently
    owned_whole: bool = False  # under FSDP, a rank gathers the parameter for the step

    @property
    def trained(self) -> list[ParamSize]:
        return [param for param in self.params if param.trained and param.elements]


@dataclass(frozen=True)
class WrapParams:
    params: tuple[ParamSize, ...]
    outer: int | None = None  # index of the enclosing wrap


@dataclass(frozen=True)
class ModelSizes:
    optimizers: tuple[OptimizerParams, ...]
    others: tuple[ParamSize, ...] = ()
    wraps: tuple[WrapParams, ...] = ()  # in the order in which forward leaves the wraps
    buffers: int = 0  # bytes
    buffer_messages: int = 0  # broadcasts before each forward pass

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
    """A worker's memory in bytes; bytes and collectives per step."""

    parameters: int
    gradients: int
    optimizer: int
    in_flight: int = 0
    sent: int = 0
    collectives: int = 0
    scaling: int = 0  # AdamScale's replicas
    saved: int = 0  # written by `mh.save`, which divides replicated data among ranks

    def with_messages(self, sent: int, collectives: int, scaling: int = 0) -> Cost:
        return replace(
            self,
            sent=self.sent + sent,
            collectives=self.collectives + collectives,
            scaling=self.scaling + scaling,
        )


def _sent_per_worker(size: int, workers: int) -> int:
    return round(size * (workers - 1) / workers)


def rule_cost(groups: int, workers: int, gloo: bool) -> tuple[int, int]:
    # A payload has two numbers per parameter group, plus claims of all ranks.
    if gloo:  # an all-gather
        numbers = (2 * groups + len(CLAIMS)) * workers
    else:
        numbers = 2 * (2 * groups + len(CLAIMS) * workers)  # an all-reduce
    return _sent_per_worker(8 * numbers, workers), int(workers > 1)


def round_cost(sizes: ModelSizes, workers: int) -> tuple[int, int]:
    # Float32 chunks are all-reduced. The first and last chunk include all reports.
    lengths = Counter[Hashable]()
    for param in sizes.trained:
        lengths[param.kind] += param.elements
    chunks = 0
    for length in lengths.values():
        chunks += -(-length // elements_per_chunk(length))
    numbers = lengths.total() + min(2, chunks) * workers * REPORT * PARTS
    return _sent_per_worker(2 * 4 * numbers, workers), chunks * (workers > 1)


def hybrid_cost(sizes: ModelSizes, mesh: tuple[int, int], gloo: bool, replicas: int = 0) -> Cost:
    copies, shards = mesh
    cost = _fsdp_cost(sizes, shards, gloo, copies)
    cost = replace(cost, saved=_written(cost.parameters + cost.optimizer, copies))
    return cost.with_messages(*_moments_under_fsdp(sizes, shards, gloo, replicas))


def _written(alike: int, workers: int) -> int:
    return alike // max(1, min(workers, -(-alike // LEAST)))


def costs(sizes: ModelSizes, workers: int, gloo: bool, replicas: int = 0) -> tuple[Cost, ...]:
    """Return the costs of DDP, OSS, ShardedDataParallel and FSDP.

    Every worker needs a replica of `replicas` entries of the optimizer state.
    """
    params = sizes.parameter_bytes
    state = sum(param.state_bytes(param.elements) for param in sizes.trained)
    alone = Cost(params, _bytes_of(sizes.trained), state, saved=_written(params + state, workers))
    if workers == 1:
        return alone, alone, alone, alone
    ddp = replace(
        alone,
        # Gradients are views of buckets, so only the newest gradient needs extra memory.
        in_flight=max([param.bytes for param in sizes.trained], default=0),
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
        # An all-reduce of step counts, and an all-gather of moments per bucket.
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
    # DDP fills buckets in reverse order, the approximate order of backward.
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
    size: int
    slices: list[int]  # bytes of gradients per rank, or a single number for all ranks
    reducing: int  # additional slices of the rank during the reduction
    gradients: dict[int, int]  # bytes by id of ParamSize
    is_view: bool  # a range of a gradient, without a copy


@dataclass
class _Buckets:
    state: list[int]  # bytes of state by rank
    parameters: int  # bytes, with padding
    state_on_every_rank: int = 0  # additional bytes, equal on all ranks
    gradient_messages: int = 0  # collectives that reduce gradients
    parameter_messages: int = 0  # collectives that distribute new parameters
    buckets: list[_Bucket] = field(default_factory=list)

    @property
    def bucket_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def _sharded_ddp_cost(sizes: ModelSizes, layout: _Buckets, workers: int) -> Cost:
    ranks = workers
    if all(optimizer.elementwise for optimizer in sizes.optimizers):
        ranks = 1  # equal for all ranks
    held, most = _gradients_held(layout.buckets, ranks)
    held = held * (workers // ranks)
    most = most * (workers // ranks)
    with_state = list(map(add, held, layout.state))
    worst = with_state.index(max(with_state))
    peak = max(map(add, most, layout.state))
    used_flags = 2  # a byte per parameter, and two for abandoned passes
    for optimizer in sizes.optimizers:
        used_flags += len(optimizer.params)
    sent = 2 * layout.bucket_bytes + 2 * used_flags + sizes.buffers
    return Cost(
        parameters=layout.parameters,
        gradients=held[worst],
        optimizer=layout.state[worst] + layout.state_on_every_rank,
        in_flight=peak - held[worst] - layout.state[worst],
        sent=_sent_per_worker(sent, workers),
        collectives=1  # the flags
        + layout.gradient_messages
        + layout.parameter_messages
        + sizes.buffer_messages,
    )


def _gradients_held(buckets: Sequence[_Bucket], ranks: int) -> tuple[list[int], list[int]]:
    """Return each rank's bytes of gradients after a backward pass, and during the pass (peak)."""
    # While backward fills a bucket, the previous bucket is reduced (`_reducer.IN_FLIGHT` is 1), and
    # only slices of earlier buckets are left.
    complete = []  # bytes of complete gradients and buckets, while backward fills each bucket
    for place in range(len(buckets) + 1):  # at the last index, all buckets are full
        viewed: dict[int, int] = {}  # bytes of gradients of which a bucket is a view
        size = 0
        for bucket in buckets[max(0, place - 1) : place + 1]:
            if bucket.is_view:
                viewed.update(bucket.gradients)
            else:
                size += bucket.size
        # A gradient of the next bucket may exist: autograd returns weight and bias together.
        newest = 0
        for bucket in buckets[place : place + 2]:
            for key, gradient in bucket.gradients.items():
                if key not in viewed:
                    newest = max(newest, gradient)
        complete.append(size + sum(viewed.values()) + newest)
    held = []
    peaks = []
    for rank in range(ranks):
        owned = 0
        peak = complete[0]
        for bucket, present in zip(buckets, complete[1:], strict=True):
            own = bucket.slices[rank % len(bucket.slices)]
            peak = max(peak, owned + present + bucket.reducing * own)
            owned += own
        held.append(owned)
        peaks.append(peak)
    return held, peaks


def _lay_out(sizes: ModelSizes, workers: int, gloo: bool) -> _Buckets:
    """Put parameters into buckets, like `OSS` (_flat_params.py)."""
    layout = _Buckets([0] * workers, _bytes_of(sizes.others))
    for optimizer in sizes.optimizers:
        # (index, elements) of the parameters
        kinds: dict[tuple[Hashable, bool], list[tuple[int, int]]] = {}
        for i, param in reversed(list(enumerate(optimizer.params))):
            if param.elements:
                kinds.setdefault((param.kind, param.trained), []).append((i, param.elements))
        for (_, trained), indices in kinds.items():
            elements = sum([count for _, count in indices])
            largest = _layout.bucket_size(workers, elements)
            if optimizer.elementwise:
                buffers = _layout.even_layout(indices, workers, largest)
            else:
                buffers = _layout.whole_layout(indices, workers, largest, [0] * workers)
            for buffer in buffers:
                if not trained:
                    layout.parameters += buffer.size * optimizer.params[indices[0][0]].itemsize
                    continue
                for bucket in buffer.buckets:
                    _add_bucket(layout, optimizer, bucket, gloo)
    return layout


def _add_bucket(
    layout: _Buckets, optimizer: OptimizerParams, bucket: _layout.BucketLayout, gloo: bool
) -> None:
    """Count the messages and memory of `RankGroup.reduce_scatter_slices` for a bucket.

    gloo receives each slice separately. NCCL uses a reduce-scatter for even slices, a reduce for
    each uneven slice, and an all-to-all for half precision.
    """
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
    full_precision = itemsize >= 4
    messages = 1
    if gloo:
        reducing = workers - 1
    elif full_precision:  # uneven slices are reduced in place; the mean is new
        reducing = 1
        if not even:
            messages = gathers
    else:
        reducing = workers
    if not full_precision:
        reducing += 3  # sums are float32
    layout.gradient_messages += messages
    one = _Bucket(
        size=bucket.size * itemsize,
        slices=[elements * itemsize for elements in slices],
        reducing=reducing,
        gradients={id(param): param.bytes for param in params},
        is_view=bucket.ranges[0].size == bucket.size,
    )
    layout.buckets.append(one)
    layout.parameters += one.size
    if even and one.is_view:
        # A large parameter has many such buckets, so a loop over ranks would be slow.
        layout.state_on_every_rank += params[0].state_bytes(bucket.cuts[1])
        return
    for rank, index, elements in _owned_ranges(bucket):
        layout.state[rank] += optimizer.params[index].state_bytes(elements)


def _owned_ranges(bucket: _layout.BucketLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, parameter, elements): `BucketLayout.owned` for all ranks."""
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
    """The bytes of an FSDP wrap, including padding."""

    gathered: int  # parameters
    gradients: int  # from autograd, without padding
    reduced: int  # input of the reduce-scatter
    received: int  # messages not summed in place
    outer: int | None


def _fsdp_cost(sizes: ModelSizes, workers: int, gloo: bool, copies: int = 1) -> Cost:
    """Return the cost of FullyShardedDataParallel; each copy is sharded over `workers`."""
    wraps = []
    used_flags = 8  # bytes for the order of the wraps, and a byte per parameter
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
        if wrap.outer is not None:  # the outermost wrap stays gathered
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
    in_flight = _peak_of_fsdp_backward(wraps, workers) - reduced // workers
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
    """Return the additional cost of a `WholeTensorOptimizer`.

    A rank owns complete parameters with their state, P / N in total. The owner receives gradient
    shards and returns shards of the result, which adds 2 G (N-1)/N² bytes.
    """
    owners = deal_out([(n, p.elements) for n, p in enumerate(params)], [0] * workers)
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
    # a byte per tensor: whether the tensor has changed
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
    trained = [param for param in wrap.params if param.trained]
    elements = sum(param.shard_elements(workers) for param in trained)
    itemsize = _widest(trained)
    received = 0
    if gloo:
        in_place = itemsize >= 4  # sums are float32
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


def _peak_of_fsdp_backward(wraps: Sequence[_Wrap], workers: int) -> int:
    """Return the peak of gradients, gradient shards and gathered parameters in a backward pass.

    A wrap stays gathered until all inner wraps are reduced. Meanwhile, the parameters of the next
    wrap arrive. A reduction lasts until the input of the next reduction is complete.
    """
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
        # Close the wraps that do not contain the next wrap.
        while open_wraps and (next_outer is None or open_wraps[-1] is not wraps[next_outer]):
            done = open_wraps.pop()
            present -= done.gathered
            owned += done.reduced // workers
            # gradients coexist with the input of the reduce-scatter
            most = max(most, owned + arriving + present + done.reduced)
            present -= done.gradients
            if done.reduced:
                leaving = done.reduced + done.received
    return most
