"""What each sharding costs a worker: sizes in, bytes and collectives out. Integers only.

With N workers, P bytes of parameters and G of gradients (of what is trained), and S of state:

                          parameters  gradients  state   sent in a step
    DDP                   P           G          S       2 G (N-1)/N            all-reduce
    OSS + DDP             P           G          S / N   (2 G + P) (N-1)/N      and new parameters
    ShardedDataParallel   P           G / N      S / N   (G + P) (N-1)/N        slices, parameters
    FSDP                  P / N       G / N      S / N   (2 P + G) (N-1)/N      gathered twice

These are the formulas; the numbers come from the layout that the library will use
(`sharding/zero/_layout.py`; for FSDP the rows of each parameter, in wraps), paddings and uneven
shares included, for the worker that holds most. What is sent is the mean over the workers.

In flight, at most: a gradient that autograd has just made and, where gradients are sharded, the
buckets under way, what has come for them, and a bucket that is being filled. For FSDP, all that
is whole, coming or leaving while a wrap's gradients are computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._reducer import IN_FLIGHT

MIB = 2**20
DDP_BUCKETS = (1 * MIB, 25 * MIB)  # torch's first bucket, and the others


@dataclass(frozen=True)
class Weight:
    """A parameter; of state it has `fixed` bytes for each piece, and `each` for each element."""

    elements: int
    itemsize: int
    kind: Hashable = "float32"  # dtype and device: what may share a bucket
    trained: bool = True
    fixed: int = 0
    each: int = 0
    rows: int = 1  # its first dimension, along which FSDP divides it

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def state(self, elements: int) -> int:
        return self.fixed + self.each * elements

    def share(self, workers: int) -> int:
        """Elements of the first of so many workers; the others pad theirs to as many."""
        return -(-self.rows // workers) * (self.elements // max(1, self.rows))


@dataclass(frozen=True)
class Part:
    """The parameters of one optimizer; `even` if it works element by element."""

    weights: tuple[Weight, ...]
    even: bool = True

    @property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.trained and weight.elements]


@dataclass(frozen=True)
class Unit:
    """The parameters of one wrap of FSDP's; `inside` is the number of the wrap around it."""

    weights: tuple[Weight, ...]
    inside: int | None = None


@dataclass(frozen=True)
class Job:
    """A model to be trained: its optimizers' parameters, the others, and what else there is."""

    parts: tuple[Part, ...]
    others: tuple[Weight, ...] = ()
    units: tuple[Unit, ...] = ()  # what FSDP gathers together, in the order of a forward's ends
    buffers: int = 0  # bytes
    buffer_messages: int = 0  # with which rank 0 sends them before each forward

    @property
    def trained(self) -> list[Weight]:
        return [weight for part in self.parts for weight in part.trained]

    @property
    def parameters(self) -> int:
        owned = sum(weight.bytes for part in self.parts for weight in part.weights)
        return owned + sum(weight.bytes for weight in self.others)


@dataclass(frozen=True)
class Cost:
    """Of one worker, in bytes; `sent` and `collectives` are those of one step."""

    parameters: int
    gradients: int
    optimizer: int
    in_flight: int
    sent: int
    collectives: int


@dataclass
class _Sent:
    """A bucket of gradients. `slices` are by rank, or one number for all ranks."""

    size: int
    slices: list[int]
    rows: int  # of a slice's size that come for each slice
    landing: int  # of that size that are needed to add them up
    gradients: dict[int, int]  # which it has parts of, and their bytes
    viewed: bool  # it lies inside of one gradient, and is not copied


@dataclass
class _Laid:
    """All parts in buckets, and what every worker owns of them."""

    state: list[int]  # by rank, and what they all have beside that
    state_of_all: int = 0
    parameters: int = 0
    shared: int = 0  # messages that bring the new parameters
    sent: list[_Sent] = field(default_factory=list)

    @property
    def exchanged(self) -> int:
        return sum(bucket.size for bucket in self.sent)


def costs(job: Job, workers: int, bucket_size: int | None, gloo: bool) -> tuple[Cost, ...]:
    """Of the four ways, in the order of the table above."""
    if workers == 1:
        state = sum(weight.state(weight.elements) for weight in job.trained)
        alone = Cost(job.parameters, _gradients(job), state, 0, 0, 0)
        return alone, alone, alone, alone
    laid = _laid_out(job, workers, bucket_size, gloo)
    ddp = _ddp(job, workers)
    return ddp, _oss(ddp, laid, workers), _sharded(job, laid, workers), _fully(job, workers, gloo)


def _gradients(job: Job) -> int:
    return sum(weight.bytes for weight in job.trained)


def _ddp(job: Job, workers: int) -> Cost:
    trained = job.trained
    return Cost(
        parameters=job.parameters,
        gradients=_gradients(job),
        optimizer=sum(weight.state(weight.elements) for weight in trained),
        in_flight=max(weight.bytes for weight in trained),
        sent=_travels(2 * _gradients(job) + job.buffers, workers),
        collectives=ddp_buckets(trained) + job.buffer_messages,
    )


