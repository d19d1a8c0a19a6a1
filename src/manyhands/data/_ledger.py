"""Record which positions of an epoch are committed, held or free, as an immutable value.

An epoch has positions 0 ... samples - 1. Each position is in one of three states:

    committed   trained, in a completed step or sync round
    held        assigned to a worker, which has not committed it
    free        never assigned (from `fresh` on), or taken back (`returned`)

    free ── hand_out ──▶ held ── commit ──▶ committed
      ▲                   │
      └──── keep_only ────┘        the worker left or died, or the positions were reassigned

A worker trains its positions in the order of `held`, so a single number, its count of trained
samples, describes a commit. In blocks the number is part of the report in a sync round
(`blocks/averaging/_payload.py`), and all workers compute the same ledger without further messages.
Ranks that take all steps together (DDP, ZeRO, FSDP) form a single worker.

Positions are stored as *spans*: half-open pairs (start, stop), in training order. This module uses
plain integers: no tensors, no process groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from manyhands._optimizers.state_parts import SavedEntries

Spans = tuple[tuple[int, int], ...]


def count(spans: Spans) -> int:
    """Return the number of positions in the ranges.

    >>> count(((0, 4), (10, 11)))
    5
    """
    return sum(stop - start for start, stop in spans)


def take(spans: Spans, number: int) -> tuple[Spans, Spans]:
    """Return up to `number` first positions, and the rest.

    >>> take(((0, 4), (10, 12)), 5)
    (((0, 4), (10, 11)), ((11, 12),))
    """
    taken: list[tuple[int, int]] = []
    for index, (start, stop) in enumerate(spans):
        if stop - start > number:
            cut = start + number
            first = (*taken, (start, cut)) if number else tuple(taken)
            return first, ((cut, stop), *spans[index + 1 :])
        taken.append((start, stop))
        number -= stop - start
    return tuple(taken), ()


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return disjoint ranges as sorted ranges that do not touch.

    >>> union([(10, 12), (0, 4), (4, 6)])
    ((0, 6), (10, 12))
    """
    joined = _join_neighbours(sorted(spans))
    assert all(a[1] < b[0] for a, b in pairwise(joined)), "a position is in two ranges"
    return joined


