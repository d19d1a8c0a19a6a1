"""Copy gradients into buckets, send these to owners, and average them there.

Within a backward pass
    arrived    a gradient is complete. It is copied into its buckets (a bucket inside a single
               gradient becomes a view instead), and `param.grad` is dropped
    launch     a full bucket is sent, in an order that all ranks share
    finish     the mean of our slice is computed from the other ranks' data
    close      at the end of the pass, missing gradients count as zero, the remaining buckets
               are sent and finished, and `param.grad` gets the means

Tensors, and their lifetimes
    filling    per bucket: the data to send, from the first gradient until sending
    mean       per bucket: the mean of our slice, after sending; becomes `param.grad.slices`

Inside `no_sync()` gradients stay where autograd puts them: in `param.grad`, or, after an averaged
pass, in `local` of the sharded gradient. The next averaged pass sends the sum.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from manyhands._ranks.presence import explained
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._ranks.slices import PendingReduceScatter, SharedMemoryReduceScatter
from manyhands._tensors.backward import BackwardPasses, current_task
from manyhands._tensors.flat import flatten
from manyhands._tensors.profiler import Range
from manyhands.sharding._agreement import check_same_frozen
from manyhands.sharding.zero._flat_params import FlatBucket, Shards
from manyhands.sharding.zero._layout import ParamRange

Pending: TypeAlias = PendingReduceScatter | SharedMemoryReduceScatter

IN_FLIGHT = 1  # buckets sent while the next bucket fills; more saved no time


class Reducer:
    """Averages gradients during backward.

    `module()` is the ShardedDataParallel, or None after it was freed. `require_backward_grad_sync`
    decides at the start of a pass whether to average the pass. An averaged pass ends with a copy of
    rank 0's buffers. `wire` is the type of sent gradients; default: the parameters' type.
    """

    def __init__(
        self,
        shards: Sequence[Shards],
        workers: RankGroup,
        module: Callable[[], Any],
        wire: torch.dtype | None,
    ) -> None:
        self.workers = workers
        self._all_shards = list(shards)
        self._module = module
        self._wire = wire
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _detach_hooks, self._hooks)
        # `early`: before a scaling rule measures the mean.
        self._passes = BackwardPasses(self, early=True)
        self._in_flight: deque[GradientBucket] = deque()
        # The last sent buffer: new memory costs page faults. Not on GPUs: a CUDA graph that has
        # recorded the buffer would write to it after it was freed here.
        self._kept: Tensor | None = None
        self._open = False  # whether a pass has not ended
        self.gave_up = False  # whether a pass has raised since the last averaged pass
        self._one_at_a_time = threading.Lock()
        self._averaged: set[Shards] = set()  # since their last step
        self.lay_out_buckets()

    def lay_out_buckets(self) -> None:
        _detach_hooks(self._hooks)
        self.params = [p for shards in self._all_shards for p in shards.params]
        self._trained = [param.requires_grad for param in self.params]
        self._buckets: list[GradientBucket] = []
        # For each parameter: the range in each bucket.
        self._where: list[list[tuple[GradientBucket, ParamRange]]] = [[] for _ in self.params]
        first = 0
        largest = 0  # bytes
        for shards in self._all_shards:
            for flat in shards.buckets:
                bucket = GradientBucket(len(self._buckets), flat, shards, first)
                if not bucket.needed:
                    continue
                self._buckets.append(bucket)
                for place in flat.layout.ranges:
                    self._where[first + place.param].append((bucket, place))
                dtype = self._wire or flat.data.dtype
                largest = max(largest, flat.layout.size * dtype.itemsize)
            first += len(shards.params)
        self._expected = [n for n, where in enumerate(self._where) if where and self._trained[n]]
        reducer = weakref.proxy(self)  # avoids a cycle
        for number in self._expected:
            hook = partial(Reducer.arrived, reducer, number)
            self._hooks.append(self.params[number].register_post_accumulate_grad_hook(hook))
        if self.workers.shared_memory is not None and self._buckets:
            self.workers.shared_memory.make_ring(largest, IN_FLIGHT)
        # The layout's order, until ranks have agreed after the first pass.
        self._order = list(range(len(self._buckets)))
        self._agreed = False
        self._start_over()

    @property
    def trained_changed(self) -> bool:
        return [p.requires_grad for p in self.params] != self._trained

    def follow_trained(self) -> None:
        """Rebuild the buckets if parameters were frozen or unfrozen. Call it on every rank."""
        if self.trained_changed:
            check_same_frozen(self.workers, [param.requires_grad for param in self.params])
            self.lay_out_buckets()

    def _start_over(self) -> None:
        """Discard the state of the last pass, which may have failed."""
        # The next pass must not receive messages of a failed pass.
        while self._in_flight:
            self._finish_oldest()
        self._arrived: set[int] = set()  # parameters with a gradient in this pass
        self._before: dict[int, ShardedGradient] = {}  # gradients of earlier passes, to add
        self._next = 0  # index in `_order` of the next bucket to send
        self._filled: list[int] = []  # full buckets, in order of completion
        for bucket in self._buckets:
            bucket.clear()

    # -- one backward pass ---------------------------------------------------------------------

    def arrived(self, number: int, _: Tensor) -> None:
        task = current_task()
        if task != self._passes.task:
            self._passes.enter(task)
        with self._one_at_a_time:  # autograd has a thread per device
            if self._averaging and not self._passes.nested:
                with Range("manyhands::copy gradient and free it"):
                    self._take_gradient(number)
                self._launch_full()
            elif self._averaging and number in self._arrived:  # repeated in a nested pass
                self._note_arrival(number)  # raises

    def begin_pass(self) -> None:
        """Decide whether to average the pass."""
        self.gave_up |= self._open
        if self._open and self._next:  # partly sent: the other ranks wait for the rest
            self._close()
        module = self._module()
        self._averaging = module is None or module.require_backward_grad_sync
        self._open = True
        self._start_over()

    def end_pass(self) -> None:
        self._open = False
        if self._averaging:
            self._close()

    def _take_gradient(self, number: int) -> None:
        param = self.params[number]
        grad = param.grad
        if isinstance(grad, ShardedGradient):
            before = grad
            self._before[number] = grad
            grad = before.local  # of this pass and of passes inside no_sync()
            before.local = None
        flat = None
        if grad is not None:
            self._note_arrival(number)
            flat = flatten(grad, param)
        param.grad = None
        dtype = self._wire or param.dtype
        for bucket, place in self._where[number]:
            size = bucket.flat.layout.size
            if flat is not None and place.size == size:
                # The bucket lies inside this gradient: no copy.
                bucket.filling = flat[place.start : place.stop].to(dtype)
            else:
                if bucket.filling is None:
                    bucket.filling = self._take_memory(size, dtype, bucket.flat.data.device)
                    bucket.copied = True
                target = bucket.filling[place.offset : place.offset + place.size]
                if flat is None:
                    target.zero_()
                else:
                    target.copy_(flat[place.start : place.stop])
            bucket.waiting -= 1
            if not bucket.waiting:
                self._filled.append(bucket.index)

    def _take_memory(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept = self._kept
        self._kept = None
        if kept is not None and (kept.numel(), kept.dtype, kept.device) == (size, dtype, device):
            return kept
        del kept  # before allocating a replacement
        return torch.empty(size, dtype=dtype, device=device)

    def _note_arrival(self, number: int) -> None:
        if number in self._arrived:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.params[number].shape)} arrived "
                "twice: the parameter is used inside and outside of a reentrant checkpoint. Use "
                "checkpoint(..., use_reentrant=False)."
            )
        self._arrived.add(number)

    def _launch_full(self) -> None:
        """Send full buckets, in an order that all ranks share."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._order[self._next]]
            if bucket.waiting:
                return
            while len(self._in_flight) >= IN_FLIGHT:
                self._finish_oldest()
            assert bucket.filling is not None
            with explained(self.workers):
                cuts = bucket.flat.layout.cuts
                bucket.pending = self.workers.reduce_scatter_slices(bucket.filling, cuts)
            bucket.filling = None
            self._in_flight.append(bucket)
            self._next += 1

    def _finish_oldest(self) -> None:
        bucket = self._in_flight.popleft()
        assert bucket.pending is not None
        with explained(self.workers):
            bucket.mean = bucket.pending.mean(self.workers.size, bucket.flat.data.dtype)
        on_cpu = bucket.flat.data.device.type == "cpu"
        if bucket.copied and on_cpu:  # a view must not be overwritten
            self._kept = bucket.pending.sent
        bucket.pending = None

    # -- the end of a pass ---------------------------------------------------------------------

    @torch.no_grad()
    def _close(self) -> None:
        """Send the remaining buckets, and set the means."""
        for number in self._expected:
            if number not in self._arrived:
                self._take_gradient(number)
        self._launch_full()
        # After all buckets, for an equal order of collectives.
        used = self._flags_of_used()
        work = self.workers.start_all_reduce(used, largest=True)
        while self._in_flight:
            self._finish_oldest()
        slices: list[list[Tensor]] = [[] for _ in self.params]
        starts: list[list[int]] = [[] for _ in self.params]
        for bucket in self._buckets:
            assert bucket.mean is not None
            for number, place in bucket.owned:
                slices[number].append(bucket.mean[place.offset : place.offset + place.size])
                starts[number].append(place.start)
            bucket.mean = None
        with explained(self.workers), Range("manyhands::wait all_reduce"):
            work.wait()
        for number in self._find_used(used):
            param = self.params[number]
            grad = ShardedGradient(
                param, slices[number], starts[number], self.workers.reducing_group
            )
            if number in self._before:
                earlier = self._before[number].slices
                for owned, before in zip(grad.slices, earlier, strict=True):
                    owned.add_(before)
            param.grad = grad
        if not self._agreed:
            # Send buckets in rank 0's order of completion.
            order = torch.tensor(self._filled, device=self.params[0].device)
            self.workers.broadcast_from_first([order])
            self._order = order.tolist()
            self._agreed = True
        # Send rank 0's buffers here, where every rank takes part.
        module = self._module()
        if module is not None and module.broadcast_buffers:
            module.sync_buffers()
        self._averaged.update(self._all_shards)
        self._start_over()

    def _flags_of_used(self) -> Tensor:
        device = self.params[0].device
        # The last two flags: 0 if this rank did not give up a pass, and 0 if it did.
        used = torch.ones(len(self.params) + 2, dtype=torch.uint8, device=device)
        if len(self._arrived) < len(self._expected):
            used[[n for n in range(len(self.params)) if n not in self._arrived]] = 0
        used[-1 if self.gave_up else -2] = 0
        return used

    def _find_used(self, used: Tensor) -> list[int]:
        # Reading the flags is a synchronization on a GPU.
        gave_up = self.gave_up
        self.gave_up = False
        self._open = False
        if (gave_up or used.device.type == "cpu") and used[-2:].all():
            raise RuntimeError(
                f"a forward or backward raised an exception on {'this' if gave_up else 'another'} "
                "rank, and the rank continued, one step behind the other ranks. Let the program "
                "end, or skip the step on all ranks. (Catch exceptions to retry inside the wrapped "
                "module.)"
            )
        if gave_up:  # so did all other ranks
            return []
        if len(self._arrived) == len(self._expected):
            return self._expected
        flags = used.tolist()
        found = []
        for number in self._expected:
            if flags[number]:
                found.append(number)
            elif number in self._before:  # used on no rank: restore the earlier gradient
                self.params[number].grad = self._before[number]
        return found

    # -- between passes ------------------------------------------------------------------------

    def reduce(self) -> None:
        """Average the remaining gradients, as at the end of a pass."""
        self.follow_trained()
        self._passes.forget()
        if not (self._open and self._next):  # else send the rest of a partly sent pass
            self._start_over()
        self.gave_up = False  # this rank contributes zeros
        self._open = False
        self._close()

    def complete(self, shards: Shards) -> None:
        """Before `OSS.step`, average with zeros on a rank without a backward pass."""
        unaveraged = False  # whether any gradient is not averaged
        for param, where in zip(self.params, self._where, strict=True):
            grad = param.grad
            if where and grad is not None:
                unaveraged |= not isinstance(grad, ShardedGradient) or grad.local is not None
        if unaveraged:
            raise RuntimeError(
                "step() after a backward inside no_sync(), or after a change of a gradient, with a "
                "gradient that is not averaged. Run the last backward outside no_sync(), or call "
                "reduce() on the ShardedDataParallel, on every rank."
            )
        if shards not in self._averaged:
            self.reduce()

    def forget(self, *shards: Shards) -> None:
        """Note a step of the optimizers, or cleared gradients."""
        self._averaged.difference_update(shards)


class GradientBucket:
    def __init__(self, index: int, flat: FlatBucket, shards: Shards, first: int) -> None:
        self.index = index
        self.flat = flat
        # `first` is the reducer's number of the first parameter.
        owned = flat.layout.owned(shards.workers.rank)
        self.owned = [(first + place.param, place) for place in owned]
        self.needed = sum(shards.params[place.param].requires_grad for place in flat.layout.ranges)
        self.clear()

    def clear(self) -> None:
        self.waiting = self.needed  # gradients that have not arrived
        self.filling: Tensor | None = None
        self.copied = False  # whether `filling` is a separate buffer, not a view of a gradient
        self.pending: Pending | None = None
        self.mean: Tensor | None = None


def _detach_hooks(hooks: list[RemovableHandle]) -> None:
    for handle in hooks:
        handle.remove()
    hooks.clear()