def _oss(ddp: Cost, laid: _Laid, workers: int) -> Cost:
    return Cost(
        parameters=laid.parameters,
        gradients=ddp.gradients,
        optimizer=max(laid.state) + laid.state_of_all,
        in_flight=ddp.in_flight,
        sent=ddp.sent + _travels(laid.exchanged, workers),
        collectives=ddp.collectives + laid.shared,
    )


def _sharded(job: Job, laid: _Laid, workers: int) -> Cost:
    held, most = _backward(laid.sent, 1 if all(part.even for part in job.parts) else workers)
    if len(held) == 1:  # all ranks are alike
        held, most = held * workers, most * workers
    worst = max(range(workers), key=lambda rank: held[rank] + laid.state[rank])
    peak = max(map(sum, zip(most, laid.state, strict=True)))  # perhaps of another worker
    flags = sum(len(part.weights) for part in job.parts)  # a byte each: which were used
    return Cost(
        parameters=laid.parameters,
        gradients=held[worst],
        optimizer=laid.state[worst] + laid.state_of_all,
        in_flight=peak - held[worst] - laid.state[worst],
        sent=_travels(2 * laid.exchanged + 2 * flags + job.buffers, workers),
        collectives=len(laid.sent) + laid.shared + 1 + job.buffer_messages,
    )


def _backward(buckets: Sequence[_Sent], ranks: int) -> tuple[list[int], list[int]]:
    """Bytes of gradients that each rank holds after backward, and the most while it runs."""
    held, most = [0] * ranks, [0] * ranks
    for place, bucket in enumerate([*buckets, None]):  # None: all are full, the last ones under way
        flying = buckets[max(0, place - IN_FLIGHT) : place]
        present = [*flying, bucket] if bucket else flying
        copied = sum(one.size for one in present if not one.viewed)
        viewed = {i: size for one in present if one.viewed for i, size in one.gradients.items()}
        coming = buckets[place : place + 2]  # an operation makes those of weight and bias together
        arriving = [s for one in coming for i, s in one.gradients.items() if i not in viewed]
        common = copied + sum(viewed.values()) + max(arriving, default=0)
        if place > IN_FLIGHT:
            _add(held, buckets[place - IN_FLIGHT - 1].slices)
        now = held.copy()
        for one in flying:
            _add(now, one.slices, one.rows + (one.landing if one is flying[0] else 0))
        most = [max(before, size + common) for before, size in zip(most, now, strict=True)]
    for one in buckets[-IN_FLIGHT:]:
        _add(held, one.slices)
    return held, [max(pair) for pair in zip(held, most, strict=True)]


def _add(sizes: list[int], more: Sequence[int], times: int = 1) -> None:
    for rank in range(len(sizes)):
        sizes[rank] += times * more[rank % len(more)]


@dataclass(frozen=True)
class _Wrap:
    """Bytes of one wrap: of its parameters and gradients whole, and as they travel, padded."""

    whole: int
    gradients: int
    reduced: int
    rows: int  # what comes for the worker's share of `reduced`, and is not summed up in its place


