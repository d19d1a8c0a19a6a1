"""What the time of a step goes into, by a few looks at the clock.

    loading   waiting for the next batch, if the batches are taken through `loading`
    compute   from the last line (or the last step) to the end of the step's last backward pass
    sync      from there to the optimizer's step: DDP waits for gradients, a rule for its numbers
    update    the optimizer's step itself

All are seconds of this rank, since the last look. What is left of a line's time is something else:
an evaluation, a checkpoint, a sync round of blocks.

There are four looks at the clock in a step, one hook on one parameter, and two on the optimizer.
On a GPU the host runs ahead, and its clock shows where it waits for the GPU.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from manyhands._core.backward import BackwardPasses, current_task

T = TypeVar("T")

KINDS = ("loading", "compute", "sync", "update")


class StepTiming:
    """Measure what the time of a step goes into: a source for `Record`.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> times = mh.StepTiming(optimizer)
    >>> batches = [torch.ones(8, 4)] * 3
    >>> with mh.Record("runs/times.jsonl", times) as record:
    ...     for batch in times.loading(batches):
    ...         model(batch).mean().backward()
    ...         optimizer.step()
    ...         record.step()
    >>> list(times.snapshot())
    ['loading_seconds', 'compute_seconds', 'sync_seconds', 'update_seconds']

    `loading` is the wait for the next batch, `compute` forward and backward passes, `sync` the wait
    for other ranks before the step, `update` the optimizer's step. Each is the seconds of this rank
    since the last line. Nothing is sent, and no tensor is read.

    Surprises. On a GPU these are the host's seconds: it runs ahead of the GPU, and the time of the
    GPU's work shows where the host waits for it, mostly in `sync`. What DDP sends while the
    backward pass still computes costs nothing, and is not in `sync`. With
    `FullyShardedDataParallel` all sending is inside the passes: `sync` is part of `compute`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        trained = [param for param in params if param.requires_grad]
        if not trained:
            raise ValueError(
                "the optimizer has no parameter that requires a gradient, so there is no backward "
                "pass to time. Make StepTiming from the optimizer that trains the model."
            )
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._mark = time.perf_counter()  # the end of the last step, or the last look
        self._pass_ended: float | None = None
        self._step_began = 0.0
        this = weakref.ref(self)  # hooks must not keep it alive

        def ended() -> None:
            if (times := this()) is not None:
                times._pass_ended = time.perf_counter()

        def began(*_: object) -> None:
            if (times := this()) is not None:
                times._begin_step()

        def stepped(*_: object) -> None:
            if (times := this()) is not None:
                times._end_step()

        # The last parameter's gradient is the first one in most backward passes. The callback that
        # is queued then runs before DDP's own, which waits for the other ranks.
        passes = BackwardPasses(lambda: None, ended, early=True)
        node = get_gradient_edge(trained[-1]).node

        def enter(_: tuple[Tensor, ...]) -> None:
            passes.enter(current_task())

        handles = [
            node.register_prehook(enter),
            optimizer.register_step_pre_hook(began),
            optimizer.register_step_post_hook(stepped),
        ]
        self._node = node  # torch may drop a node that nobody holds, and its hooks with it

        def remove() -> None:
            for handle in handles:
                handle.remove()

        weakref.finalize(self, remove)

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and count the time of waiting for each as `loading`."""
        iterator = iter(batches)
        while True:
            begin = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._seconds["loading"] += time.perf_counter() - begin
                self._mark += time.perf_counter() - begin  # it is not `compute` as well
            yield batch

    def snapshot(self) -> dict[str, float]:
        """Return the seconds of each kind since the last call, for `Record`."""
        seconds = {f"{kind}_seconds": round(self._seconds[kind], 6) for kind in KINDS}
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._mark, self._pass_ended = time.perf_counter(), None
        return seconds

    def _begin_step(self) -> None:
        now = time.perf_counter()
        computed = now if self._pass_ended is None else self._pass_ended
        self._seconds["compute"] += max(0.0, computed - self._mark)
        self._seconds["sync"] += now - max(computed, self._mark)
        self._step_began = now

    def _end_step(self) -> None:
        self._mark, self._pass_ended = time.perf_counter(), None
        self._seconds["update"] += self._mark - self._step_began
