"""How torch's `fully_shard` is made to send: what one wrap's gathering and averaging call.

`fully_shard` lets its two collectives be replaced. gloo's reduce-scatter moves twice the bytes
that are needed, and gloo's collectives run while everything else waits. Here

    gathering     one broadcast for each worker's slice, awaited when the parameters are needed
    averaging     each worker's slice straight to it (`RankGroup.exchange`), awaited when the next
                  wrap's gradients are ready or the backward pass is over

The engine takes the mean to be there when the call returns, and then only makes views of it,
unless it has to convert it or to add it to gradients that are there already. Then the call waits.
With NCCL the engine's own collectives are used, on the streams that it has for them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._core.backward import BackwardPasses, current_task
from manyhands._core.ranks import RankGroup
from manyhands._core.shared_memory import SharedMemoryReduceScatter
from manyhands._core.slices import PendingReduceScatter

IN_FLIGHT = 1  # wraps' gradients under way while the next wrap's are computed


class _Allocate:
    """Where the engine puts what is sent and what comes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocate):
    """Fills a buffer with every worker's slice."""

    def __init__(self, workers: RankGroup) -> None:
        self._workers = workers

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work:
        size = input_tensor.numel()
        cuts = range(0, size * (self._workers.size + 1), size) if size else [0, 0]
        return _Works(self._workers.all_gather_slices(output_tensor, cuts))


class _Works(dist.Work):
    """Several to be awaited as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True


class ReduceQueue:
    """The gradients of one backward pass, over all wraps of a root.

    `begin` is called before the first gradients of a pass are sent, `end` when all have come.
    """

    def __init__(
        self, workers: RankGroup, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self.workers = workers
        self._end = end
        self._flying: deque[
            tuple[PendingReduceScatter | SharedMemoryReduceScatter, Tensor, float]
        ] = deque()
        me = weakref.proxy(self)
        # The engine has queued its own end before, and we come before whoever measures the mean.
        self._passes = BackwardPasses(begin, lambda: me._finish(), early=True)

    def send(self, total: Tensor, grads: Tensor, divisor: float, *, wait: bool) -> None:
        """Begin to fill `total` with our slice of the workers' summed `grads` / `divisor`.

        The memory of `grads` is let go afterwards.
        """
        cuts = range(0, grads.numel() + 1, total.numel()) if total.numel() else [0, 0]
        into = total if total.dtype == grads.dtype else None
        exchange = self.workers.reduce_scatter_slices(grads, cuts, into)
        self._flying.append((exchange, total, divisor))
        if wait:
            self._land_all()

    def memory(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where to lay out the next gradients: if it fits, where those were that have gone.

        (New memory costs a page fault for every 4 KiB.)
        """
        while len(self._flying) >= IN_FLIGHT:
            memory = self._land()
            if memory.nbytes() == size * dtype.itemsize and memory.device == device:
                return torch.empty(0, dtype=dtype, device=device).set_(memory)
            memory.resize_(0)
        return torch.empty(size, dtype=dtype, device=device)

    def enter(self) -> None:
        """Gradients are about to be sent."""
        task = current_task()
        if task != self._passes.task:
            self._passes.enter(task)

    def forget(self) -> None:
        """A pass that has raised an error will never end: wait for what is under way."""
        if self._passes.open and current_task() == -1:
            self._passes.forget()
            self._land_all()

    def _finish(self) -> None:
        self._land_all()
        self._end()

    def _land_all(self) -> None:
        while self._flying:
            self._land().resize_(0)  # the engine keeps the tensor for a while

    def _land(self) -> torch.UntypedStorage:
        """Have the first mean there; returns the memory of what was sent for it."""
        exchange, total, divisor = self._flying.popleft()
        mean = exchange.mean(divisor, total.dtype)
        if mean is not total:  # into which the first row may have come
            total.copy_(mean)
        return exchange.sent.untyped_storage()


class ReduceScatter(_Allocate):
    """Gives every worker the mean of its slice of all workers' gradients, for one wrap."""

    def __init__(
        self,
        averaging: ReduceQueue,
        params: Callable[[], Sequence[Tensor]],
        *,
        divide: Callable[[], tuple[float, float] | None],
        on_gloo: bool,
        overlap: bool,
    ) -> None:
        self._overlap = overlap
        self._sent = 0  # elements that are laid out
        self._averaging = averaging
        self._params = params
        self._divide = divide
        self._on_gloo = on_gloo

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Asked first for what is sent, then for our share of it."""
        (elements,) = size
        if elements * self._averaging.workers.size == self._sent or not self._on_gloo:
            self._sent = 0
            return super().allocate(size, dtype=dtype, device=device)
        self._sent = elements
        return self._averaging.memory(elements, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._averaging.enter()
        workers = self._averaging.workers
        meant = op == dist.ReduceOp.AVG  # else the engine divides, before and after
        divide = self._divide()
        before, after = divide or (1.0, float(workers.size))
        if divide is not None and not meant:
            after, meant = after / workers.size, True
        if before != 1:
            input_tensor.div_(before)
        if self._on_gloo:
            wait = not self._overlap or op != dist.ReduceOp.AVG or self._used_at_once(output_tensor)
            self._averaging.send(output_tensor, input_tensor, after if meant else 1.0, wait=wait)
        elif divide is None:
            workers.reduce_scatter(output_tensor, input_tensor, op)
        else:
            workers.reduce_scatter(output_tensor, input_tensor, dist.ReduceOp.SUM)
            output_tensor.div_(after)

    def _used_at_once(self, total: Tensor) -> bool:
        """Whether the engine converts the mean, adds it to something, or shows it to a hook."""
        return any(
            param.dtype != total.dtype
            or param.grad is not None
            or getattr(param, "_post_accumulate_grad_hooks", None)
            for param in self._params()
        )
