"""Gradients on their way: filled into buckets, sent to their owners, averaged there.

Within a backward pass
    arrived    a gradient is complete. Its runs are copied into their buckets (or, where a bucket
               lies inside one gradient, are the bucket), and `param.grad` is let go
    launch     a full bucket is sent, in an order that is the same on every worker
    land       what the workers sent for our slice is there, and its mean is taken
    close      the pass is over: what did not arrive counts as zero; the rest is sent, landed,
               and put into `param.grad` as a `ShardedGradient`

Tensors we hold, and when
    filling    per bucket: what will be sent, from the first gradient to `land`
    slices     per bucket: the mean of our slice, from `land`; lives on in `param.grad.slices`

Inside `no_sync()` gradients stay where autograd puts them: in `param.grad`, or, where there is a
sharded gradient already, in its `local`. The next pass outside sends the sum.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands._core.backward import BackwardPasses, current_task
from manyhands._core.flat import flatten
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded_gradient import ShardedGradient
from manyhands._core.shared_memory import SharedMemoryReduceScatter
from manyhands._core.slices import PendingReduceScatter
from manyhands.sharding._agreement import all_freeze_alike
from manyhands.sharding.zero._flat_params import FlatBucket, Shards
from manyhands.sharding.zero._layout import ParamRange

IN_FLIGHT = 1  # buckets under way while the next fills: each is memory, and more did not pay


class _Outgoing:
    """One bucket of gradients in one pass."""

    def __init__(
        self, place: int, shards: Shards, flat: FlatBucket, params: dict[int, int]
    ) -> None:
        self.place, self.flat = place, flat
        self.ranges = [(params[id(shards.params[run.param])], run) for run in flat.layout.ranges]
        self.owned = [
            (params[id(shards.params[run.param])], run)
            for run in flat.layout.owned(shards.workers.rank)
        ]
        self.needed = sum(shards.params[run.param].requires_grad for run in flat.layout.ranges)
        self.clear()

    def clear(self) -> None:
        self.waiting = self.needed
        self.filling: Tensor | None = None
        self.copied = False
        self.exchange: PendingReduceScatter | SharedMemoryReduceScatter | None = None
        self.slice: Tensor | None = None

    def fill(
        self, run: ParamRange, grad: Tensor | None, dtype: torch.dtype, buffers: _Buffers
    ) -> None:
        """Take in a run of a gradient, given flat; or of zeros."""
        plan, data = self.flat.layout, self.flat.data
        self.waiting -= 1
        if grad is not None and run.size == plan.size:  # the bucket lies inside it: no copy
            self.filling = grad[run.start : run.stop].to(dtype)
            return
        self.copied = True
        if self.filling is None:
            self.filling = buffers.take(plan.size, dtype, data.device)
        place = self.filling[run.offset : run.offset + run.size]
        if grad is None:
            place.zero_()
        else:
            place.copy_(grad[run.start : run.stop])


class _Buffers:
    """Memory for buckets to be sent: the last one lives on, for memory that is new costs time."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept, self._kept = self._kept, None
        if kept is not None and (kept.numel(), kept.dtype, kept.device) == (size, dtype, device):
            return kept
        return torch.empty(size, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        self._kept = buffer


class Reducer:
    """Averages the gradients of some optimizers' parameters during backward.

    `synchronised()` is asked whether a pass is to be averaged; `wire` is the type in which
    gradients travel, by default their own. `finish` is called at the end of each averaged pass,
    by workers that only joined in, too.
    """

    def __init__(
        self,
        shards: Sequence[Shards],
        workers: RankGroup,
        synchronised: Callable[[], bool],
        wire: torch.dtype | None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers = workers
        self._all_shards = list(shards)
        self._synchronised = synchronised
        self._wire = wire
        self._finish = finish
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        me = weakref.proxy(self)  # no cycle: dropping the module drops the hooks
        # Ours queues its end once, and so comes before the measurement of the mean gradient.
        self._passes = BackwardPasses(lambda: me._begin(), lambda: me._end(), early=True)
        self._order: list[int] | None = None
        self._flying: deque[_Outgoing] = deque()
        self._buffers = _Buffers()
        self._one_at_a_time = threading.Lock()
        self._fresh: set[Shards] = set()  # whose gradients have been averaged since their step
        self.cover()

    def cover(self) -> None:
        """Listen to the parameters that are being trained now."""
        _remove(self._hooks)
        self.params = [p for shards in self._all_shards for p in shards.params]
        numbers = {id(param): number for number, param in enumerate(self.params)}
        flats = [(s, flat) for s in self._all_shards for flat in s.buckets if s.active(flat)]
        self._buckets = [_Outgoing(i, *pair, numbers) for i, pair in enumerate(flats)]
        self._places: list[list[tuple[_Outgoing, ParamRange]]] = [[] for _ in self.params]
        for bucket in self._buckets:
            for number, run in bucket.ranges:
                self._places[number].append((bucket, run))
        self._trained = [p.requires_grad for p in self.params]
        self._expected = sum(
            bool(t and p) for t, p in zip(self._trained, self._places, strict=True)
        )
        listener = weakref.ref(self)
        for number, param in enumerate(self.params):
            if param.requires_grad and self._places[number]:
                hook = _listening(listener, number)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))
        if self.workers.shared_memory is not None and self._buckets:
            sizes = ((b.flat.layout.size, self._wire or b.flat.data.dtype) for b in self._buckets)
            largest = max(size * dtype.itemsize for size, dtype in sizes)
            self.workers.shared_memory.make_ring(largest, IN_FLIGHT)
        self._order = None
        self._start_over()

    @property
    def trained_changed(self) -> bool:
        """Whether parameters were frozen or have thawed since `cover`."""
        return [p.requires_grad for p in self.params] != self._trained

    def follow_trained(self) -> None:
        """Lay the buckets out anew if parameters were frozen or have thawed; on every worker."""
        if self.trained_changed:
            all_freeze_alike(self.workers, [param.requires_grad for param in self.params])
            self.cover()

    def _start_over(self) -> None:
        while (
            self._flying
        ):  # of a pass that an error ended: it must not be taken for the next one's
            self._land()
        self._arrived: set[int] = set()
        self._before: dict[int, ShardedGradient] = {}
        self._next = 0
        self._finished: list[int] = []
        for bucket in self._buckets:
            bucket.clear()

    # -- one backward pass ---------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """A parameter's gradient of this pass is complete."""
        task = current_task()
        if task != self._passes.task:
            self._passes.enter(task)
        with self._one_at_a_time:  # a module on several devices has several autograd threads
            if self._averaging and not self._passes.nested:
                self._take(number)
                self._launch_full()
            elif self._averaging and number in self._arrived:
                self._note_arrival(number)  # raises

    def _begin(self) -> None:
        self._averaging = self._synchronised()
        self._start_over()

    def _end(self) -> None:
        if self._averaging:
            self._close()

    def _take(self, number: int) -> None:
        """Bring a gradient into its buckets, and let it go."""
        param = self.params[number]
        grad = param.grad
        if isinstance(grad, ShardedGradient):
            before = self._before[number] = grad
            grad, before.local = before.local, None
        if grad is not None:
            self._note_arrival(number)
        param.grad = None
        flat = None if grad is None else flatten(grad, param)
        for bucket, run in self._places[number]:
            bucket.fill(run, flat, self._wire or param.dtype, self._buffers)
            if not bucket.waiting:
                self._finished.append(bucket.place)

    def _note_arrival(self, number: int) -> None:
        if number in self._arrived:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.params[number].shape)} came "
                "again after it had been sent: it is used inside and outside of a reentrant "
                "checkpoint. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
            )
        self._arrived.add(number)

    def _launch_full(self) -> None:
        """Send the full buckets whose turn it is."""
        while self._next < len(self._buckets) and not self._turn(self._next).waiting:
            self._launch(self._turn(self._next))

    def _turn(self, place: int) -> _Outgoing:
        return self._buckets[place if self._order is None else self._order[place]]

    def _launch(self, bucket: _Outgoing) -> None:
        while len(self._flying) >= IN_FLIGHT:
            self._land()
        assert bucket.filling is not None
        bucket.exchange = self.workers.reduce_scatter_slices(
            bucket.filling, bucket.flat.layout.cuts
        )
        bucket.filling = None
        self._flying.append(bucket)
        self._next += 1

    def _land(self) -> None:
        bucket = self._flying.popleft()
        assert bucket.exchange is not None
        bucket.slice = bucket.exchange.mean(self.workers.size, bucket.flat.data.dtype)
        if bucket.copied:
            self._buffers.give_back(bucket.exchange.sent)
        bucket.exchange = None

    # -- the end of a pass ---------------------------------------------------------------------

    @torch.no_grad()
    def _close(self) -> None:
        """Send what is left, with zeros for what did not come, and hand out the means."""
        for number, trained in enumerate(self._trained):
            if trained and self._places[number] and number not in self._arrived:
                self._take(number)
        while self._next < len(self._buckets):
            self._launch(self._turn(self._next))
        used = self._tell_used()  # after the buckets, as on workers that have sent all of theirs
        while self._flying:
            self._land()
        pieces: list[list[tuple[Tensor, int]]] = [[] for _ in self.params]
        for bucket in self._buckets:
            assert bucket.slice is not None
            for number, run in bucket.owned:
                mean = bucket.slice[run.offset : run.offset + run.size]
                pieces[number].append((mean, run.start))
            bucket.slice = None
        for number in self._used(used):
            self._hand_out(number, pieces[number])
        if self._order is None:
            self._agree_on_order()
        self._finish()
        self._fresh.update(self._all_shards)
        self._start_over()

    def _hand_out(self, number: int, pieces: list[tuple[Tensor, int]]) -> None:
        param, before = self.params[number], self._before.get(number)
        grad = ShardedGradient(param, [p for p, _ in pieces], [start for _, start in pieces])
        if before is not None:
            for piece, earlier in zip(grad.slices, before.slices, strict=True):
                piece.add_(earlier)
        param.grad = grad

    def _tell_used(self) -> Tensor:
        """Begin to find out which parameters any worker has used."""
        device = self.params[0].device
        if len(self._arrived) == self._expected:
            used = torch.ones(len(self.params), dtype=torch.uint8, device=device)
        else:
            used = torch.zeros(len(self.params), dtype=torch.uint8)
            used[list(self._arrived)] = 1
            used = used.to(device)
        self._told = self.workers.start_all_reduce_max(used)
        return used

    def _used(self, used: Tensor) -> list[int]:
        """Parameters that have a gradient after this pass. (Asks the device only if needed.)"""
        self._told.wait()
        here = [n for n, trained in enumerate(self._trained) if trained and self._places[n]]
        if len(self._arrived) == self._expected:
            return here
        flags = used.tolist()
        for number in here:  # an earlier pass's gradient, of a parameter that nobody used in this
            if not flags[number] and number in self._before:
                self.params[number].grad = self._before[number]
        return [number for number in here if flags[number]]

    def _agree_on_order(self) -> None:
        """From now on, send buckets in the order in which rank 0's were full."""
        rest = [i for i in range(len(self._buckets)) if i not in self._finished]
        order = torch.tensor([*self._finished, *rest], device=self.params[0].device)
        self.workers.broadcast_from_first([order])
        self._order = order.tolist()

    # -- between passes ------------------------------------------------------------------------

    def reduce(self) -> None:
        """Average what has not been averaged, as at the end of a pass."""
        self.follow_trained()
        self._passes.forget()
        self._start_over()
        self._close()

    def complete(self, shards: Shards) -> None:
        """Before a step of theirs: a worker without data for it joins in with zeros."""
        unaveraged = self._unaveraged()
        if shards not in self._fresh and not unaveraged:
            self.reduce()
        if unaveraged:
            raise RuntimeError(
                "step() after a backward inside no_sync() (or after something was added to a "
                "gradient): this is this worker's alone and has not been averaged. Run the step's "
                "last backward outside no_sync(), or call reduce() on the ShardedDataParallel "
                "module, on every worker."
            )

    def stepped(self, *shards: Shards) -> None:
        """A step was made of these, or their gradients were cleared."""
        self._fresh.difference_update(shards)

    def _unaveraged(self) -> bool:
        return any(
            grad is not None and (not isinstance(grad, ShardedGradient) or grad.local is not None)
            for grad, places in zip((p.grad for p in self.params), self._places, strict=True)
            if places
        )


def _listening(listener: weakref.ref[Reducer], number: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        reducer = listener()
        if reducer is not None:
            reducer.arrived(number)

    return arrived


def _remove(hooks: list[Any]) -> None:
    for handle in hooks:
        handle.remove()
    hooks.clear()
