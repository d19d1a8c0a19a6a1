"""Which samples the workers of blocks have: committed with the sync round, handed out for the next.

Every worker holds a part of the epoch (`data/_ledger.py`), and all of them have the same ledger:

    send      the note of the round that ends a block says how many samples the worker has taken
    commit    if the round is kept, all workers commit what each one took; if not, nothing changes
    members   who left or died holds nothing any more; a joiner receives the ledger with the state
    hand out  every member gets its part of what is left, for the steps until the next round

A worker that is left out of the mean, because its values are not finite, commits its samples all
the same: they count as those of a step that a gradient scaler skips.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.blocks._sync import Sync
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger


class BlockSamples:
    """This worker's samples, for a `Cursor`."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    @property
    def account(self) -> Account:
        return self._sync.account

    @property
    def number(self) -> int:
        """This worker's number."""
        return self._sync.number

    def begin(self, rules: Mapping[str, Any], ledger: Ledger) -> None:
        """Begin with this ledger, or go on with that of the members that are here already."""
        account = self.account
        if self._sync.every.own_steps and self._sync.schedule.overlap:
            raise ValueError(
                "a Cursor needs overlap=0 with own_steps=True: while a round is in flight, it is "
                "not known how many samples each worker has taken meanwhile. Leave overlap out."
            )
        if account.rules is None:
            account.begin(rules, ledger, self._sync.state.steps)
        elif not account.received:
            raise ValueError(
                "these blocks have a Cursor already, with which they commit samples. Make one "
                "Cursor for the training data, and others without optimizer=."
            )
        elif account.rules != rules:
            differ = ", ".join(
                f"{name}: {rules[name]} here, {value} in the run"
                for name, value in account.rules.items()
                if rules[name] != value
            )
            raise ValueError(
                f"this worker has joined a run whose Cursor differs ({differ}). Make the Cursor as "
                "it is in the run, or begin a new run."
            )
        account.received = False
        self.hand_out()

    def load(self, rules: Mapping[str, Any], ledger: Ledger) -> None:
        """Go on with a saved ledger."""
        if self._sync.joined_late:
            raise RuntimeError(
                "this worker has joined a run that goes on, and received its position. Load a "
                "checkpoint only where the run begins: if optimizer.steps == 0."
            )
        self.account.begin(rules, ledger, self._sync.state.steps)
        self.hand_out()

    def hand_out(self) -> None:
        """Hand out what is due."""
        self._sync.hand_out_samples()

    def next_epoch(self) -> None:
        """Begin the next epoch, on all workers after as many steps."""
        self.account.next_epoch(self._sync.state.steps)
        self.hand_out()

    def synchronize(self) -> None:
        """Hold a sync round with all other workers, which call this after as many steps."""
        self._sync.sync_now()
