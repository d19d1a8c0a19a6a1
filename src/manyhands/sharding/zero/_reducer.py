"""Gradients on their way: filled into buckets, sent to their owners, averaged there.

Within a backward pass
    arrived    a gradient is complete. It is copied into its buckets (or, if a bucket lies inside
               it, becomes the bucket), and `param.grad` is dropped
    launch     a full bucket is sent, in an order that is the same on every rank
    finish     the other ranks' data for our slice have arrived, and its mean is computed
    close      the pass is over: a gradient that did not arrive counts as zero. The remaining
               buckets are sent and finished, and the means become `param.grad`

Tensors we hold, and when
    filling    per bucket: what will be sent, from its first gradient until it is finished
    mean       per bucket: the mean of our slice, from then on; lives on in `param.grad.slices`

Inside `no_sync()` gradients stay where autograd puts them: in `param.grad`, or, if there is a
sharded gradient already, in its `local`. The next pass outside sends the sum.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from manyhands._ranks.presence import explained
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._ranks.slices import PendingReduceScatter, SharedMemoryReduceScatter
from manyhands._tensors.backward import BackwardPasses, current_task
from manyhands._tensors.flat import flatten
from manyhands.sharding._agreement import check_same_frozen
from manyhands.sharding.zero._flat_params import FlatBucket, Shards
from manyhands.sharding.zero._layout import ParamRange

Pending: TypeAlias = PendingReduceScatter | SharedMemoryReduceScatter

IN_FLIGHT = 1  # buckets under way while the next one fills: more cost memory and saved no time


class Reducer:
    """Averages the gradients of some optimizers' parameters during backward.

    At the beginning of each pass `synchronised()` says whether it will be averaged. `wire` is the
    type in which gradients travel, by default their own. `after_pass` is called at the end of each
    averaged pass, also on ranks that took part without a backward of their own.
    """

    def __init__(
        self,
        shards: Sequence[Shards],
        workers: RankGroup,
        synchronised: Callable[[], bool],
        wire: torch.dtype | None,
        after_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers = workers
        self._all_shards = list(shards)
        self._synchronised = synchronised
        self._wire = wire
        self._after_pass = after_pass
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _detach_hooks, self._hooks)
        # `early`: gradients are averaged before a scaling rule measures their mean.
        self._passes = BackwardPasses(self, early=True)
        self._order: list[int] | None = None
        self._in_flight: deque[GradientBucket] = deque()
        self._buffers = SendBuffers()
        self._open = False  # whether a pass has begun here that has not ended
        self.gave_up = False  # whether one has raised an exception since the last averaged pass
        self._one_at_a_time = threading.Lock()
        self._averaged: set[Shards] = set()  # since their last step
        self.lay_out_buckets()

    def lay_out_buckets(self) -> None:
        """Lay out the buckets of the parameters that are trained, and hook these parameters."""
        _detach_hooks(self._hooks)
        self.params = [p for shards in self._all_shards for p in shards.params]
        numbers = {id(param): number for number, param in enumerate(self.params)}
        flats = [(s, flat) for s in self._all_shards for flat in s.buckets if s.active(flat)]
        self._buckets = [GradientBucket(i, *pair, numbers) for i, pair in enumerate(flats)]
        # For each parameter: the buckets that it travels in, and its range in each.
        self._where: list[list[tuple[GradientBucket, ParamRange]]] = [[] for _ in self.params]
        for bucket in self._buckets:
            for number, place in bucket.ranges:
                self._where[number].append((bucket, place))
        self._trained = [p.requires_grad for p in self.params]
        self._expected = sum(bool(t and p) for t, p in zip(self._trained, self._where, strict=True))
        listener = weakref.ref(self)  # hooks must not keep the reducer alive
        for number, param in enumerate(self.params):
            if param.requires_grad and self._where[number]:
                hook = _make_hook(listener, number)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))
        if self.workers.shared_memory is not None and self._buckets:
            sizes = ((b.flat.layout.size, self._wire or b.flat.data.dtype) for b in self._buckets)
            largest = max(size * dtype.itemsize for size, dtype in sizes)
            self.workers.shared_memory.make_ring(largest, IN_FLIGHT)
        self._order = None
        self._start_over()

    @property
    def trained_changed(self) -> bool:
        """Whether parameters were frozen or thawed since `lay_out_buckets`."""
        return [p.requires_grad for p in self.params] != self._trained

    def follow_trained(self) -> None:
        """Lay the buckets out anew if parameters were frozen or thawed; on every rank."""
        if self.trained_changed:
            check_same_frozen(self.workers, [param.requires_grad for param in self.params])
            self.lay_out_buckets()

    def _start_over(self) -> None:
        """Forget the last pass, before the next and after each. It may have failed halfway."""
        # Receive what a failed pass has left: the next one must not take it for its own.
        while self._in_flight:
            self._finish_oldest()
        self._arrived: set[int] = set()  # parameters whose gradient of this pass was taken
        self._before: dict[int, ShardedGradient] = {}  # gradients of earlier passes, to be added
        self._next = 0  # the turn of the bucket to send next
        self._filled: list[int] = []  # buckets in the order in which they were full
        for bucket in self._buckets:
            bucket.clear()

    # -- one backward pass ---------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """Take the gradient of a parameter, which is complete now. Called in a hook."""
        task = current_task()
        if task != self._passes.task:
            self._passes.enter(task)
        with self._one_at_a_time:  # a module on several devices has several autograd threads
            if self._averaging and not self._passes.nested:
                self._take_gradient(number)
                self._launch_full()
            elif self._averaging and number in self._arrived:  # again, within a nested pass
                self._note_arrival(number)  # raises

    def begin_pass(self) -> None:
        """As the first gradient of a pass is complete: decide whether to average the pass."""
        self.gave_up |= self._open
        if self._open and self._next:  # sent in part: the other ranks wait for the rest
            self._close()
        self._averaging = self._synchronised()
        self._open = True
        self._start_over()

    def end_pass(self) -> None:
        self._open = False
        if self._averaging:
            self._close()

    def _take_gradient(self, number: int) -> None:
        """Copy a gradient into its buckets, and drop it."""
        param = self.params[number]
        grad = param.grad
        if isinstance(grad, ShardedGradient):
            before = grad
            self._before[number] = grad
            grad = before.local  # of this pass, and of the passes in no_sync()
            before.local = None
        if grad is not None:
            self._note_arrival(number)
        param.grad = None
        flat = None if grad is None else flatten(grad, param)
        for bucket, place in self._where[number]:
            bucket.fill(place, flat, self._wire or param.dtype, self._buffers)
            if not bucket.waiting:
                self._filled.append(bucket.index)

    def _note_arrival(self, number: int) -> None:
        """Note that a parameter's gradient of this pass was taken; raise if it comes again."""
        if number in self._arrived:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.params[number].shape)} came "
                "again: it is used inside and outside of a reentrant checkpoint. Use "
                "checkpoint(..., use_reentrant=False)."
            )
        self._arrived.add(number)

    def _launch_full(self) -> None:
        """Send full buckets, but none before its turn: collectives need one order on all ranks."""
        while self._next < len(self._buckets) and not self._bucket_in_turn(self._next).waiting:
            self._launch(self._bucket_in_turn(self._next))

    def _bucket_in_turn(self, turn: int) -> GradientBucket:
        """Return the bucket whose turn it is; in the first pass the order is that of the layout."""
        return self._buckets[turn if self._order is None else self._order[turn]]

    def _launch(self, bucket: GradientBucket) -> None:
        """Begin to send a bucket, once fewer than `IN_FLIGHT` are on their way."""
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_oldest()
        with explained(self.workers):
            bucket.send(self.workers)
        self._in_flight.append(bucket)
        self._next += 1

    def _finish_oldest(self) -> None:
        """Wait for the bucket that was sent first, and compute the mean of our slice."""
        bucket = self._in_flight.popleft()
        with explained(self.workers):
            bucket.finish(self.workers, self._buffers)

    # -- the end of a pass ---------------------------------------------------------------------

    @torch.no_grad()
    def _close(self) -> None:
        """Send the remaining buckets, with zeros for missing gradients, and set the means."""
        for number, trained in enumerate(self._trained):
            if trained and self._where[number] and number not in self._arrived:
                self._take_gradient(number)
        while self._next < len(self._buckets):
            self._launch(self._bucket_in_turn(self._next))
        # After the buckets: the same order of collectives on every rank, whatever was used there.
        used = self._start_finding_used()
        while self._in_flight:
            self._finish_oldest()
        slices: list[list[tuple[Tensor, int]]] = [[] for _ in self.params]
        for bucket in self._buckets:
            assert bucket.mean is not None
            for number, place in bucket.owned:
                mean = bucket.mean[place.offset : place.offset + place.size]
                slices[number].append((mean, place.start))
            bucket.mean = None
        for number in self._find_used(used):
            self._set_gradient(number, slices[number])
        if self._order is None:
            self._agree_on_order()
        # Rank 0's buffers (of batch norm) are sent here, where every rank takes part.
        self._after_pass()
        self._averaged.update(self._all_shards)
        self._start_over()

    def _set_gradient(self, number: int, slices: list[tuple[Tensor, int]]) -> None:
        """Set `param.grad` to the mean, plus what earlier passes left."""
        param = self.params[number]
        before = self._before.get(number)
        pieces = [p for p, _ in slices]
        starts = [start for _, start in slices]
        grad = ShardedGradient(param, pieces, starts, self.workers.reducing_group)
        if before is not None:
            for owned, earlier in zip(grad.slices, before.slices, strict=True):
                owned.add_(earlier)
        param.grad = grad

    def _start_finding_used(self) -> Tensor:
        """Begin to find out which parameters were used on any rank, as a flag for each."""
        device = self.params[0].device
        # And two flags: whether any rank has given up a pass, and whether any rank has not.
        used = torch.ones(len(self.params) + 2, dtype=torch.uint8, device=device)
        if len(self._arrived) < self._expected:
            used[[n for n in range(len(self.params)) if n not in self._arrived]] = 0
        used[-1 if self.gave_up else -2] = 0
        self._used_work = self.workers.start_all_reduce(used, largest=True)
        return used

    def _find_used(self, used: Tensor) -> list[int]:
        """Return the parameters that some rank has used in this pass: they get a gradient."""
        # Reads the flags only if a gradient is missing here: with a GPU that is a synchronisation.
        with explained(self.workers):
            self._used_work.wait()
        gave_up = self.gave_up
        self.gave_up = False
        self._open = False
        if (gave_up or used.device.type == "cpu") and used[-2:].all():
            raise RuntimeError(
                f"a forward or backward raised an exception on {'this' if gave_up else 'another'} "
                "rank, which went on, a step behind the other ranks. Let the program end, or skip "
                "the step on all ranks. (Catch what you repeat inside the wrapped module.)"
            )
        here = [n for n, trained in enumerate(self._trained) if trained and self._where[n]]
        if gave_up:  # so did all other ranks
            return []
        if len(self._arrived) == self._expected:
            return here
        flags = used.tolist()
        for number in here:  # no rank used the parameter: its gradient of earlier passes stays
            if not flags[number] and number in self._before:
                self.params[number].grad = self._before[number]
        return [number for number in here if flags[number]]

    def _agree_on_order(self) -> None:
        """Send buckets in the order in which they were full on rank 0, from now on."""
        rest = [i for i in range(len(self._buckets)) if i not in self._filled]
        order = torch.tensor([*self._filled, *rest], device=self.params[0].device)
        self.workers.broadcast_from_first([order])
        self._order = order.tolist()

    # -- between passes ------------------------------------------------------------------------

    def reduce(self) -> None:
        """Average the gradients that have not been averaged, as at the end of a pass."""
        self.follow_trained()
        self._passes.forget()
        if not (self._open and self._next):  # else the rest of a pass that was sent in part
            self._start_over()
        self.gave_up = False  # the rank takes part in the step, with zeros
        self._open = False
        self._close()

    def complete(self, shards: Shards) -> None:
        """Before `OSS.step`: a rank that had no backward pass averages with zeros, as others."""
        unaveraged = self._unaveraged()
        if shards not in self._averaged and not unaveraged:
            self.reduce()
        if unaveraged:
            raise RuntimeError(
                "step() after a backward inside no_sync(), or after something was added to a "
                "gradient, which has not been averaged. Run the last backward outside no_sync(), "
                "or call reduce() on the ShardedDataParallel, on every worker."
            )

    def stepped(self, shards: Shards) -> None:
        """Note that these made a step."""
        self._averaged.discard(shards)

    def cleared(self, *shards: Shards) -> None:
        """Note that their gradients were cleared."""
        self._averaged.difference_update(shards)

    def _unaveraged(self) -> bool:
        """Return whether any parameter has a gradient of this rank alone."""
        return any(
            grad is not None and (not isinstance(grad, ShardedGradient) or grad.local is not None)
            for grad, places in zip((p.grad for p in self.params), self._where, strict=True)
            if places
        )


