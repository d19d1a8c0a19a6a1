"""The micro-batches of one step, and the model's way to accumulate all but the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from manyhands.scaling._weighted_mean import WeightedMean

Batch = TypeVar("Batch")


class MicroBatches(Generic[Batch]):
    """The micro-batches of one step: a sequence.

    While it is iterated, all but the last are inside the model's `no_sync()`, if it has one.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        no_sync: Callable[[], AbstractContextManager[Any]],
        mean: WeightedMean | None,
    ) -> None:
        self._batches = batches
        self._no_sync = no_sync
        self._mean = mean

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return this micro-batch's part of the mean over all that `count` counted.

        Call it once for each micro-batch, in their order, with the sum of its losses.
        """
        if self._mean is None:
            raise RuntimeError(
                "mean() needs to know how many tokens each micro-batch has: write "
                "ramp.over(loader, count=lambda batch: ...), or divide the mean loss by "
                "len(micro_batches)."
            )
        return self._mean(loss_sum)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        *others, last = self._batches
        for batch in others:
            with self._no_sync():
                yield batch
        yield last


def fill(ready: deque[Batch], batches: Iterator[Batch], count: int) -> None:
    """Fetch micro-batches until `count` are ready, or the data has ended."""
    while len(ready) < count:
        try:
            ready.append(next(batches))
        except StopIteration:
            return


def no_sync_of(model: nn.Module | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a pass of this model accumulate, without averaging over the ranks."""
    if model is None:
        return nullcontext
    no_sync = getattr(model, "no_sync", None)
    if no_sync is not None:
        return no_sync
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of `fully_shard`
    if set_sync is None:
        raise TypeError(
            f"model={type(model).__name__} has no no_sync(). Give the module that averages the "
            "gradients (DistributedDataParallel, ShardedDataParallel, FullyShardedDataParallel), "
            "or leave model=... out if nothing averages them."
        )

    @contextmanager
    def without_sync() -> Iterator[None]:
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)

    return without_sync
