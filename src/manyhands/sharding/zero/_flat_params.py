"""Move parameters to flat memory, and cut slices as in `_layout.py`.

Tensors
    buffer.data   a flat tensor; parameters are views of it
    slice.data    a view of the same memory: the elements of a parameter in this rank's slice of a
                  bucket, updated by the optimizer

Trained and frozen parameters have separate buffers, so that frozen parameters are not sent.

In a step, `gradient` returns a slice's part of `param.grad`, the user's optimizer updates
`slice.data` in place, slices are sent, and `wait` completes the parameters.

On a single rank, slices are the unmoved parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands._optimizers.optimizers import traits_of
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._ranks.slices import check_on_cpu
from manyhands._tensors.flat import flatten, unflatten
from manyhands._tensors.profiler import Range
from manyhands.sharding.zero import _layout
from manyhands.sharding.zero._layout import ParamRange

PARTS = 4  # of a step

Kind: TypeAlias = tuple[torch.dtype, torch.device]  # parameters of equal kind share buffers


@dataclass(eq=False)
class ParamSlice:
    """Elements `start` to `stop` of a parameter, which this rank updates."""

    param: int
    start: int
    stop: int
    data: Tensor
    whole: bool  # `data` has the parameter's shape; otherwise it is flat


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

    `largest` is the number of elements in a bucket; None: the default.
    """

    def __init__(self, workers: RankGroup, *, even: bool, largest: int | None) -> None:
        self.workers = workers
        self.even = even
        self.largest = largest
        self._gathers: list[dist.Work | SharedMemoryGather] = []
        self.params: list[Tensor] = []
        self.slices: list[list[ParamSlice]] = []
        self.buffers: list[FlatBuffer] = []
        # Elements per rank, of trained and of frozen parameters.
        self._load: dict[tuple[Kind, bool], list[int]] = {}

    def extend(self, params: Sequence[Tensor]) -> None:
        """Add parameters, and assign their elements to ranks."""
        ranks = self.workers.size
        first = len(self.params)
        self.params.extend(params)
        self.slices.extend([] for _ in params)
        if ranks == 1:
            for i, param in enumerate(params, first):
                self.slices[i] = [ParamSlice(i, 0, param.numel(), param, whole=True)]
            return
        kinds: dict[tuple[Kind, bool], list[tuple[int, int]]] = {}
        # Backward approximately computes gradients in reverse order.
        for i in reversed(range(first, len(self.params))):
            param = self.params[i]
            # Frozen subclasses, such as quantized tensors, stay in place.
            if param.numel() and (param.requires_grad or type(param.data) is Tensor):
                kind = (param.dtype, param.device)
                sizes = kinds.setdefault((kind, param.requires_grad), [])
                sizes.append((i, param.numel()))
        for key, sizes in kinds.items():
            largest = self.largest
            if largest is None:
                largest = _layout.bucket_size(ranks, sum(size for _, size in sizes))
            if self.even:
                layouts = _layout.even_layout(sizes, ranks, largest)
            else:
                load = self._load.setdefault(key, [0] * ranks)
                layouts = _layout.whole_layout(sizes, ranks, largest, load)
            for layout in layouts:
                self._build(layout, key[0])

    def _build(self, layout: _layout.BufferLayout, kind: Kind) -> None:
        data, on_ranks = self._move_in(layout, kind)
        buckets = []
        for each in layout.buckets:
            within = slice(each.start, each.start + each.size)
            bucket = FlatBucket(each, data[within], [other[within] for other in on_ranks])
            for place in each.owned(self.workers.rank):
                elements = self._owned_elements(bucket, place)
                trainable = elements.is_floating_point() or elements.is_complex()
                tensor = torch.nn.Parameter(elements, requires_grad=trainable)
                owned = ParamSlice(place.param, place.start, place.stop, tensor, not self.even)
                self.slices[place.param].append(owned)
                bucket.slices.append((owned, place))
            buckets.append(bucket)
        self.buffers.append(FlatBuffer(layout, data, buckets))

    @torch.no_grad()
    def _move_in(self, layout: _layout.BufferLayout, kind: Kind) -> tuple[Tensor, list[Tensor]]:
        """Move parameters to new memory; return it, and with shared memory that of all ranks."""
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
        return data, on_ranks

    def _owned_elements(self, bucket: FlatBucket, place: ParamRange) -> Tensor:
        start = bucket.layout.cuts[self.workers.rank] + place.offset
        data = bucket.data[start : start + place.size]
        if self.even:
            return data
        return unflatten(data, self.params[place.param])

    @property
    def trained(self) -> set[int]:
        return {i for i, param in enumerate(self.params) if param.requires_grad}

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
                if place.param in members:
                    param = self.params[place.param]
                    if place.size < param.numel():
                        param = flatten(param, param)[place.start : place.stop]
                    held.append(param)
        return held

    @property
    def _to_step(self) -> list[FlatBucket]:
        """The buckets to step, approximately in forward order."""
        chosen = []
        for bucket in self.buckets:
            if self._any_in_use(place.param for place in bucket.layout.ranges):
                chosen.append(bucket)
        chosen.reverse()
        return chosen

    # -- parameters that were moved ------------------------------------------------------------

    @property
    def moved(self) -> bool:
        """Whether `model.to(...)` or `half()` has moved parameters out of the buffers."""
        for buffer in self._buffers_in_use():
            for i, start in buffer.layout.starts.items():
                param = self.params[i]
                in_buffer = torch._C._is_alias_of(param, buffer.data)  # type: ignore[attr-defined]
                if not in_buffer or param.storage_offset() != start:
                    return True
        return False

    def _buffers_in_use(self) -> list[FlatBuffer]:
        """Return buffers with trained parameters. Frozen parameters may be moved separately."""
        return [buffer for buffer in self.buffers if self._any_in_use(buffer.layout.starts)]

    def _any_in_use(self, indices: Iterable[int]) -> bool:
        """Return whether any of these parameters is trained or has a gradient."""
        params = [self.params[i] for i in indices]
        return any(param.requires_grad or param.grad is not None for param in params)

    def rebuild_buffers(self) -> None:
        """Move all parameters to new buffers. As in torch, optimizer state is not moved."""
        for buffer in self._buffers_in_use():
            kinds = {(self.params[i].dtype, self.params[i].device) for i in buffer.layout.starts}
            if len(kinds) > 1:
                names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
                raise RuntimeError(
                    f"parameters that share a bucket are {names}. Move the whole model, or build "
                    "the optimizer after moving."
                )
            buffer.data, on_ranks = self._move_in(buffer.layout, kinds.pop())
            for bucket in buffer.buckets:
                within = slice(bucket.layout.start, bucket.layout.start + bucket.layout.size)
                bucket.data = buffer.data[within]
                bucket.on_ranks = [other[within] for other in on_ranks]
                for owned, place in bucket.slices:
                    owned.data.data = self._owned_elements(bucket, place)

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

    # -- a step --------------------------------------------------------------------------------

    def step(self, optim: Optimizer, **kwargs: Any) -> None:
        """Step the slices. Each part of the buckets is sent during the step of the next part."""
        for buckets in self._parts_of_step(optim):
            slices = [owned for bucket in buckets for owned, _ in bucket.slices]
            try:
                for owned in slices:
                    owned.data.grad = self.gradient(owned)
                optim.step(**kwargs)
            finally:
                for owned in slices:
                    owned.data.grad = None
            self._start_all_gather(buckets)

    def _parts_of_step(self, optim: Optimizer) -> list[list[FlatBucket]]:
        buckets = self._to_step
        # A step hook, or an unknown optimizer, would notice repeated calls per step.
        hooks = optim._optimizer_step_pre_hooks or optim._optimizer_step_post_hooks
        global_hooks = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        if hooks or global_hooks or not traits_of(type(optim)).elementwise:
            return [buckets]
        if self.workers.shared_memory is not None:  # no messages to overlap
            return [buckets]
        size = max(-(-len(buckets) // PARTS), 1)
        return [buckets[i : i + size] for i in range(0, len(buckets), size)]

    def _start_all_gather(self, buckets: Sequence[FlatBucket]) -> None:
        memory = self.workers.shared_memory
        if memory is not None:
            barrier = memory.barrier()
            self._gathers += [SharedMemoryGather(b, self.workers.rank, barrier) for b in buckets]
            return
        for bucket in buckets:
            self._gathers += self.workers.all_gather_slices(bucket.data, bucket.layout.cuts)

    def wait(self) -> None:
        # Autograd detects a backward through old values by versions, which writes to `data` do not
        # change.
        params = [self.params[place.param] for b in self._to_step for place in b.layout.ranges]
        torch.autograd.graph.increment_version(params)
        with Range("manyhands::wait all_gather"):
            for gather in self._gathers:
                gather.wait()
        if self._gathers and self.workers.shared_memory is not None:
            # Slices must not change while other ranks read.
            self.workers.shared_memory.barrier().wait()
        self._gathers.clear()
