"""Track a worker's view of an epoch: shared ledger, and samples since the last commit.

    held ── add_to_step ──▶ in a step ── step ──▶ taken ── commit ──▶ committed

A sync round exchanges the workers' `taken`. Then all workers commit these samples and divide the
rest again. So the samples of a worker that dies after the last round go to the other workers.

This module uses plain values: no tensors, no process groups.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, TypedDict

from manyhands.data._ledger import Ledger, Spans, count, take
from manyhands.data._rules import Rules


class SavedAccount(TypedDict):
    """The state of an account for a joiner."""

    rules: Rules
    ledger: dict[str, Any]
    committed_at: int


class Account:
    """A worker's account."""

    def __init__(self) -> None:
        self.rules: Rules | None = None  # None: no worker is known to have a cursor
        self.ledger = Ledger(0)
        self.committed_at = 0  # the step of the last commit
        self.taken = 0  # samples of the steps since then
        # Samples and steps that the loop has received since the last optimizer step.
        self._in_step = (0, 0)
        # Steps that this worker had left at that step. None: more samples can be assigned.
        self._steps_left: int | None = None
        self.due = False  # whether the rest must be divided again
        self.received = False  # whether a member sent the state and no cursor was created here
        self.changes = 0  # counts changes that may affect this worker's positions

    def begin(self, rules: Rules, ledger: Ledger, step: int = 0) -> None:
        """Start with a new or saved ledger at this step."""
        self.rules = rules
        self.ledger = ledger
        self.committed_at = step
        self.taken = 0
        self._in_step = (0, 0)
        self._change(due=True)

    def _change(self, *, due: bool) -> None:
        self.due = due
        self.changes += 1

    # -- a worker's own steps ------------------------------------------------------------------

    @property
    def in_step(self) -> int:
        """Samples that the loop has received since the last step."""
        return self._in_step[0]

    def add_to_step(self, samples: int) -> None:
        """Count this worker's samples of a step on receipt by the loop."""
        in_step, steps = self._in_step
        self._in_step = (in_step + samples, steps + 1)

    def step(self) -> None:
        """Count an optimizer step, which trains the received samples."""
        samples, steps = self._in_step
        self.taken += samples
        if self._steps_left is not None:
            self._steps_left -= steps
        self._in_step = (0, 0)

    def forget_step(self) -> None:
        """Discard received samples that the loop will not train."""
        self._in_step = (0, 0)

    # -- all workers together ------------------------------------------------------------------

    def commit(self, taken: Mapping[int, int], own: int, step: int = 0) -> None:
        """Commit the samples of each worker up to this step. `own` is this worker's number."""
        if self.rules is None:
            return
        self.ledger = self.ledger.commit(taken)
        self.committed_at = step
        self.taken -= taken.get(own, 0)
        self._change(due=True)

    def hand_out(self, steps: Mapping[int, int], since: int = 0, own: int | None = None) -> None:
        """If due, divide the rest among the workers of `steps`.

        Each worker receives positions for this number of steps, and for steps that it loads ahead.
        Samples of the `since` steps after the last commit stay with their workers. If workers take
        different numbers of steps, `own` is this worker's number.
        """
        if self.rules is None or not self.due:
            return
        batch = self.rules["batch"]
        ahead = since + self.rules["ahead"]
        wanted = {number: (each + ahead) * batch for number, each in steps.items()}
        before = self.ledger
        self.ledger = self.ledger.hand_out(wanted, since * batch)
        self._change(due=False)
        amounts = []
        for number, spans in self.ledger.held:
            amount = count(spans)
            if before.held_by(number):
                amount -= since * batch
            amounts.append(amount)
        if self.ledger.free:
            self._steps_left = None
        elif own is not None:
            self._steps_left = self._own_steps_left(amounts, len(steps), own)
        elif self.rules["drop_last"] and len(amounts) < len(steps):
            self._steps_left = 0
        elif self.rules["drop_last"]:
            self._steps_left = max(0, min(amounts) // batch)
        else:
            self._steps_left = max(0, -(-max(amounts, default=0) // batch))

    def _own_steps_left(self, amounts: list[int], workers: int, own: int) -> int:
        """Return this worker's number of steps on the last samples of the epoch."""
        # Either every worker takes a step or no worker does, because all take part in the next
        # round.
        assert self.rules is not None
        batch = self.rules["batch"]
        left = count(self.ledger.held_by(own)) - self.taken
        if self.rules["drop_last"]:
            each_has_one = len(amounts) == workers and min(amounts) >= batch
            return left // batch if each_has_one else 0
        return max(-(-left // batch), 1 if amounts and not self.taken else 0)

    def to_plan(self, number: int) -> tuple[Spans, int | None]:
        """Return a worker's positions after the loop's positions, and the number of steps.

        None means that the positions limit the steps. A number means the last samples of the epoch;
        the last step may then be short or empty.
        """
        samples, steps = self._in_step
        spans = take(self.ledger.held_by(number), self.taken + samples)[1]
        if self._steps_left is None:
            return spans, None
        return spans, self._steps_left - steps

    def next_epoch(self, step: int = 0) -> None:
        """Start the next epoch. All samples of this epoch count as committed."""
        assert self.rules is not None
        self.begin(self.rules, self.ledger.next_epoch(), step)

    # -- between workers -----------------------------------------------------------------------

    def checksum(self) -> float:
        """Return a checksum of rules and ledger."""
        text = json.dumps([self.rules, self.ledger.state()])
        return float(zlib.crc32(text.encode()))

    def saved(self) -> SavedAccount | None:
        """Return the state for a joiner. None: this worker has no cursor."""
        if self.rules is None:
            return None
        return {
            "rules": self.rules,
            "ledger": self.ledger.state(),
            "committed_at": self.committed_at,
        }

    def load(self, saved: SavedAccount | None) -> None:
        """Load the state that a member has sent to this joiner."""
        if saved is not None:
            self.begin(saved["rules"], Ledger.of(saved["ledger"]), saved["committed_at"])
            self.received = True