def _fully(job: Job, workers: int, gloo: bool) -> Cost:
    state = sum(
        weight.state(weight.share(workers))
        if part.even
        else -(-weight.fixed * weight.share(workers) // weight.elements)
        for part in job.parts
        for weight in part.trained
    )
    wraps = [_wrap(unit, workers, gloo) for unit in job.units]
    gathered = sum(wrap.whole for wrap in wraps)
    reduced = sum(wrap.reduced for wrap in wraps)
    kept = sum(w.whole for w, unit in zip(wraps, job.units, strict=True) if unit.inside is None)
    gatherings = sum(1 if unit.inside is None else 2 for unit in job.units if unit.weights)
    flags = sum(len(unit.weights) for unit in job.units)  # a byte each: which were used
    return Cost(
        parameters=gathered // workers,
        gradients=reduced // workers,
        optimizer=state,
        in_flight=max(0, _most_whole(job.units, wraps, workers) - reduced // workers),
        sent=_travels(2 * gathered - kept + reduced + 2 * flags, workers),
        collectives=gatherings * (workers if gloo else 1)
        + sum(wrap.reduced > 0 for wrap in wraps)
        + 1,
    )


def _wrap(unit: Unit, workers: int, gloo: bool) -> _Wrap:
    trained = [weight for weight in unit.weights if weight.trained]
    reduced = sum(workers * weight.share(workers) * weight.itemsize for weight in trained)
    in_place = all(weight.itemsize >= 4 for weight in trained)  # half precision is summed wider
    return _Wrap(
        whole=sum(workers * w.share(workers) * w.itemsize for w in unit.weights),
        gradients=sum(weight.bytes for weight in trained),
        reduced=reduced,
        rows=reduced // workers * (workers - 1 - in_place) if gloo else 0,
    )


def _most_whole(units: Sequence[Unit], wraps: Sequence[_Wrap], workers: int) -> int:
    """The most bytes of gradients, shares of them, and whole parameters while backward runs.

    A wrap is whole while any inside of it computes; its gradients are given to their owners
    once all inside of it are done. Meanwhile come the parameters of the next wrap, and the
    gradients of the last one are under way, until the next ones are laid out.
    """
    most = owned = leaving = 0
    open_: list[int] = []
    for number in reversed(range(len(units))):
        open_.append(number)
        coming = wraps[number - 1].whole if number else 0
        present = sum(wraps[i].whole + wraps[i].gradients for i in open_)
        most = max(most, owned + leaving + coming + present)
        after = units[number - 1].inside if number else None
        while open_ and (not number or open_[-1] != after):  # until the one around the next
            done = wraps[open_.pop()]
            present -= done.whole
            owned += done.reduced // workers
            most = max(most, owned + coming + present + done.reduced)
            present -= done.gradients
            leaving = done.reduced + done.rows if done.reduced else leaving
    return most


def _travels(size: int, workers: int) -> int:
    """What each worker sends so that its share of `size` bytes is where it is needed."""
    return round(size * (workers - 1) / workers)


def ddp_buckets(weights: Sequence[Weight]) -> int:
    """How many buckets DistributedDataParallel reduces: full once they reach their size."""
    count, filled, done = 0, dict[Hashable, int](), dict[Hashable, int]()
    for weight in reversed(weights):
        kind = weight.kind
        filled[kind] = filled.get(kind, 0) + weight.bytes
        if filled[kind] >= DDP_BUCKETS[min(done.get(kind, 0), 1)]:
            done[kind], filled[kind] = done.get(kind, 0) + 1, 0
            count += 1
    return count + sum(size > 0 for size in filled.values())


# -- the library's own layout ------------------------------------------------------------------


def _laid_out(job: Job, workers: int, bucket_size: int | None, gloo: bool) -> _Laid:
    """Everything in buckets, as `OSS` does it (see `Shards.lay_out`)."""
    laid = _Laid([0] * workers)
    untouched = [weight for part in job.parts for weight in part.weights if not weight.trained]
    laid.parameters = sum(weight.bytes for weight in (*untouched, *job.others))
    for part in job.parts:
        kinds: dict[Hashable, list[tuple[int, int]]] = {}
        for i, weight in reversed(list(enumerate(part.weights))):
            if weight.trained and weight.elements:
                kinds.setdefault(weight.kind, []).append((i, weight.elements))
        for sizes in kinds.values():
            itemsize = part.weights[sizes[0][0]].itemsize
            total = sum(elements for _, elements in sizes)
            largest = bucket_size or _layout.bucket_size(workers, total)
            if part.even:
                segments = _layout.even_layout(sizes, workers, largest)
            else:
                segments = _layout.whole_layout(sizes, workers, largest, [0] * workers)
            for segment in segments:
                for bucket in segment.buckets:
                    _count(laid, part, bucket, itemsize, gloo)
    return laid


def _count(
    laid: _Laid, part: Part, bucket: _layout.BucketLayout, itemsize: int, gloo: bool
) -> None:
    workers = len(laid.state)
    size = bucket.size * itemsize
    viewed = bucket.ranges[0].size == bucket.size
    if part.even:
        slices = [bucket.cuts[1] * itemsize]
        laid.shared += workers if gloo else 1
    else:
        slices = [(b - a) * itemsize for a, b in pairwise(bucket.cuts)]
        laid.shared += sum(length > 0 for length in slices)
    # As in `_core/slices.py`: slices from the others, a reduce-scatter, or an all-to-all.
    wide = itemsize >= 4  # or else the sum is of another type, and is put together apart
    rows = workers - 1 if gloo else 1 if part.even and wide else workers
    landing = 3 if not wide else 1 if rows == workers else 0
    weights = [part.weights[run.param] for run in bucket.ranges]
    gradients = {id(weight): weight.bytes for weight in weights}
    laid.parameters += size
    laid.sent.append(_Sent(size, slices, rows, landing, gradients, viewed))
    if part.even and viewed:  # a huge parameter has many of these
        laid.state_of_all += part.weights[bucket.ranges[0].param].state(bucket.cuts[1])
        return
    for rank, index, elements in _owned(bucket):
        laid.state[rank] += part.weights[index].state(elements)


def _owned(bucket: _layout.BucketLayout) -> Iterator[tuple[int, int, int]]:
    """(rank, parameter, elements) for each piece of it that a worker owns."""
    cuts = bucket.cuts
    for run in bucket.ranges:
        at, end = run.offset, run.offset + run.size
        rank = bisect_right(cuts, at) - 1
        while at < end:
            upto = min(end, cuts[rank + 1])
            if upto > at:
                yield rank, run.param, upto - at
            at, rank = upto, rank + 1
