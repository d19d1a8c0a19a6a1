"""Divide a worker's samples into steps, ranks and passes, as torch's loader asks for them.

    positions that the worker holds        `_account.py`
      cut into steps of `batch` positions
      each step divided among ranks, and a rank's part into passes     `divide_step`
      turned into samples                                              `_order.py`

A step of n samples is divided among W ranks, with at most m samples in a pass:

    rank r has the samples from  n r / W  to  n (r + 1) / W  (rounded down)
    all ranks take  k = ceil(ceil(n / W) / m)  passes, and cut their part into k in the same way

So parts differ by one sample at most. If there are fewer samples than ranks or passes, some passes
have none. Their rank gets one of the step's samples as a *filler*, because its model has to take
part in the step, and the filler's loss has weight zero.

torch's loader asks for many passes ahead of the loop. So the plan keeps the passes that are *on
their way*: the loader has asked for them, and the loop does not have them yet. In blocks a worker
may hold other positions after a sync round. If it still holds those of the passes on their way,
planning goes on after these. If not, the plan starts again, and what was loaded is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from manyhands._ranks.ranks import RankGroup
from manyhands.data._account import Account
from manyhands.data._ledger import Spans, count, take, union
from manyhands.data._order import DataShards, Order, ShardOrder, positions_in
from manyhands.data._rules import Rules

MAPPED = 4096  # the fewest positions that are turned into samples together, except the last


@dataclass(frozen=True)
class Pass:
    """One micro-batch of one rank, and the step that it belongs to."""

    samples: int  # 0: a filler
    index: int  # among the passes of its step
    counts: tuple[int, ...]  # samples of each of this rank's passes in the step
    step_samples: int  # on all ranks, in all passes
    not_empty: int  # passes that have samples, on all ranks
    ranks: int

    @property
    def last(self) -> bool:
        """Whether it is the last pass of its step."""
        return self.index == len(self.counts) - 1

    @property
    def uneven(self) -> bool:
        """Whether the step's mean is not the mean of its passes' means."""
        return self.step_samples != self.samples * len(self.counts) * self.ranks


def divide_step(
    step: Spans, rank: int, ranks: int, most: int | None, *, in_turns: bool = False
) -> list[tuple[Pass, Spans]]:
    """Return this rank's passes, and the positions of each.

    `in_turns`: the ranks take turns at the samples, instead of one range each.

    >>> [(each.samples, spans) for each, spans in divide_step(((0, 10),), 1, 2, most=3)]
    [(2, ((5, 7),)), (3, ((7, 10),))]
    """
    n = count(step)
    start = n * rank // ranks
    stop = n * (rank + 1) // ranks
    if in_turns:
        positions = positions_in(step)[rank::ranks]
        rest: Spans = tuple((position, position + 1) for position in positions)
        start = 0
        stop = len(rest)
    else:
        rest = take(step, start)[1] if start else step
    divided = []
    for each in _passes_of_rank(n, stop - start, ranks, most):
        spans, rest = take(rest, each.samples)
        divided.append((each, spans))
    return divided


@lru_cache(maxsize=64)  # nearly all steps are equally large
def _passes_of_rank(n: int, own: int, ranks: int, most: int | None) -> list[Pass]:
    """Return the passes of a rank that has `own` of a step's n samples."""
    passes = number_of_passes(n, ranks, most)
    counts = tuple(b - a for a, b in pairwise(own * i // passes for i in range(passes + 1)))
    sizes = (n // ranks + (r < n % ranks) for r in range(ranks))
    not_empty = sum(min(passes, size) for size in sizes)
    return [Pass(each, i, counts, n, not_empty, ranks) for i, each in enumerate(counts)]


def number_of_passes(samples: int, ranks: int, most: int | None) -> int:
    """Return the number of passes of each rank in a step of this size."""
    largest = -(-samples // ranks)
    return 1 if most is None else max(1, -(-largest // most))


class LoaderPlan:
    """The samples of each pass of this rank: the `batch_sampler` of torch's loader.

    `number` is this worker's number in the account. `ranks` share each step, and `most` is the
    largest number of samples that a rank takes in one pass.
    """

    def __init__(
        self,
        rules: Rules,
        account: Account,
        number: int,
        ranks: RankGroup,
        most: int | None,
        shards: DataShards[Any, Any] | None,
    ) -> None:
        self._rules = rules
        self._account = account
        self._number = number
        self._ranks = ranks
        self._most = most
        self._shards = shards
        self._seen = -1  # the account's `changes` that the plan follows from
        self._epoch = -1
        self._rest: Spans = ()  # positions that this worker holds and has not planned
        self.steps_left: int | None = None  # left to plan; None: as many as the positions fill
        # On their way: this rank's passes, and the positions of the steps that they belong to.
        self._passes: deque[Pass] = deque()
        self._steps_ahead: deque[Spans] = deque()

    # -- what the loop asks --------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of passes of each rank in an epoch with one worker."""
        batch = self._rules["batch"]
        whole, rest = divmod(self._rules["samples"], batch)
        passes = whole * number_of_passes(batch, self._ranks.size, self._most)
        if rest and not self._rules["drop_last"]:
            passes += number_of_passes(rest, self._ranks.size, self._most)
        return passes

    def next_pass(self) -> Pass:
        """Return the pass that the loop gets now; it is no longer on its way."""
        now = self._passes.popleft()
        if now.last:
            self._steps_ahead.popleft()
        return now

    @property
    def has_more(self) -> bool:
        """Whether steps are left to plan. More may have been handed out since the loader ended."""
        if self.steps_left is None:
            return count(self._rest) >= self._rules["batch"]
        return self.steps_left > 0

    # -- changes of the account ----------------------------------------------------------------

    def begin(self) -> None:
        """Forget what is on its way: another loop begins, or this one has ended."""
        self._passes.clear()
        self._steps_ahead.clear()
        self._seen = -1

    def keep(self) -> None:
        """Keep the plan: in the account's last change, only what the loop took was committed."""
        self._seen = self._account.changes

    def has_changed(self) -> bool:
        """Follow the account; return whether the plan had to start again."""
        # What the loader has loaded is then for other workers.
        account = self._account
        if account.changes == self._seen:
            return False
        self._seen = account.changes
        epoch = account.ledger.epoch
        same_epoch = self._epoch == epoch
        self._epoch = epoch
        spans, self.steps_left = account.to_plan(self._number)
        ahead = union(chain.from_iterable(self._steps_ahead))
        still_held, rest = take(spans, count(ahead))
        fits = same_epoch and union(still_held) == ahead
        if self.steps_left is not None:
            fits = fits and self.steps_left >= len(self._steps_ahead)
        if fits:
            self._rest = rest
            if self.steps_left is not None:
                self.steps_left -= len(self._steps_ahead)
            return False
        self._rest = spans
        self._passes.clear()
        self._steps_ahead.clear()
        return True

    # -- what torch's loader asks --------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of each of this rank's passes."""
        order = self._order_of_epoch()
        while planned := self._plan_steps():
            spans: list[tuple[int, int]] = []
            for each, own in planned:
                self._passes.append(each)
                spans += own
            # All at once: a permutation of many positions costs little more than one of a few.
            samples = order.indices(tuple(spans))
            start = 0
            for each, _ in planned:
                stop = start + max(1, each.samples)  # a filler has one sample
                yield samples[start:stop]
                start = stop

    def _order_of_epoch(self) -> Order | ShardOrder:
        """Return the order of the epoch's samples: their own, or along data shards."""
        rules = self._rules
        which = (rules["seed"], self._account.ledger.epoch, rules["shuffle"])
        if self._shards is not None:
            return self._shards.order(*which)
        return Order(rules["samples"], *which)

    def _plan_steps(self) -> list[tuple[Pass, Spans]]:
        """Return the passes of the next steps, and the positions of each; none at the end."""
        planned: list[tuple[Pass, Spans]] = []
        positions = 0
        while positions < MAPPED and self.has_more:
            if self.steps_left is not None:
                self.steps_left -= 1
            step, self._rest = take(self._rest, self._rules["batch"])
            self._steps_ahead.append(step)
            # A rank without samples in a pass gets the step's first one; of an empty step, any.
            first = step[0][0] if step else 0
            filler = ((first, first + 1),)
            passes = divide_step(
                step,
                self._ranks.rank,
                self._ranks.size,
                self._most,
                in_turns=self._shards is not None,
            )
            for each, spans in passes:
                planned.append((each, spans or filler))
                positions += max(1, each.samples)
        return planned
