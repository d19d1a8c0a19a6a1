"""Supply a replay with the ranks' batches.

Each rank writes a file with the batches of each loader. For each backward pass, entry "" has the
inputs of outermost modules and the loss, and entry `NOISE` has random numbers from the script's
generators.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.tools.check._batches import join, size_of
from manyhands.tools.check._records import Recording, read

NOISE = " noise"  # no loader's name


@dataclass(frozen=True)
class FeedPlan:
    """The assignment of the ranks' batches to batches of a replay.

    joined: batch i of all ranks is a single batch.
    split: batch i of rank 0, then of rank 1, and so on, each with a pass.
    apart: like split, but the optimizer steps only after the last rank.
    whole: each pass receives all samples of the step.
    """

    how: str
    order: tuple[int, ...]  # of the ranks
    calls: bool = False  # replace the inputs of modules, not the batches of loaders
    only: tuple[int, int, int] | None = None  # step, with its only rank and pass
    rates: bool = False  # use the ranks' learning rates, and gains of a scaling rule

    @property
    def times(self) -> int:
        """Batches per batch of a rank."""
        return len(self.order) if self.how in ("split", "apart") else 1

    def parts(
        self, number: int, steps: list[tuple[int, int]], before: int | None = 0
    ) -> list[tuple[int, int]]:
        """Return the rank and the number of each batch in batch `number`.

        `steps` has the first pass of each step and of the next step. A rank's batch i belongs to
        pass i - `before`, or to no pass if `before` is None.

        >>> FeedPlan("whole", (0, 1)).parts(1, [(0, 2)])
        [(0, 0), (1, 0), (0, 1), (1, 1)]
        """
        own = number // self.times
        numbers = [own]
        if before is not None:
            for first, end in steps:
                if not first <= own - before < end:
                    continue
                if self.only is not None and steps[self.only[0]] == (first, end):
                    return [(self.only[1], first + before + self.only[2])]
                if self.how == "whole":
                    numbers = list(range(first + before, end + before))
        if self.times > 1:
            return [(self.order[number % self.times], own)]
        return [(rank, each) for each in numbers for rank in self.order]


class Feed:
    def __init__(self, plan: FeedPlan, folder: Path, ranks: Recording) -> None:
        self.plan = plan
        self.folder = folder
        self.ranks = ranks
        self.steps = ranks.pass_ranges()
        self.loaders = ranks.training_loaders()
        self.epochs = Counter[str]()  # iterations, by loader
        self.sizes = list[int]()  # of the parts of the latest batch
        self.seen_pass = -1
        self.inputs: Iterator[Tensor] = iter(())  # remaining tensors of this pass
        self.noise_pass = -1
        self.draw = 0  # next draw in that pass
        self.sources = list[dict[str, list[Any]]]()  # the file of each rank

    def waits(self, step: int, passes: int) -> bool:
        if self.plan.how != "apart" or step >= len(self.steps):
            return False
        return passes < self.steps[step][1] * self.plan.times

    def length(self, key: str, own: int) -> int:
        """Return the length of a rank's loader, for schedules."""
        length = self.loaders[key].length if key in self.loaders else None
        if not length:
            return own
        return length * self.plan.times if self.plan.how == "split" else length

    def replaces(self, key: str) -> bool:
        return key in self.loaders and not self.plan.calls

    def epoch(self, key: str) -> Iterator[Any]:
        loader = self.loaders[key]
        number = self.epochs[key]
        self.epochs[key] += 1
        first = sum(map(len, loader.epochs[:number]))
        end = first + len(loader.epochs[number])
        before: int | None = first - loader.starts[number]
        if loader.starts[number] in loader.starts[number + 1 : number + 2]:
            before = None  # the script inspected a batch before the loop
        for batch in range(first * self.plan.times, end * self.plan.times):
            yield self._batch(key, batch, before)

    def exchange(self, tensor: Tensor, number: int) -> Tensor:
        if number != self.seen_pass:
            self.seen_pass = number
            self.inputs = iter(self._batch("", number, 0))
        return next(self.inputs, tensor)

    def noise(self, drawn: Tensor, number: int) -> Tensor:
        if number != self.noise_pass:
            self.noise_pass = number
            self.draw = 0
        parts = []
        for rank, index in self.plan.parts(number, self.steps, 0):
            passes = self._source(rank)[NOISE]
            if index >= len(passes) or self.draw >= len(passes[index]):
                return drawn
            parts.append(passes[index][self.draw])
        self.draw += 1
        if drawn.dim() and len(drawn) == sum(map(len, parts)):
            return torch.cat(parts)
        return parts[0] if parts[0].shape == drawn.shape else drawn

    def _source(self, rank: int) -> dict[str, list[Any]]:
        """Return the file of a rank. The script must have defined the classes of batches."""
        while len(self.sources) <= rank:
            self.sources.append(read(self.folder / f"source{len(self.sources)}.pt"))
        return self.sources[rank]

    def _batch(self, key: str, number: int, before: int | None) -> Any:
        parts = []
        for rank, index in self.plan.parts(number, self.steps, before):
            batches = self._source(rank)[key]
            parts.append(batches[min(index, len(batches) - 1)])
        self.sizes = list(map(size_of, parts))
        return join(parts)

    def divide(self, tensor: Tensor) -> list[Tensor]:
        """Divide a joined batch into the ranks' parts."""
        total = sum(self.sizes)
        rows = len(tensor)
        if not total or rows % total:
            return [tensor]
        return list(tensor.split([size * rows // total for size in self.sizes]))