@dataclass(frozen=True)
class Ledger:
    """An epoch's ledger. Methods that change it return a new ledger."""

    samples: int  # in an epoch
    epoch: int = 0
    fresh: int = 0  # the first position that was never assigned
    returned: Spans = ()  # sorted, below `fresh`
    held: tuple[tuple[int, Spans], ...] = ()  # by worker number, sorted

    # -- questions -----------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """The number of positions neither held nor committed."""
        return self.samples - self.fresh + count(self.returned)

    @property
    def left(self) -> int:
        """The number of uncommitted positions."""
        return self.free + sum(count(spans) for _, spans in self.held)

    @property
    def committed(self) -> int:
        """The number of committed positions."""
        return self.samples - self.left

    def held_by(self, number: int) -> Spans:
        """Return the positions of a worker, in training order."""
        return dict(self.held).get(number, ())

    # -- changes -------------------------------------------------------------------------------

    def commit(self, taken: Mapping[int, int]) -> Ledger:
        """Commit the first positions of each worker; `taken` contains the numbers of positions."""
        held = dict(self.held)
        for number, samples in taken.items():
            if samples:
                done, held[number] = take(held.get(number, ()), samples)
                assert count(done) == samples, f"worker {number} took what it did not hold"
        return replace(self, held=_sorted(held))

    def keep_only(self, numbers: Mapping[int, object]) -> Ledger:
        """Take back the positions of all workers except these."""
        returned_spans = list(self.returned)
        held = {}
        for number, spans in self.held:
            if number in numbers:
                held[number] = spans
            else:
                returned_spans += spans
        returned = union(returned_spans)
        fresh = self.fresh
        if returned and returned[-1][1] == fresh:
            fresh = returned[-1][0]
            returned = returned[:-1]
        return replace(self, fresh=fresh, held=_sorted(held), returned=returned)

    def hand_out(self, wanted: Mapping[int, int], pinned: int = 0) -> Ledger:
        """Assign each of these workers the wanted number of positions, and other workers none.

        If there are too few positions, each worker gets the same fraction of its number. Workers
        keep positions up to the new number, because the samples may be loaded. The first `pinned`
        positions always stay, because they may have been trained. Returned positions are assigned
        before fresh positions.
        """
        ledger = self.keep_only(wanted)
        shares = divide(ledger.left, wanted)
        held: dict[int, Spans] = {}
        surplus: list[tuple[int, int]] = []
        for number, share in shares.items():
            own = ledger.held_by(number)
            held[number], rest = take(own, max(share, min(pinned, count(own))))
            surplus += rest
        pool = union((*ledger.returned, *surplus))
        fresh = ledger.fresh
        for number, share in shares.items():
            missing = max(0, share - count(held[number]))
            more, pool = take(pool, missing)
            missing = min(missing - count(more), self.samples - fresh)
            if missing:
                more = (*more, (fresh, fresh + missing))
                fresh = fresh + missing
            held[number] = _join_neighbours((*held[number], *more))
        return replace(ledger, fresh=fresh, returned=pool, held=_sorted(held))

    def next_epoch(self) -> Ledger:
        """Return the ledger of the next epoch."""
        return Ledger(self.samples, self.epoch + 1)

    # -- as plain values -----------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return the committed positions, for any number of workers. Held positions become free."""
        state = self.keep_only({}).state()
        return {"epoch": self.epoch, "fresh": state["fresh"], "returned": state["returned"]}

    @classmethod
    def of_saved(cls, samples: int, saved: Mapping[str, Any]) -> Ledger:
        """Return a `saved` ledger. Raise ValueError if it is not valid."""
        entries = SavedEntries(saved, "a position in the data")
        epoch = entries.whole("epoch")
        fresh = entries.whole("fresh")
        if fresh > samples:
            raise entries.wrong("fresh", f"at most {samples}, the number of samples", fresh)
        returned: list[tuple[int, int]] = []
        end = 0
        for start, stop in entries.pairs("returned"):
            if not end <= start < stop <= fresh or stop % 1:
                raise entries.wrong("returned", f"sorted ranges below {fresh}", saved["returned"])
            end = int(stop)
            returned.append((start, end))
        return cls(samples, epoch, fresh, tuple(returned))

    def state(self) -> dict[str, Any]:
        """Return the complete ledger in JSON types."""
        return {
            "samples": self.samples,
            "epoch": self.epoch,
            "fresh": self.fresh,
            "returned": _as_lists(self.returned),
            "held": [(number, _as_lists(spans)) for number, spans in self.held],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Ledger:
        """Return the ledger of a `state`."""
        held = {number: tuple(map(tuple, spans)) for number, spans in state["held"]}
        return replace(cls.of_saved(state["samples"], state), held=_sorted(held))


def divide(available: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Return the number of available positions for each worker.

    >>> divide(100, {0: 8, 1: 8})
    {0: 8, 1: 8}
    >>> divide(9, {0: 8, 1: 8, 2: 16})
    {0: 2, 1: 2, 2: 5}
    """
    total = sum(wanted.values())
    if available >= total:
        return dict(wanted)
    shares = {}
    before = 0
    for number, amount in wanted.items():
        after = before + amount
        shares[number] = available * after // total - available * before // total
        before = after
    return shares


def _sorted(held: Mapping[int, Spans]) -> tuple[tuple[int, Spans], ...]:
    return tuple((number, held[number]) for number in sorted(held) if held[number])


def _join_neighbours(spans: Sequence[tuple[int, int]]) -> Spans:
    """Return the ranges in order, with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _as_lists(spans: Spans) -> list[list[int]]:
    return [list(span) for span in spans]
