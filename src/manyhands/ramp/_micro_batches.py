"""Hand out the micro-batches of each step, from any loader or with growing micro-batches.

**Any loader** (`Supply`). All ranks take equal numbers of micro-batches and end together: each rank
has micro-batches ready for the following steps, and reports the number in the rule's collective.

**A loader with growing micro-batches** (`StepLoader`). A *unit* is a rank's part of the small
batch: `batch_size` divided by the number of ranks. A step has equal units on all ranks, in as few
passes as memory allows:

    units <= most        a single pass, of a size from a short list (1, 2, 3, 4, 6, 8, 12, ...), so
                         that a compiled model sees few shapes
    units > most         passes of `most` units each

Order and position follow `Cursor` (`data/_order.py`, `data/_ledger.py`). Every sample occurs once
per epoch, and a run that resumes on a different number of ranks continues after the last step's
samples. The last step of an epoch has the remaining complete units.

With worker processes (`num_workers`), a new size takes effect a few steps later, because
micro-batches are ordered in advance.

**A trainer's loader** (`StepPasses`). Lightning and the Hugging Face Trainer step whenever `batches
% passes == 0`, counted from the start of the epoch. A change from 2 to 3 passes after the first
step would end the next step after a single batch. `StepPasses(p, start=s)` gives the right modulo
for a step of p passes after s batches.
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
    """The size of a step on each rank: `passes` micro-batches of `per_pass` units."""

    passes: int
    per_pass: int

    @property
    def units(self) -> int:
        return self.passes * self.per_pass


def step_size(units: int, most_per_pass: int, fewest_passes: int = 1) -> StepSize:
    """Return the largest step of up to `units` with a micro-batch size from `sizes`.

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
    """Return the allowed sizes of a micro-batch, in units: up to 2 log2(most) + 2 sizes.

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
    """The micro-batches of a step, as a sequence.

    Iteration enters the model's `no_sync()`, if present, for all micro-batches except the last.
    """

    _batches: Sequence[Batch]
    _no_sync: Callable[[], AbstractContextManager[object]]
    _mean: WeightedMean | None

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return this micro-batch's part of the step's mean loss per token, as counted by `count`.

        Call it once for each micro-batch, in order, with the sum of the losses.
        """
        if self._mean is None:
            raise RuntimeError(
                "mean() needs the number of tokens in each micro-batch: pass count= to ramp.over, "
                "or divide the mean loss by len(micro_batches)."
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


@dataclass
class Supply:
    """Hands out a loader's micro-batches by steps, with equal numbers on all ranks."""

    _optimizer: ScaledOptimizer
    ready: int = 0  # micro-batches that are ready on this rank
    _left: int = 0  # remaining micro-batches on every rank, by the last reports
    _reported: bool = False  # whether ranks have reported since the last step was handed out
    _loops: int = 0  # loops started
    hands_out: bool = False  # whether a loop is in progress

    def steps(
        self, loader: Iterable[Batch], passes: Callable[[], int], look_ahead: Callable[[], int]
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, until any rank's data has ended.

        `look_ahead` returns the number of micro-batches to prepare.
        """
        self._loops += 1
        loop = self._loops
        batches = iter(loader)
        ready: deque[Batch] = deque()
        ready.extend(islice(batches, look_ahead()))
        self._left = self._fewest_ready(len(ready))
        self._reported = True
        while True:
            if self._left == 0 and not self._reported:
                # The loop has skipped the optimizer step that carries the reports.
                self._left = self._fewest_ready(len(ready))
            if self._left == 0:
                return
            count = min(passes(), self._left)
            step = [ready.popleft() for _ in range(count)]
            ready.extend(islice(batches, max(0, look_ahead() - len(ready))))
            self.ready = len(ready)
            self._left -= count  # `step_ended` corrects this after an optimizer step
            self._reported = False
            self.hands_out = True
            try:
                yield step
            finally:
                self.hands_out = False
            if self._loops != loop:
                raise RuntimeError(
                    "another loop over this Ramp has started, but a Ramp counts the steps of a "
                    "single loop. End each loop before the next. Evaluate with the plain loader."
                )

    def step_ended(self, reports: Sequence[RankReport]) -> None:
        """Update the remaining micro-batches from all ranks' reports."""
        self._reported = True
        if reports:
            self._left = int(min(report.batches for report in reports))

    def _fewest_ready(self, ready: int) -> int:
        """Return the minimum over all ranks, by a separate collective."""
        ranks: RankGroup = self._optimizer.gradient_ranks
        if ranks.size == 1:
            return ready
        device = params_of(self._optimizer.param_groups)[0].device
        return int(min(ranks.all_gather([float(ready)], device))[0])


class StepLoader(DataLoader[Any]):
    """Base class of `AdaptiveDataLoader`: complete steps, in the order of `Cursor`."""

    _is_accelerate_prepared = True  # `prepare` skips this loader: ranks already have their samples

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
        self._ordered: deque[StepSize] = deque()  # sizes of steps with ordered samples
        self.size = StepSize(1, 1)  # of the last step handed out
        super().__init__(dataset, batch_sampler=_Order(self), **options)

    def _units_within(self, local_batch_size: int | None) -> int:
        if local_batch_size is None:
            return 1
        why = (
            "It is the largest number of samples in a pass on a rank, and each rank has "
            f"{self._unit} of the small batch. Or start with a smaller batch_size and a learning "
            "rate tuned for it."
        )
        return whole("max_local_batch_size", local_batch_size, self._unit, why) // self._unit

    @property
    def samples_per_unit(self) -> int:
        """Samples of a unit, on all ranks together."""
        return self._unit * self._ranks.size

    @property
    def scale_per_unit(self) -> float:
        """Small batches in a unit on every rank: 1, except for rounding."""
        return self.samples_per_unit / self._small_batch

    def size_of(self, units: int) -> StepSize:
        """Return the division of a step with this number of units into passes.

        A single rank compares its passes to measure the noise, so it takes at least two.
        """
        fewest_passes = 2 if self._ranks.size == 1 else 1
        return step_size(units, self._most_per_pass, fewest_passes)

    def __len__(self) -> int:
        """Return the number of micro-batches of the current size in an epoch."""
        return math.ceil(self._whole_units(self._samples) / self.size.per_pass)

    def _whole_units(self, samples: int) -> int:
        if self._drop_last:
            return samples // self.samples_per_unit
        return math.ceil(samples / self.samples_per_unit)

    # -- steps ---------------------------------------------------------------------------------

    def steps(self, plan: Callable[[], StepSize]) -> Iterator[list[Any]]:
        """Yield each step's micro-batches; `plan` returns the size of a step in advance."""
        yield from map(list, self._ordered_steps(plan))

    def _ordered_steps(self, plan: Callable[[], StepSize]) -> Iterator[Iterator[Any]]:
        self._plan: Callable[[], StepSize] = plan
        self._ordered.clear()
        batches = super().__iter__()
        while True:
            first = next(batches, None)
            if first is None:
                break
            self.size = self._ordered.popleft()
            taken = chain([first], islice(batches, self.size.passes - 1))
            # Committed before training, so that a run resumed in mid-step repeats no samples.
            samples = min(self.size.units * self.samples_per_unit, self._ledger.left)
            self._ledger = self._ledger.hand_out({0: samples}).commit({0: samples})
            yield taken
        self._ledger = self._ledger.next_epoch()

    def indices(self) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch of this rank, for torch's loader."""
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
                # Samples from the start of the epoch fill the last micro-batches.
                samples += order.indices(((0, min(stop - len(samples), self._samples)),))
            count = size.per_pass * self._unit
            for start in range(position + self._ranks.rank * count, stop, count * self._ranks.size):
                yield samples[start : start + count]
            position = stop

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return order and position, in the format of `Cursor`. Call it between two steps."""
        return {**describe_order(self._order), **self._ledger.saved()}

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue after the last step's samples, on any number of ranks.

        The remaining data is used first, in the original order.
        """
        self._ledger = self._parse_position(state_dict)

    def _parse_position(self, state_dict: SavedState) -> Ledger:
        check_state(state_dict, self._order)
        return Ledger.of_saved(self._samples, state_dict)


@dataclass
class _Order:
    """The batch sampler of torch's loader."""

    loader: StepLoader

    def __iter__(self) -> Iterator[list[int]]:
        return self.loader.indices()

    def __len__(self) -> int:
        return len(self.loader)


class StepPasses(int):
    """The number of passes of the current step.

    >>> passes = StepPasses(3, start=2)
    >>> [batches % passes == 0 for batches in (2, 3, 4, 5)]
    [True, False, False, True]
    """

    start: int

    def __new__(cls, passes: int, *, start: int) -> StepPasses:
        made = super().__new__(cls, passes)
        made.start = start
        return made

    # Python tries the right operand first if its class derives from the left operand's.
    def __rmod__(self, batches: int) -> int:
        return (batches - self.start) % int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        # Trainers save this in their settings.
        return int, (int(self),)
