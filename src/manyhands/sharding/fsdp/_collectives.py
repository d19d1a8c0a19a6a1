"""Replace two collectives of `fully_shard` on gloo.

gloo's reduce_scatter moves twice the necessary bytes, and its collectives block. Here

    all_gather       a broadcast for each rank's slice, awaited when the parameters are needed
    reduce_scatter   each slice is sent directly to the owner (`RankGroup.reduce_scatter_slices`),
                     and awaited when the next wrap's gradients are ready or the pass is over

The engine expects a complete mean when the call returns. Usually the engine only makes views, so
the mean may arrive later. If the engine converts the mean, or adds it to existing gradients, the
call waits. NCCL uses the engine's collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._ranks.presence import explained
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.slices import (
    PendingReduceScatter,
    SharedMemoryReduceScatter,
    reduce_scatter,
)
from manyhands._tensors.backward import BackwardPasses, current_task
from manyhands._tensors.profiler import Range

IN_FLIGHT = 1  # wraps with gradients being sent while the next wrap's are computed


Pending: TypeAlias = PendingReduceScatter | SharedMemoryReduceScatter


@contextmanager
def _broken_explained() -> Iterator[None]:
    try:
        with explained():
            yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}\nIf the last output of a rank is gloo::EnforceNotMet, ranks have run "
            "different layers, or one rank has evaluated alone, and gloo has ended it. Run every "
            "forward of the model, and every wrap in it, on every rank."
        ) from error.__cause__ or error


class _Allocator:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocator):
    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> dist.Work:
        size = input_tensor.numel()
        # A range needs a positive step, so a wrap with empty slices gets a list.
        cuts = range(0, size * (self._ranks.size + 1), size) if size else [0, 0]
        return _Works(self._ranks.all_gather_slices(output_tensor, cuts))


class _Works(dist.Work):
    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: object = None) -> bool:
        with _broken_explained(), Range("manyhands::wait all_gather"):
            for work in self._works:
                work.wait()
        return True


class ReduceQueue:
    """The reduce_scatters in flight in a backward pass, for all wraps of a root.

    `begin` is called before a pass sends gradients, `end` after all have arrived.
    """

    def __init__(
        self, ranks: RankGroup, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self.ranks = ranks
        self.shards = ranks.shards
        self._begin = begin
        self._end = end
        self._in_flight: deque[tuple[Pending, Tensor, float]] = deque()
        # `early`: run before a scaling rule measures the mean.
        self._passes = BackwardPasses(self, early=True)

    def send(self, total: Tensor, grads: Tensor, divisor: float, *, wait: bool) -> None:
        """Start filling `total` with this rank's slice of the sum of `grads`, over `divisor`."""
        # The memory of `grads` is freed afterwards.
        cuts = range(0, grads.numel() + 1, total.numel()) if total.numel() else [0, 0]
        # The float32 mean of half-precision gradients is copied from a temporary tensor.
        into = total if total.dtype == grads.dtype else None
        pending = self.shards.reduce_scatter_slices(grads, cuts, into)
        self._in_flight.append((pending, total, divisor))
        if wait:
            self._complete_all()

    def memory(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for gradients, reused if possible: new memory costs page faults."""
        while len(self._in_flight) >= IN_FLIGHT:
            memory = self._complete_first()
            if memory.nbytes() == size * dtype.itemsize and memory.device == device:
                return torch.empty(0, dtype=dtype, device=device).set_(memory)
            memory.resize_(0)
        return torch.empty(size, dtype=dtype, device=device)

    def enter(self) -> None:
        task = current_task()
        if task != self._passes.task:
            self._passes.enter(task)

    def forget(self) -> None:
        """Discard a pass that raised an error, after waiting for the data."""
        if self._passes.open and current_task() == -1:
            self._passes.forget()
            self._complete_all()

    def begin_pass(self) -> None:
        self._begin()

    def end_pass(self) -> None:
        self._complete_all()
        self._end()

    def _complete_all(self) -> None:
        while self._in_flight:
            # The engine still references the tensor.
            self._complete_first().resize_(0)

    def _complete_first(self) -> torch.UntypedStorage:
        pending, total, divisor = self._in_flight.popleft()
        with _broken_explained():
            mean = pending.mean(divisor, total.dtype)
        if mean is not total:  # `mean` may have been computed in `total`
            total.copy_(mean)
        return pending.sent.untyped_storage()


class ReduceScatter(_Allocator):
    def __init__(self, queue: ReduceQueue, wrap: Any) -> None:
        self._queue = queue
        self._wrap = wrap
        self._to_send = 0  # elements of a send buffer that has no slice

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (elements,) = size
        # The engine allocates the send buffer, then its slice. Only the buffer is reused: the slice
        # becomes the gradient.
        if elements * self._queue.shards.size == self._to_send or not self._wrap.on_gloo:
            self._to_send = 0
            return super().allocate(size, dtype=dtype, device=device)
        self._to_send = elements
        return self._queue.memory(elements, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: object,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        self._queue.enter()
        ranks = self._queue.ranks
        shards = self._queue.shards
        before, after = self._wrap.divide
        is_default = (before, after) == (1, ranks.size)
        # For SUM (half precision), the engine divides before and after.
        is_mean = op == dist.ReduceOp.AVG
        # The engine takes the mean over the copies of a mesh.
        after /= ranks.size // shards.size
        if not is_mean and not is_default:
            # The user's divisors replace the world size, by which the engine also divides.
            after /= shards.size
        if before != 1:
            input_tensor.div_(before)
        if self._wrap.on_gloo:
            # The engine's division would read the mean immediately.
            wait = not self._wrap.overlap or not is_mean or self._used_at_once(output_tensor)
            if not is_mean and is_default:
                after = 1.0
            self._queue.send(output_tensor, input_tensor, after, wait=wait)
        elif is_default:
            reduce_scatter(output_tensor, input_tensor, op=op, group=shards.group)
        else:
            reduce_scatter(output_tensor, input_tensor, group=shards.group)
            output_tensor.div_(after)

    def _used_at_once(self, total: Tensor) -> bool:
        if self._queue.ranks.mesh is not None:
            return True  # the engine sums over the copies of a mesh
        for param in self._wrap.params:
            hooks = getattr(param, "_post_accumulate_grad_hooks", None)
            if param.dtype != total.dtype or param.grad is not None or hooks:
                return True
        return False