class GradientBucket:
    """One bucket of gradients, filled and sent once in each pass."""

    def __init__(
        self, index: int, shards: Shards, flat: FlatBucket, numbers: dict[int, int]
    ) -> None:
        self.index = index
        self.flat = flat
        # `numbers` are the reducer's numbers of the parameters, by id.
        ranges = flat.layout.ranges
        owned = flat.layout.owned(shards.workers.rank)
        self.ranges = [(numbers[id(shards.params[each.param])], each) for each in ranges]
        self.owned = [(numbers[id(shards.params[each.param])], each) for each in owned]
        self.needed = sum(shards.params[each.param].requires_grad for each in ranges)
        self.clear()

    def clear(self) -> None:
        """Empty the bucket for the next pass."""
        self.waiting = self.needed  # gradients that have not arrived
        self.filling: Tensor | None = None
        self.copied = False  # whether `filling` is a buffer of ours, and not a view of a gradient
        self.pending: Pending | None = None
        self.mean: Tensor | None = None

    def fill(
        self, place: ParamRange, grad: Tensor | None, dtype: torch.dtype, buffers: SendBuffers
    ) -> None:
        """Copy a range of a flat gradient into the bucket; or zeros, if `grad` is None."""
        layout = self.flat.layout
        data = self.flat.data
        self.waiting -= 1
        if grad is not None and place.size == layout.size:
            # The bucket lies inside this gradient: no copy.
            self.filling = grad[place.start : place.stop].to(dtype)
            return
        self.copied = True
        if self.filling is None:
            self.filling = buffers.take(layout.size, dtype, data.device)
        target = self.filling[place.offset : place.offset + place.size]
        if grad is None:
            target.zero_()
        else:
            target.copy_(grad[place.start : place.stop])

    def send(self, workers: RankGroup) -> None:
        """Begin to send each slice to its owner."""
        assert self.filling is not None
        self.pending = workers.reduce_scatter_slices(self.filling, self.flat.layout.cuts)
        self.filling = None

    def finish(self, workers: RankGroup, buffers: SendBuffers) -> None:
        """Wait for the other ranks' data, and compute the mean of our slice."""
        assert self.pending is not None
        self.mean = self.pending.mean(workers.size, self.flat.data.dtype)
        if self.copied:  # or else it is a view of a gradient, and not ours to keep
            buffers.give_back(self.pending.sent)
        self.pending = None


class SendBuffers:
    """Memory for buckets to be sent. The last one is kept, because new memory costs page faults."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a bucket: the kept one if it fits."""
        kept = self._kept
        self._kept = None
        if kept is not None and (kept.numel(), kept.dtype, kept.device) == (size, dtype, device):
            return kept
        del kept  # before there is another one
        return torch.empty(size, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        self._kept = buffer


def _make_hook(listener: weakref.ref[Reducer], number: int) -> Callable[[Tensor], None]:
    """Return the hook of parameter `number`, which tells the reducer that its gradient is here."""

    def arrived(_: Tensor) -> None:
        reducer = listener()
        if reducer is not None:
            reducer.arrived(number)

    return arrived


def _detach_hooks(hooks: list[RemovableHandle]) -> None:
    for handle in hooks:
        handle.remove()
    hooks.clear()
