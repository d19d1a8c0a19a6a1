"""Divide a worker's samples into steps, ranks and passes, for torch's loader.

    positions of the worker                `_account.py`
      divided into steps of `batch` positions
      each step divided among ranks, each part into passes             `divide_step`
      mapped to samples                                                `_order.py`

A step of n samples is divided among W ranks, with up to m samples in a pass:

    rank r has the samples from  n r / W  to  n (r + 1) / W  (rounded down)
    all ranks take  k = ceil(ceil(n / W) / m)  passes, and divide their part into k in the same way

If the number of ranks changes during a run (`mh.start(survive=True)`), a step with a given m keeps
its micro-batches: it is divided into P *parts* for the P ranks of the full run, and rank r of W has
the parts r, r + W, r + 2 W, ...

If there are fewer samples than ranks or passes, some passes are empty. For these, the rank receives
a sample of the step as a *filler* with weight zero, because the model must take part in the step.

Passes that torch's loader has requested and the loop has not received are *on their way*. In
blocks, a sync round may change the positions of a worker. If the worker still has the positions on
their way, planning continues after these positions. If not, the plan restarts, and loaded batches
are discarded.
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

MAPPED = 4096  # minimum number of positions per mapping, except for the last


@dataclass(frozen=True)
class Pass:
    """A micro-batch of a rank, with facts about its step."""

    samples: int  # 0: a filler
    index: int  # within the step
    counts: tuple[int, ...]  # samples per pass of this rank
    step_samples: int  # on all ranks, in all passes
    not_empty: int  # non-empty passes on all ranks
    ranks: int

    @property
    def last(self) -> bool:
        return self.index == len(self.counts) - 1

    @property
    def uneven(self) -> bool:
        """Whether the step's mean differs from the mean of the passes' means."""
        return self.step_samples != self.samples * len(self.counts) * self.ranks


def divide_step(
    step: Spans,
    rank: int,
    ranks: int,
    most: int | None,
    *,
    parts: int | None = None,
    in_turns: bool = False,
) -> list[tuple[Pass, Spans]]:
    """Return this rank's passes, each with its positions.

    With `in_turns`, ranks take turns at the samples instead of having ranges. `parts` is the number
    of ranks of the full run.

    >>> [(each.samples, spans) for each, spans in divide_step(((0, 10),), 1, 2, most=3)]
    [(2, ((5, 7),)), (3, ((7, 10),))]
    """
    parts = parts or ranks
    own: list[Spans] = []
    for turn in range(turns(parts, ranks)):
        own.append(_part_of(step, rank + turn * ranks, parts, in_turns))
    sizes = tuple(map(count, own))
    divided = []
    rest: Spans = tuple(chain.from_iterable(own))
    for each in _passes_of_rank(count(step), sizes, ranks, parts, most):
        spans, rest = take(rest, each.samples)
        divided.append((each, spans))
    return divided


def _part_of(step: Spans, part: int, parts: int, in_turns: bool) -> Spans:
    if part >= parts:
        return ()
    if in_turns:
        return tuple((position, position + 1) for position in positions_in(step)[part::parts])
    n = count(step)
    start = n * part // parts
    stop = n * (part + 1) // parts
    rest = take(step, start)[1] if start else step
    return take(rest, stop - start)[0]


@lru_cache(maxsize=64)  # nearly all steps have equal sizes
def _passes_of_rank(
    n: int, own: tuple[int, ...], ranks: int, parts: int, most: int | None
) -> list[Pass]:
    passes = number_of_passes(n, parts, most)
    counts: list[int] = []
    for size in own:
        counts += (b - a for a, b in pairwise(size * i // passes for i in range(passes + 1)))
    sizes = (n // parts + (part < n % parts) for part in range(parts))
    not_empty = sum(min(passes, size) for size in sizes)
    return [Pass(each, i, tuple(counts), n, not_empty, ranks) for i, each in enumerate(counts)]


def turns(parts: int, ranks: int) -> int:
    """Return the number of parts of a rank.

    >>> turns(parts=4, ranks=3)
    2
    """
    return -(-parts // ranks)


def number_of_passes(samples: int, ranks: int, most: int | None) -> int:
    largest = -(-samples // ranks)
    return 1 if most is None else max(1, -(-largest // most))


class LoaderPlan:
    """The samples of each pass of this rank: the `batch_sampler` of torch's loader.

    `number` is this worker's number, and `most` the maximum number of samples per pass.
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
        self._parts: int | None = None  # ranks of the full run, if a step keeps its micro-batches
        self._most = most
        self._shards = shards
        self._seen = -1  # the account's `changes` of the plan
        self._epoch = -1
        self._rest: Spans = ()  # positions of this worker that are not planned
        self.steps_left: int | None = None  # steps to plan; None: limited by the positions
        # On their way: this rank's passes, and positions by step.
        self._passes: deque[Pass] = deque()
        self._steps_ahead: deque[Spans] = deque()

    # -- for the loop --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of passes per rank in an epoch with a single worker."""
        batch = self._rules["batch"]
        whole, rest = divmod(self._rules["samples"], batch)
        passes = whole * self.passes_of(batch)
        if rest and not self._rules["drop_last"]:
            passes += self.passes_of(rest)
        return passes

    def passes_of(self, samples: int) -> int:
        """Return the number of passes in a step of this number of samples."""
        ranks = self._ranks.size
        parts = self._parts or ranks
        return number_of_passes(samples, parts, self._most) * turns(parts, ranks)

    def next_pass(self) -> Pass:
        now = self._passes.popleft()
        if now.last:
            self._steps_ahead.popleft()
        return now

    @property
    def has_more(self) -> bool:
        """Whether steps are left to plan. The number may grow after the loader has ended."""
        if self.steps_left is None:
            return count(self._rest) >= self._rules["batch"]
        return self.steps_left > 0

    def change_ranks(self, ranks: RankGroup, parts: int) -> None:
        self._ranks = ranks
        self._parts = None if self._most is None else parts
        self.begin()

    # -- changes of the account ----------------------------------------------------------------

    def begin(self) -> None:
        self._passes.clear()
        self._steps_ahead.clear()
        self._seen = -1

    def keep(self) -> None:
        """Keep the plan: the account's last change only committed the loop's samples."""
        self._seen = self._account.changes

    def has_changed(self) -> bool:
        """Follow the account. Return whether the plan had to restart."""
        # After a restart, loaded batches belong to other workers.
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

    # -- for torch's loader --------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of each of this rank's passes."""
        rules = self._rules
        which = (rules["seed"], self._account.ledger.epoch, rules["shuffle"])
        order: Order | ShardOrder = Order(rules["samples"], *which)
        if self._shards is not None:
            order = self._shards.order(*which)
        while planned := self._plan_steps():
            spans: list[tuple[int, int]] = []
            for each, own in planned:
                self._passes.append(each)
                spans += own
            # Permuting many positions costs little more than permuting a few.
            samples = order.indices(tuple(spans))
            start = 0
            for each, _ in planned:
                stop = start + max(1, each.samples)  # a filler has a single sample
                yield samples[start:stop]
                start = stop

    def _plan_steps(self) -> list[tuple[Pass, Spans]]:
        planned: list[tuple[Pass, Spans]] = []
        positions = 0
        while positions < MAPPED and self.has_more:
            if self.steps_left is not None:
                self.steps_left -= 1
            step, self._rest = take(self._rest, self._rules["batch"])
            self._steps_ahead.append(step)
            # The filler is the step's first sample, or any sample for an empty step.
            first = step[0][0] if step else 0
            filler = ((first, first + 1),)
            passes = divide_step(
                step,
                self._ranks.rank,
                self._ranks.size,
                self._most,
                parts=self._parts,
                in_turns=self._shards is not None,
            )
            for each, spans in passes:
                planned.append((each, spans or filler))
                positions += max(1, each.samples)
        return planned
