"""The micro-batches of a pass over the data: all ranks take equally many, and end together.

Micro-batches are kept ready beyond the step under way. A rank whose data has ended reports how
many it has left before any rank needs more. The reports travel in the rule's own collective. A
loop may leave out a step, which then reports nothing: what was handed out since is counted here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from manyhands._core.ranks import RankGroup
from manyhands.scaling._optimizer import ScaledOptimizer
from manyhands.scaling._step_stats import RankReport

Batch = TypeVar("Batch")


class Supply:
    """How many micro-batches this rank has ready, and how many all ranks have."""

    def __init__(self, optimizer: ScaledOptimizer) -> None:
        self._optimizer = optimizer
        self._steps = 0  # of the optimizer
        self._ready = 0  # micro-batches on this rank
        self._left = 0  # how many all ranks had left when they last reported
        # Micro-batches that were handed out: now, at the last report, and at the report of the
        # step before.
        self._handed_out, self._reported_at, self._reported_before = 0, 0, 0

    def steps(
        self,
        loader: Iterable[Batch],
        passes: Callable[[], int],
        look_ahead: Callable[[], int],
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one step after another, until a rank's data has ended.

        `passes` says how many the next step shall have, `look_ahead` how many to keep ready.
        """
        batches = iter(loader)
        ready: deque[Batch] = deque()
        _fill(ready, batches, look_ahead())
        self._left = self._agree(len(ready))
        steps = -1
        while True:
            if self._left == 0 and self._steps == steps:
                # The loop has left out its last step, which would have reported what is left.
                self._left = self._agree(len(ready))
            if self._left == 0:
                return
            count, steps = min(passes(), self._left), self._steps
            step = [ready.popleft() for _ in range(count)]
            _fill(ready, batches, look_ahead())
            self._ready = len(ready)
            self._handed_out += count
            self._left -= count  # `step_ended` knows better, if the step is taken
            yield step

    def report(self) -> int:
        """Return how many micro-batches this rank has ready, for the step under way."""
        self._reported_at = self._handed_out
        return self._ready

    def step_ended(self, reports: Sequence[RankReport]) -> None:
        """Learn from all ranks' reports how many are left."""
        # With delayed statistics the reports are older than the step that has just ended.
        delayed = self._optimizer._delayed
        reported_at = self._reported_before if delayed else self._reported_at
        self._reported_before = self._reported_at
        self._steps += 1
        if reports:
            used_since = self._handed_out - reported_at
            self._left = int(min(report.batches for report in reports)) - used_since

    def _agree(self, ready: int) -> int:
        """Return how many micro-batches the rank with the fewest has: once in a pass over data."""
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
