"""Hand out the micro-batches of a step: from any loader, or from one whose micro-batches grow.

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

Order and position are those of `Cursor` (`data/_order.py`, `data/_ledger.py`): all ranks know them,
and take neighbouring parts of a step. So every sample comes once in an epoch, and a run that is
continued on other ranks begins after the last step's samples. At the end of an epoch a step has as
many whole units as are left.

With worker processes (`num_workers`) micro-batches are ordered ahead, so a new size comes a few
steps later: on all ranks at the same step.

**A trainer's own loader** (`StepPasses`). Lightning and the Hugging Face Trainer step whenever
`batches % passes == 0`, counted from the beginning of the epoch. If a 2 is replaced by a 3 after
the first step, the next step has batch 3 only, and the one after it 4 to 6.

`StepPasses(p, start=s)` answers that modulo for a step of p passes that begins after s batches. The
trainer then divides the losses and steps as it would with a plain number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict
from torch.utils.data import DataLoader, Dataset

from manyhands._arguments import whole
from manyhands._optimizers.state_parts import SavedState
from manyhands._optimizers.wrappers import params_of
from manyhands._ranks.ranks import RankGroup
from manyhands.data._ledger import Ledger
from manyhands.data._order import Order
from manyhands.data._rules import EpochOrder, check_dataset, check_state, describe_order
from manyhands.scaling._optimizer import ScaledOptimizer
from manyhands.scaling._payload import RankReport
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
        fitting = takewhile(lambda size: size * fewest_passes <= units, sizes(most_per_pass))
        return StepSize(fewest_passes, max(fitting))
    return StepSize(units // most_per_pass, most_per_pass)


def sizes(most_per_pass: int) -> list[int]:
    """Return the sizes that a micro-batch may have, in units: at most 2 log2(most) + 2.

    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = []
    size = 1
    while size < most_per_pass:
        found.append(size)
        if 2 < size + size // 2 < most_per_pass:
            found.append(size + size // 2)
        size *= 2
    return [*found, most_per_pass]


@dataclass(eq=False)
class MicroBatches(Generic[Batch]):
    """The micro-batches of one step: a sequence.

    A loop over it runs all but the last inside the model's `no_sync()`, if the model has one.
    """

    _batches: Sequence[Batch]
    _no_sync: Callable[[], AbstractContextManager[object]]
    _mean: WeightedMean | None

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return this micro-batch's part of the step's mean loss, over all that `count` counted.

        Call it once for each micro-batch, in their order, with the sum of its losses.
        """
        if self._mean is None:
            raise RuntimeError(
                "mean() needs the tokens of each micro-batch: ramp.over(loader, count=...). Or "
                "divide the mean loss by len(micro_batches)."
            )
        return self._mean(loss_sum)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches, all but the last inside the model's `no_sync()`."""
        *others, last = self._batches
        for batch in others:
            with self._no_sync():
                yield batch
        yield last


@dataclass
class Supply:
    """Hands out a loader's micro-batches by steps, so that all ranks take equally many."""

    _optimizer: ScaledOptimizer
    _steps: int = 0  # steps of the optimizer so far
    _ready: int = 0  # micro-batches that this rank has ready
    _left: int = 0  # micro-batches that every rank has left, by the last reports
    _handed_out: int = 0  # micro-batches handed out so far
    _reported_at: int = 0  # micro-batches handed out at the last report
    _loops: int = 0  # that have begun
    hands_out: bool = False  # whether a loop is under way

    def steps(
        self, loader: Iterable[Batch], passes: Callable[[], int], look_ahead: Callable[[], int]
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one step after another, until a rank's data has ended."""
        # `passes` says how many micro-batches the next step takes, `look_ahead` how many are kept
        # ready.
        self._loops += 1
        loop = self._loops
        batches = iter(loader)
        ready: deque[Batch] = deque()
        ready.extend(islice(batches, look_ahead()))
        self._left = self._fewest_ready(len(ready))
        steps = -1
        while True:
            if self._left == 0 and self._steps == steps:
                # The loop has left out its last step, which would have brought the reports.
                self._left = self._fewest_ready(len(ready))
            if self._left == 0:
                return
            count = min(passes(), self._left)
            steps = self._steps
            step = [ready.popleft() for _ in range(count)]
            ready.extend(islice(batches, max(0, look_ahead() - len(ready))))
            self._ready = len(ready)
            self._handed_out += count
            self._left -= count  # corrected by the reports in `step_ended`, if the step is taken
            self.hands_out = True
            try:
                yield step
            finally:
                self.hands_out = False
            if self._loops != loop:
                raise RuntimeError(
                    "another loop over this Ramp has begun since, and a Ramp counts the steps of "
                    "one loop at a time. End this loop before, and evaluate with the plain loader."
                )

    def report(self) -> int:
        """Return how many micro-batches this rank has ready, for the step under way."""
        self._reported_at = self._handed_out
        return self._ready

    def step_ended(self, reports: Sequence[RankReport]) -> None:
        """Update how many micro-batches every rank has left, from all ranks' reports."""
        self._steps += 1
        if reports:
            used_since = self._handed_out - self._reported_at
            self._left = int(min(report.batches for report in reports)) - used_since

    def _fewest_ready(self, ready: int) -> int:
        """Return how many micro-batches the rank with the fewest has ready.

        A collective of its own, for the moments at which no step carries the reports: the beginning
        of the data, and after a step that the loop has left out.
        """
        ranks: RankGroup = self._optimizer.gradient_ranks
        if ranks.size == 1:
            return ready
        device = params_of(self._optimizer.param_groups)[0].device
        return int(min(ranks.all_gather([float(ready)], device))[0])


class StepLoader(DataLoader[Any]):
    """Base class of `AdaptiveDataLoader`: whole steps, in the order of `Cursor`."""

    _is_accelerate_prepared = True  # `prepare` leaves it: each rank has its own samples already

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
        check_dataset(type(self).__name__, dataset)
        self._ranks = RankGroup.of(process_group)
        self._small_batch = whole("batch_size", batch_size, 1)
        self._samples = len(dataset)  # type: ignore[arg-type]
        self._order: EpochOrder = {
            "samples": self._samples,
            "shards": None,
            "seed": seed,
            "shuffle": bool(shuffle),
        }
        self._drop_last = bool(options.pop("drop_last", False))
        self._unit = math.ceil(batch_size / self._ranks.size)
        self._most_per_pass = self._units_within(max_local_batch_size)
        self._ledger = Ledger(self._samples)
        self._ordered: deque[StepSize] = deque()  # sizes of steps whose samples were ordered
        self.size = StepSize(1, 1)  # of the step that was handed out last
        super().__init__(dataset, batch_sampler=_Order(self), **options)

    def _units_within(self, local_batch_size: int | None) -> int:
        """Return how many units fit into one pass of at most this many samples on one rank."""
        if local_batch_size is None:
            return 1
        why = (
            "It is the most samples of one pass on one rank, whose part of the small batch is "
            f"{self._unit}. Or begin with a smaller batch_size and the learning rate that fits it."
        )
        return whole("max_local_batch_size", local_batch_size, self._unit, why) // self._unit

    @property
    def samples_per_unit(self) -> int:
        """Samples of a unit, on all ranks together."""
        return self._unit * self._ranks.size

    @property
    def scale_per_unit(self) -> float:
        """How many small batches a unit on every rank makes: 1, but for rounding."""
        return self.samples_per_unit / self._small_batch

    def size_of(self, units: int) -> StepSize:
        """Return how a step of this many units is divided into passes.

        A single rank compares its own passes to measure the noise, so it takes at least two.
        """
        fewest_passes = 2 if self._ranks.size == 1 else 1
        return step_size(units, self._most_per_pass, fewest_passes)

    def __len__(self) -> int:
        """Return how many micro-batches of the present size an epoch has."""
        return math.ceil(self._whole_units(self._samples) / self.size.per_pass)

    def _whole_units(self, samples: int) -> int:
        if self._drop_last:
            return samples // self.samples_per_unit
        return math.ceil(samples / self.samples_per_unit)

    # -- steps ---------------------------------------------------------------------------------

    def steps(self, plan: Callable[[], StepSize]) -> Iterator[list[Any]]:
        """Go through the data once, and yield each step's micro-batches; `size` is the step's size.

        `plan` is asked for a size whenever a step's samples are ordered.
        """
        yield from map(list, self._ordered_steps(plan))

    def _ordered_steps(self, plan: Callable[[], StepSize]) -> Iterator[Iterator[Any]]:
        """Yield each step as an iterator over its micro-batches."""
        self._plan: Callable[[], StepSize] = plan
        self._ordered.clear()
        batches = super().__iter__()
        while True:
            first = next(batches, None)
            if first is None:
                break
            self.size = self._ordered.popleft()
            taken = chain([first], islice(batches, self.size.passes - 1))
            # Committed as soon as it is handed out: a run that is saved in mid-step and continued
            # repeats none of its samples.
            samples = min(self.size.units * self.samples_per_unit, self._ledger.left)
            self._ledger = self._ledger.hand_out({0: samples}).commit({0: samples})
            yield taken
        self._ledger = self._ledger.next_epoch()

    def indices(self) -> Iterator[list[int]]:
        """Yield the samples of each micro-batch of this rank, for torch's loader, step by step."""
        rules = self._order
        ledger = self._ledger
        order = Order(rules["samples"], rules["seed"], ledger.epoch, rules["shuffle"])
        samples = order.indices(ledger.hand_out({0: ledger.left}).held_by(0))
        position = 0
        while True:
            units = self._whole_units(len(samples) - position)
            if not units:
                return
            size = self._plan()
            if size.units > units:
                size = step_size(units, size.per_pass)
            self._ordered.append(size)
            stop = position + size.units * self.samples_per_unit
            while stop > len(samples):
                # Samples from the beginning fill the last micro-batches.
                samples += order.indices(((0, min(stop - len(samples), self._samples)),))
            count = size.per_pass * self._unit
            for start in range(position + self._ranks.rank * count, stop, count * self._ranks.size):
                yield samples[start : start + count]
            position = stop

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the order, and the position in it, as `Cursor` does. Take it between two steps."""
        return {**describe_order(self._order), **self._ledger.saved()}

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue after the last step's samples, on any number of ranks.

        The rest of the data comes first, in the order that it had.
        """
        self._ledger = self._parse_position(state_dict)

    def _parse_position(self, state_dict: SavedState) -> Ledger:
        check_state(state_dict, self._order)
        return Ledger.of_saved(self._samples, state_dict)


@dataclass
class _Order:
    """The batch sampler that torch's loader asks for the indices of each micro-batch."""

    loader: StepLoader

    def __iter__(self) -> Iterator[list[int]]:
        return self.loader.indices()

    def __len__(self) -> int:
        return len(self.loader)


class StepPasses(int):
    """The number of passes of the step under way.

    >>> passes = StepPasses(3, start=2)
    >>> [batches % passes == 0 for batches in (2, 3, 4, 5)]
    [True, False, False, True]
    """

    start: int

    def __new__(cls, passes: int, *, start: int) -> StepPasses:
        made = super().__new__(cls, passes)
        made.start = start
        return made

    # Python asks the right operand first, if its class is derived from the left one's.
    def __rmod__(self, batches: int) -> int:
        return (batches - self.start) % int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Save a plain number: trainers save their settings."""
        return int, (int(self),)
