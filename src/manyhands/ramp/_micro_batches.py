"""The micro-batches of a step: from any loop's loader, or from a loader whose micro-batches grow.

**Any loader** (`Supply`). A step takes as many micro-batches as it has passes, and more are kept
ready for the steps to come. All ranks take equally many, and end together: a rank whose data has
ended reports how many it has left before any rank needs more. The reports travel in the rule's own
collective.

**A loader whose micro-batches grow** (`StepLoader`). One *unit* is the part of the small batch that
one rank has: `batch_size` divided by the number of ranks. A step has the same number of units on
each rank. They come in as few passes as memory allows:

    units <= most        one pass, of a size from a short list (1, 2, 3, 4, 6, 8, 12, ...), so that
                         a compiled model sees few shapes
    units > most         passes of `most` units each

All ranks draw the same order of the samples, and take neighbouring parts of it. So every sample
comes once in a pass over the data, and a run that is continued on other ranks begins after the last
step's samples. At the end of the data a step has as many whole units as are left.

With worker processes (`num_workers`) micro-batches are ordered ahead, so a new size comes a few
steps later: on all ranks at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict
from torch.utils.data import DataLoader, Dataset, IterableDataset

from manyhands._core.ranks import RankGroup
from manyhands._core.state_parts import SavedState
from manyhands.scaling._optimizer import ScaledOptimizer
from manyhands.scaling._step_stats import RankReport
from manyhands.scaling._weighted_mean import WeightedMean

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class StepSize:
    """How large a step is on each rank: `passes` micro-batches of `per_pass` units."""

    passes: int
    per_pass: int

    @property
    def units(self) -> int:
        """All units of the step on one rank."""
        return self.passes * self.per_pass


def step_size(units: int, most_per_pass: int, fewest_passes: int = 1) -> StepSize:
    """Return the largest step of at most `units` whose micro-batches have one of `sizes`.

    >>> step_size(5, most_per_pass=16)
    StepSize(passes=1, per_pass=4)
    >>> step_size(5, most_per_pass=16, fewest_passes=2)
    StepSize(passes=2, per_pass=2)
    >>> step_size(40, most_per_pass=16)
    StepSize(passes=2, per_pass=16)
    """
    if units < fewest_passes:
        return StepSize(units, 1)
    if units < most_per_pass * fewest_passes:
        fitting = (size for size in sizes(most_per_pass) if size * fewest_passes <= units)
        return StepSize(fewest_passes, max(fitting))
    return StepSize(units // most_per_pass, most_per_pass)


def sizes(most_per_pass: int) -> list[int]:
    """Return the sizes that a micro-batch may have, in units: at most 2 log2(most) + 2.

    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    doublings = range(most_per_pass.bit_length())
    grid = {2**k for k in doublings} | {3 * 2**k for k in doublings} | {most_per_pass}
    return sorted(size for size in grid if size <= most_per_pass)


