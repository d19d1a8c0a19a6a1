"""Keep one worker's view of an epoch: the shared ledger, and the samples taken since.

    held ── add_to_step ──▶ in a step ── step ──▶ taken ── commit ──▶ committed

The next sync round brings each worker's `taken` to the others. Then all of them commit what each
one took, and hand out the rest again. So a worker that dies has committed nothing since the
last round, and the other workers get the samples that it held.

Everything here is plain values: no tensors, no process group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, TypedDict

from manyhands.data._ledger import Ledger, Spans, count, take
from manyhands.data._rules import Rules


class SavedAccount(TypedDict):
    """What a joiner receives of another member's account."""

    rules: Rules
    ledger: dict[str, Any]
    committed_at: int


class Account:
    """One worker's account."""

    def __init__(self) -> None:
        self.rules: Rules | None = None  # None: no worker has a cursor, as far as this one knows
        self.ledger = Ledger(0)
        self.committed_at = 0  # the step up to which samples are committed
        self.taken = 0  # samples of the steps since then
        # Samples and steps that the loop was given since its last optimizer step.
        self._in_step = (0, 0)
        # Steps that this worker had left at that step; None: more than have been handed out.
        self._steps_left: int | None = None
        self.due = False  # whether what is left has to be handed out again
        self.received = False  # whether they came from a member, and no cursor was made here yet
        self.changes = 0  # counts all that may change what this worker holds

    def begin(self, rules: Rules, ledger: Ledger, step: int = 0) -> None:
        """Begin with this ledger, new or saved, at this step, with nothing taken since."""
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
        """Samples that the loop was given since its last step."""
        return self._in_step[0]

    def add_to_step(self, samples: int) -> None:
        """Count this worker's samples of a whole step: the loop has them now."""
        in_step, steps = self._in_step
        self._in_step = (in_step + samples, steps + 1)

    def step(self) -> None:
        """Count an optimizer step: the loop has trained on what it was given."""
        samples, steps = self._in_step
        self.taken += samples
        if self._steps_left is not None:
            self._steps_left -= steps
        self._in_step = (0, 0)

    def forget_step(self) -> None:
        """Take back what the loop was given since its last step: it will not train on it."""
        self._in_step = (0, 0)

    # -- all workers together ------------------------------------------------------------------

    def commit(self, taken: Mapping[int, int], own: int, step: int = 0) -> None:
        """As a round is kept: commit what each worker took up to this step; `own` is our number."""
        if self.rules is None:
            return
        self.ledger = self.ledger.commit(taken)
        self.committed_at = step
        self.taken -= taken.get(own, 0)
        self._change(due=True)

    def hand_out(self, steps: Mapping[int, int], since: int = 0, own: int | None = None) -> None:
        """If it is due, hand out what is left to the workers of `steps`.

        Each gets positions for this number of steps, and for those that it loads ahead. The samples
        of the `since` steps since the last commit stay with their workers. If workers take
        different numbers of steps, `own` is the number of this worker.
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
        """Return the number of steps of this worker on the last samples of the epoch."""
        # Either every worker takes at least one step or none does, because all hold the next round.
        assert self.rules is not None
        batch = self.rules["batch"]
        left = count(self.ledger.held_by(own)) - self.taken
        if self.rules["drop_last"]:
            each_has_one = len(amounts) == workers and min(amounts) >= batch
            return left // batch if each_has_one else 0
        return max(-(-left // batch), 1 if amounts and not self.taken else 0)

    def to_plan(self, number: int) -> tuple[Spans, int | None]:
        """Return what a worker holds beyond what its loop was given, and the steps that it is for.

        None: as many steps as it fills. A number: these are the last samples of the epoch, and the
        worker takes this many steps, of which the last may be short, or empty.
        """
        samples, steps = self._in_step
        spans = take(self.ledger.held_by(number), self.taken + samples)[1]
        if self._steps_left is None:
            return spans, None
        return spans, self._steps_left - steps

    def next_epoch(self, step: int = 0) -> None:
        """Begin the next epoch. Everything that was taken in this one counts as committed."""
        assert self.rules is not None
        self.begin(self.rules, self.ledger.next_epoch(), step)

    # -- between workers -----------------------------------------------------------------------

    def checksum(self) -> float:
        """Return a checksum of rules and ledger."""
        text = json.dumps([self.rules, self.ledger.state()])
        return float(zlib.crc32(text.encode()))

    def saved(self) -> SavedAccount | None:
        """Return what a joiner needs; None without a cursor."""
        if self.rules is None:
            return None
        return {
            "rules": self.rules,
            "ledger": self.ledger.state(),
            "committed_at": self.committed_at,
        }

    def load(self, saved: SavedAccount | None) -> None:
        """As a joiner: take over the ledger that another member has sent."""
        if saved is not None:
            self.begin(saved["rules"], Ledger.of(saved["ledger"]), saved["committed_at"])
            self.received = True
