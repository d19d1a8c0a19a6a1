"""Give one process what the ranks were given, in a chosen arrangement.

Each rank keeps the batches of its loaders, by epoch, and under the name "" the tensors of samples
that went into the outermost modules and into the loss, by pass. A `Feed` reads those of all ranks.
Its `FeedPlan` says which of the ranks' batches make up each batch of the one process.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.tools.check._compare import Recording, read


@dataclass(frozen=True)
class FeedPlan:
    """How the ranks' batches become those of one process.

    joined: batch i of all ranks is one batch. split: batch i of rank 0, of rank 1, ...: the script
    itself makes as many passes as all ranks. apart: the same, and the step waits for the last.
    whole: each pass gets all samples of its step. natural: the process reads its own data.
    """

    how: str
    order: tuple[int, ...]  # of the ranks
    calls: bool = False  # tensors that go into modules are replaced, not loaders' batches
    only: tuple[int, int, int] | None = None  # a step sees one rank's pass
    rates: bool = False  # each step has the ranks' learning rates, and gains of a scaling rule

    @property
    def times(self) -> int:
        """Return how many batches of the process there are for one of a rank."""
        return len(self.order) if self.how in ("split", "apart") else 1

    def parts(
        self, number: int, bounds: list[tuple[int, int]], before: int | None = 0
    ) -> list[tuple[int, int]]:
        """Return the (rank, number of its batch) that make up a batch.

        Steps have bounds, in passes. `before` more batches than passes came before this one, which
        is in no pass if that is None.

        >>> FeedPlan("whole", (0, 1)).parts(1, [(0, 2)])
        [(0, 0), (1, 0), (0, 1), (1, 1)]
        """
        own = number // self.times
        at = -1 if before is None else own - before
        first, last = next((b for b in bounds if b[0] <= at < b[1]), (at, at + 1))
        if self.only is not None and bounds[self.only[0]] == (first, last):
            return [(self.only[1], own - at + first + self.only[2])]
        if self.times > 1:
            return [(self.order[number % self.times], own)]
        others = range(own - at + first, own - at + last) if self.how == "whole" else [own]
        return [(rank, other) for other in others for rank in self.order]


class Feed:
    """What one process is given instead of its own batches."""

    def __init__(self, plan: FeedPlan, folder: Path, ranks: Recording) -> None:
        self.plan = plan
        self.folder = folder
        self.ranks = ranks
        ends = accumulate((len(step.passes) for step in ranks.steps), initial=0)
        self.bounds = list(pairwise(ends))
        trains = {key: loader for key, loader in ranks.loaders.items() if loader.trains}
        self.loaders = {} if plan.how == "natural" else trains
        self.epochs = Counter[str]()  # of each loader
        self.seen = -1
        self.given = iter(())
        self.sizes = list[int]()
        self._sources: list[dict[str, list[list[Any]]]] = []

    def waits(self, step: int, passes: int) -> bool:
        """Whether batches go one after the other and this is not the last of the step."""
        apart = self.plan.how == "apart" and step < len(self.bounds)
        return apart and passes < self.bounds[step][1] * self.plan.times

    def length(self, key: str, found: int) -> int:
        """Return what len() of a loader says: that of one rank."""
        own = self.loaders[key].length if key in self.loaders else None
        return own * (self.plan.times if self.plan.how == "split" else 1) if own else found

    def iterate(self, key: str) -> Iterator[Any]:
        """Give one epoch."""
        number = self.epochs[key]
        times = self.plan.times
        sizes = list(map(len, self.loaders[key].epochs))
        self.epochs[key] += 1
        first = sum(sizes[:number])
        starts = self.loaders[key].starts[number : number + 2]
        # A batch that is read before the loop, to look at it, is in no pass.
        before = None if len(set(starts)) < len(starts) else first - starts[0]
        for batch in range(first * times, sum(sizes[: number + 1]) * times):
            yield self._batch(key, batch, before)

    def exchange(self, tensor: Tensor, number: int) -> Tensor:
        """Return what the ranks gave in place of this tensor, in a pass."""
        if number != self.seen:
            self.seen, self.given = number, iter(self._batch("", number))
        return next(self.given, tensor)

    def _batch(self, key: str, number: int, before: int | None = 0) -> Any:
        if not self._sources:  # read when the script has defined the classes of its batches
            self._sources = [read(self.folder / f"source{r}.pt") for r in sorted(self.plan.order)]
        parts = []
        for rank, other in self.plan.parts(number, self.bounds, before):
            batches = [batch for epoch in self._sources[rank][key] for batch in epoch]
            parts.append(batches[min(other, len(batches) - 1)])
        self.sizes = [size_of(part) for part in parts]
        return join(parts)

    def chunks(self, tensor: Tensor) -> list[Tensor]:
        """Divide a joined batch as the ranks had it."""
        total = sum(self.sizes)
        rows = len(tensor)
        fits = total and rows % total == 0
        return list(tensor.split([n * rows // total for n in self.sizes])) if fits else [tensor]


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested values, with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    parts = parts_of(value)
    if parts is None:
        return value
    return rebuilt(value, {key: map_tensors(part, change) for key, part in parts.items()})


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key or index."""
    if isinstance(value, MutableMapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def rebuilt(like: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(like, MutableMapping):
        new = copy.copy(like)
        new.update(parts)
        return new
    return type(like)(*parts.values()) if hasattr(like, "_fields") else type(like)(parts.values())


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def size_of(value: Any) -> int:
    """Return how many samples a batch has: the first dimension of its first tensor."""
    return next((len(t) for t in tensors_of(value) if t.dim()), 1)


def row_hashes(value: Any) -> list[str]:
    """Return one hash for each sample of a batch."""
    size = size_of(value)
    hashes = []
    rows = [t.detach().cpu() for t in tensors_of(value) if t.dim() and len(t) == size]
    for index in range(size if rows else 0):
        parts = [row[index].contiguous().reshape(-1).view(torch.uint8) for row in rows]
        hashes.append(digest(torch.cat(parts)))
    return hashes


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's values."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def join(values: list[Any], padding: int | None = None) -> Any:
    """Return one batch that has the samples of several, in order.

    >>> join([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3])}])
    {'x': tensor([1, 2, 3])}
    """
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        if padding is not None and first.dim() == 2:
            width = max(value.shape[1] for value in values)
            pad = torch.nn.functional.pad
            values = [pad(value, (0, width - value.shape[1]), value=padding) for value in values]
        return torch.cat(values)
    columns = [parts_of(value) for value in values]
    parts = columns[0]
    if parts is None:
        if any(value != first for value in values):
            raise ValueError(f"batches hold different values of the type {type(first).__name__}")
        return first
    if isinstance(first, list | tuple) and not any(tensors_of(value) for value in values):
        return type(first)(one for value in values for one in value)  # names, say: one per sample
    if any(other is None or other.keys() != parts.keys() for other in columns):
        raise ValueError("the ranks' batches have different parts")
    masked = "attention_mask" in parts
    joined = {}
    for key in parts:
        column = [other[key] for other in columns if other is not None]
        joined[key] = join(column, (-100 if key == "labels" else 0) if masked else None)
    return rebuilt(first, joined)