class MicroBatches(Generic[Batch]):
    """The micro-batches of one step: a sequence.

    A loop over it runs all but the last inside the model's `no_sync()`, if the model has one.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        no_sync: Callable[[], AbstractContextManager[object]],
        mean: WeightedMean | None,
    ) -> None:
        self._batches = batches
        self._no_sync = no_sync
        self._mean = mean

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return this micro-batch's part of the step's mean loss, over all that `count` counted.

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


class Supply:
    """Hands out a loader's micro-batches by steps, so that all ranks take equally many."""

    def __init__(self, optimizer: ScaledOptimizer) -> None:
        self._optimizer = optimizer
        self._steps = 0  # steps of the optimizer so far
        self._ready = 0  # micro-batches that this rank has ready
        self._left = 0  # micro-batches that every rank has left, by the last reports
        # Micro-batches handed out so far: now, at the last report, and at the report before it.
        self._handed_out, self._reported_at, self._reported_before = 0, 0, 0

    def steps(
        self,
        loader: Iterable[Batch],
        passes: Callable[[], int],
        look_ahead: Callable[[], int],
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one step after another, until a rank's data has ended.

        `passes` says how many micro-batches the next step takes, `look_ahead` how many are kept
        ready.
        """
        batches = iter(loader)
        ready: deque[Batch] = deque()
        _fill(ready, batches, look_ahead())
        self._left = self._agree(len(ready))
        steps = -1
        while True:
            if self._left == 0 and self._steps == steps:
                # The loop has left out its last step, which would have brought the reports.
                self._left = self._agree(len(ready))
            if self._left == 0:
                return
            count, steps = min(passes(), self._left), self._steps
            step = [ready.popleft() for _ in range(count)]
            _fill(ready, batches, look_ahead())
            self._ready = len(ready)
            self._handed_out += count
            self._left -= count  # corrected by the reports in `step_ended`, if the step is taken
            yield step

    def report(self) -> int:
        """Return how many micro-batches this rank has ready, for the step under way."""
        self._reported_at = self._handed_out
        return self._ready

    def step_ended(self, reports: Sequence[RankReport]) -> None:
        """Update how many micro-batches every rank has left, from all ranks' reports."""
        # With delayed statistics these are the reports of the step before.
        delayed = self._optimizer._delayed
        reported_at = self._reported_before if delayed else self._reported_at
        self._reported_before = self._reported_at
        self._steps += 1
        if reports:
            used_since = self._handed_out - reported_at
            self._left = int(min(report.batches for report in reports)) - used_since

    def _agree(self, ready: int) -> int:
        """Return how many micro-batches the rank with the fewest has ready.

        A collective of its own, for the moments at which no step carries the reports: the beginning
        of the data, and after a step that the loop has left out.
        """
        ranks: RankGroup = self._optimizer._ranks
        if ranks.size == 1:
            return ready
        param = next(p for group in self._optimizer.param_groups for p in group["params"])
        return int(min(number for (number,) in ranks.all_gather([float(ready)], param.device)))


def _fill(ready: deque[Batch], batches: Iterator[Batch], count: int) -> None:
    """Fetch micro-batches until `count` are ready, or the data has ended."""
    while len(ready) < count:
        try:
            ready.append(next(batches))
        except StopIteration:
            return


class StepLoader(DataLoader[Any]):
    """Base class of `AdaptiveDataLoader`: whole steps of micro-batches, of a planned size."""

    def __init__(
        self,
        dataset: Dataset[object],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        max_local_batch_size: int | None = None,
        seed: int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        _check_arguments(dataset, batch_size, options)
        self._ranks = RankGroup.of(process_group)
        self._small_batch = batch_size
        self._samples = len(dataset)  # type: ignore[arg-type]
        self._shuffle, self._seed = shuffle, seed
        self._drop_last = bool(options.pop("drop_last", False))
        self._unit = math.ceil(batch_size / self._ranks.size)
        self._most_per_pass = self._units_within(max_local_batch_size)
        self._turn = 0  # how often the data was gone through
        self._position = 0  # samples that all ranks together were given this time
        self._plan: Callable[[], StepSize] = lambda: StepSize(1, 1)
        self._ordered: deque[StepSize] = deque()  # sizes of steps whose samples were ordered
        self.size = StepSize(1, 1)  # of the step that was handed out last
        super().__init__(dataset, batch_sampler=_Order(self), **options)

    def _units_within(self, local_batch_size: int | None) -> int:
        """Return how many units fit into one pass of at most this many samples on one rank."""
        if local_batch_size is None:
            return 1
        if isinstance(local_batch_size, bool) or not isinstance(local_batch_size, int):
            raise ValueError(
                "the most samples in one pass on one rank must be a whole number, got "
                f"{local_batch_size!r}."
            )
        if local_batch_size < self._unit:
            raise ValueError(
                f"a rank's part of the small batch is {self._unit} samples, and at most "
                f"{local_batch_size} are allowed in one pass. Allow at least {self._unit}, or "
                "begin with a smaller batch_size and the learning rate that fits it."
            )
        return local_batch_size // self._unit

    @property
    def samples_per_unit(self) -> int:
        """Samples of a unit, on all ranks together."""
        return self._unit * self._ranks.size

    @property
    def local_batch_sizes(self) -> tuple[int, int]:
        """The smallest and the largest micro-batch on each rank, in samples."""
        return self._unit, self._unit * self._most_per_pass

    @property
    def scale_per_unit(self) -> float:
        """How many small batches a unit on every rank makes: 1, but for rounding."""
        return self.samples_per_unit / self._small_batch

    def size_of(self, units: int) -> StepSize:
        """Return how a step of this many units is divided into passes.

        A single rank compares its own passes to measure the noise, so it takes at least two.
        """
        return step_size(units, self._most_per_pass, 2 if self._ranks.size == 1 else 1)

    def __len__(self) -> int:
        """Return how many micro-batches of the present size a pass over the data has."""
        units = self._samples / self.samples_per_unit
        whole = math.floor(units) if self._drop_last else math.ceil(units)
        return math.ceil(whole / self.size.per_pass)

    # -- steps ---------------------------------------------------------------------------------

    def steps(self, plan: Callable[[], StepSize]) -> Iterator[list[Any]]:
        """Go through the data once, and yield each step's micro-batches; `size` is the step's size.

        `plan` is asked for a size whenever a step's samples are ordered.
        """
        for micro_batches in self._ordered_steps(plan):
            yield list(micro_batches)

    def _ordered_steps(self, plan: Callable[[], StepSize]) -> Iterator[Iterator[Any]]:
        """Yield each step as an iterator over its micro-batches."""
        self._plan = plan
        self._ordered.clear()
        batches = super().__iter__()
        while True:
            first = next(batches, None)
            if first is None:
                break
            self.size = self._ordered.popleft()
            taken = _first_and(first, batches, self.size.passes)
            # Counted as soon as it is handed out: a run that is saved in mid-step and continued
            # repeats none of its samples.
            self._position += self.size.units * self.samples_per_unit
            yield taken
        self._turn, self._position = self._turn + 1, 0

    def indices(self) -> Iterator[list[int]]:
        """Yield the samples of each of this rank's micro-batches, planning step by step."""
        order = self._order_of(self._turn)
        position = self._position
        while position < self._samples:
            left = (self._samples - position) / self.samples_per_unit
            units = math.floor(left) if self._drop_last else math.ceil(left)
            if units == 0:
                return
            size = self._plan()
            if size.units > units:
                size = step_size(units, size.per_pass)
            self._ordered.append(size)
            count = size.per_pass * self._unit
            for _ in range(size.passes):
                start = position + self._ranks.rank * count
                # Beyond the end, samples from the beginning fill the last micro-batches.
                yield [order[i % self._samples] for i in range(start, start + count)]
                position += count * self._ranks.size

    def _order_of(self, turn: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed + turn)
        return torch.randperm(self._samples, generator=generator).tolist()

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return how far the data was handed out. Take it between two steps."""
        return {"version": 1, "turn": self._turn, "position": self._position}

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue after the last step's samples, on any number of ranks.

        The rest of the data comes first, in the order that it had.
        """
        version = state_dict.get("version")
        if version != 1:
            raise ValueError(f"the state dict's version is {version!r}, this loader's is 1.")
        self._turn, self._position = int(state_dict["turn"]), int(state_dict["position"])


class _Order:
    """The batch sampler that torch's loader asks for the indices of each micro-batch."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()

    def __len__(self) -> int:
        return len(self._loader)


def _first_and(first: Batch, others: Iterator[Batch], count: int) -> Iterator[Batch]:
    yield first
    for _ in range(count - 1):
        yield next(others)


def _check_arguments(
    dataset: Dataset[object], batch_size: int, options: Mapping[str, object]
) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"AdaptiveDataLoader needs a dataset with a length, whose samples are found by index, "
            f"got {type(dataset).__name__}. For a stream, give Ramp.over() an ordinary DataLoader."
        )
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise ValueError(f"{name} must be None: AdaptiveDataLoader orders the samples itself.")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
