"""What one worker knows of an epoch: the ledger that all workers share, and what it took since.

    held ── handed_out ──▶ in a step ── step ──▶ taken ── commit ──▶ committed

`taken` goes to the other workers with the next sync round; then all of them commit what each one
took, and hand out anew what is left. So a worker that dies has committed nothing since the last
round, and what it held is handed out again.

`rules` are the plain values that all workers must have in common, beside the ledger:

    samples, shards, seed, shuffle, drop_last    of the epochs
    batch                                        samples that one worker takes in a step
    ahead                                        steps that a worker may load in advance

Everything here is plain values: no tensors, no process group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from manyhands.data._ledger import Ledger
from manyhands.data._spans import Spans, count, take

Rules = Mapping[str, Any]


class Account:
    """One worker's account."""

    def __init__(self) -> None:
        self.rules: Rules | None = None  # None: there is no cursor, nor a member that has one
        self.ledger = Ledger(0)
        self.committed_at = 0  # the step at which samples were counted that are committed
        self.taken = 0  # samples of the steps since then
        self._in_step = (0, 0)  # samples and steps that were handed to the loop since its last step
        self._steps_left: int | None = (
            None  # when it took that step; None: more than are handed out
        )
        self.due = False  # what is left is to be handed out anew
        self.received = False  # from another member, before there is a cursor here
        self.changes = 0  # counts what may have changed this worker's part

    def begin(self, rules: Rules, ledger: Ledger, step: int = 0) -> None:
        """Begin, or continue, with nothing taken."""
        self.rules, self.ledger, self.committed_at = rules, ledger, step
        self.taken, self._in_step = 0, (0, 0)
        self._change(due=True)

    def _change(self, *, due: bool) -> None:
        self.due = due
        self.changes += 1

    # -- a worker's own steps ------------------------------------------------------------------

    @property
    def in_step(self) -> int:
        """The samples that the loop was given since its last step."""
        return self._in_step[0]

    def handed_out(self, samples: int) -> None:
        """Count a worker's samples of a whole step, which the loop has now."""
        in_step, steps = self._in_step
        self._in_step = (in_step + samples, steps + 1)

    def step(self) -> None:
        """Count a step: the loop has trained on what it was given."""
        samples, steps = self._in_step
        self.taken += samples
        if self._steps_left is not None:
            self._steps_left -= steps
        self._in_step = (0, 0)

    def forget_step(self) -> None:
        """Take back what the loop was given since its last step."""
        self._in_step = (0, 0)

    # -- all workers together ------------------------------------------------------------------

    def commit(self, taken: Mapping[int, int], own: int, step: int = 0) -> None:
        """Commit what each worker took until this step; `own` is the number of this one."""
        if self.rules is None:
            return
        self.ledger, self.committed_at = self.ledger.commit(taken), step
        self.taken -= taken.get(own, 0)
        self._change(due=True)

    def hand_out(self, steps: Mapping[int, int], since: int = 0, own: int | None = None) -> None:
        """Hand out what is due: to each worker for so many steps, and for those it loads ahead.

        The workers have taken `since` steps more than they have committed. If each takes a number
        of steps of its own, `own` is the number of this worker.
        """
        if self.rules is None or not self.due:
            return
        batch, ahead = self.rules["batch"], since + self.rules["ahead"]
        wanted = {number: (each + ahead) * batch for number, each in steps.items()}
        before, self.ledger = self.ledger, self.ledger.hand_out(wanted, since * batch)
        self._change(due=False)
        amounts = [
            count(spans) - (since * batch if before.held_by(number) else 0)
            for number, spans in self.ledger.held
        ]
        if self.ledger.free:
            self._steps_left = None
        elif own is not None:
            self._steps_left = self._own_steps_left(amounts, len(steps), own)
        elif self.rules["drop_last"]:
            missing = len(amounts) < len(steps)
            self._steps_left = 0 if missing else max(0, min(amounts) // batch)
        else:
            self._steps_left = max(0, -(-max(amounts, default=0) // batch))

    def _own_steps_left(self, amounts: list[int], workers: int, own: int) -> int:
        """Return how many steps this worker has left of the last samples.

        Every worker takes one at least, or none does: each holds one round a block.
        """
        assert self.rules is not None
        batch, left = self.rules["batch"], count(self.ledger.held_by(own)) - self.taken
        if self.rules["drop_last"]:
            each_has_one = len(amounts) == workers and min(amounts) >= batch
            return left // batch if each_has_one else 0
        return max(-(-left // batch), 1 if amounts and not self.taken else 0)

    def to_plan(self, number: int) -> tuple[Spans, int | None]:
        """Return what a worker holds behind what its loop was given, and for how many steps.

        None: for as many as it fills. Otherwise nothing more is left, and all workers take as many
        steps, of which the last may be short, or empty.
        """
        samples, steps = self._in_step
        spans = take(self.ledger.held_by(number), self.taken + samples)[1]
        return spans, None if self._steps_left is None else self._steps_left - steps

    def next_epoch(self, step: int = 0) -> None:
        """Begin the next epoch. What was taken in this one counts as committed."""
        assert self.rules is not None
        self.begin(self.rules, self.ledger.next_epoch(), step)

    # -- between workers -----------------------------------------------------------------------

    def checksum(self) -> float:
        """Return a number that is equal on workers whose rules and ledgers are."""
        text = json.dumps([self.rules, self.ledger.all_of_it()])
        return float(zlib.crc32(text.encode()))

    def saved(self) -> dict[str, Any] | None:
        """Return what a joiner needs, in numbers and lists."""
        if self.rules is None:
            return None
        return {
            "rules": dict(self.rules),
            "ledger": self.ledger.all_of_it(),
            "committed_at": self.committed_at,
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Take over what another member has saved."""
        if saved is not None:
            self.begin(saved["rules"], Ledger.of(saved["ledger"]), saved["committed_at"])
            self.received = True
